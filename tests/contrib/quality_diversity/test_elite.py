"""End-to-end tests of an archive: train, inspect the archive, extract an elite and evaluate it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from robopolicy.cli.main import main

SMALL = [
    "experiment=arm_dcg_map_elites",
    "policy.hidden=[16,16]",
    *(
        f"algorithm.{key}={value}"
        for key, value in {"cells": 32, "ga_offspring": 4, "pg_offspring": 2, "actors": 2}.items()
    ),
    *("algorithm.critic_steps=3", "algorithm.pg_steps=2", "sim.num_envs=8"),
    *("budget.updates=2", "evaluation.episodes=2", "logging.every=1"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ribs")
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", *SMALL, f"out={folder}", "name=arm"]) == 0
    return folder / "arm"


def test_a_run_logs_its_archive_and_saves_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    assert {"archive/qd_score", "archive/coverage", "archive/max_fitness"} <= row.keys()
    assert main(["elite", str(trained), "--json"]) == 0
    archive = json.loads(capsys.readouterr().out)
    assert archive["coverage"] == len(archive["fitness"]) / 32
    assert archive["max_fitness"] == max(archive["fitness"])


def test_an_elite_is_a_checkpoint_that_can_be_evaluated(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "elite"
    words = ["elite", str(trained), "--descriptor", "0.9", "0.5", "--out", str(taken), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["verify", str(taken)]) == 0
    assert main(["eval", str(taken), "--episodes", "4", "--out", str(tmp_path / "report")]) == 0
    assert 0 < found["fitness"] <= 20


def test_invalid_options_are_refused_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["elite", str(tmp_path)], "is not a run"),
        (["elite", str(trained), "--descriptor", "0.5", "0.5"], "--out needs --descriptor or --rank"),
        (["elite", str(trained), "--rank", "1"], "--out needs --descriptor or --rank"),
        (["elite", str(trained), "--descriptor", "0.5", "--out", str(tmp_path / "x")], "2 numbers, got 1"),
        (["elite", str(trained), "--descriptor", "nan", "0.5", "--out", str(tmp_path / "x")], "got nan, 0.5"),
        (["elite", str(trained), "--descriptor", "-1", "0.5", "--out", str(tmp_path / "x")], "lie in [0, 1]"),
        (["elite", str(trained), "--rank", "99", "--out", str(tmp_path / "x")], "no rank 99"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_stax_run_saves_its_rewarded_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"population": 4, "chunk": 12, "emitter": 2, "floor": -1.0, "hidden": "[4]", "epochs": 1}
    words = ["experiment=point_mass_stax", "policy.hidden=[8]", "sim.num_envs=8", "evaluation.episodes=2"]
    words += [f"algorithm.{key}={value}" for key, value in settings.items()]
    assert main(["train", *words, "budget.updates=4", f"out={tmp_path}", "name=run"]) == 0
    capsys.readouterr()
    run, taken = str(tmp_path / "run"), str(tmp_path / "second")
    assert main(["elite", run, "--json"]) == 0
    fitness = json.loads(capsys.readouterr().out)["fitness"]
    assert fitness == sorted(fitness, reverse=True) and len(fitness) > 2
    assert main(["elite", run, "--rank", "2", "--out", taken, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fitness"] == fitness[1]
    assert main(["verify", taken]) == 0
    assert main(["elite", run]) == 0
    assert f"{len(fitness)} elites" in capsys.readouterr().out
    assert main(["elite", run, "--descriptor", "0.5", "0.5", "--out", str(tmp_path / "no")]) == 2
    assert "pass --rank" in capsys.readouterr().err
