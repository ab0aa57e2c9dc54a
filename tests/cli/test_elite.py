"""The whole path of a repertoire: train, stop, resume, look at the archive, take an elite out, evaluate it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from robopolicy.cli.main import main

pytest.importorskip("ribs")

SMALL = [
    "experiment=arm_dcg_map_elites",
    "policy.hidden=[16,16]",
    *(f"algorithm.{key}={value}" for key, value in {"cells": 32, "mutants": 4, "climbers": 2, "actors": 2}.items()),
    *("algorithm.critic_steps=3", "algorithm.climb_steps=2", "sim.num_envs=8"),
    *("budget.updates=2", "evaluation.episodes=2", "logging.every=1"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_mistakes_are_told_in_one_line(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["elite", str(tmp_path)], "is not a run"),
        (["elite", str(trained), "--descriptor", "0.5", "0.5"], "belong together"),
        (["elite", str(trained), "--descriptor", "0.5", "--out", str(tmp_path / "x")], "2 numbers, got 1"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
