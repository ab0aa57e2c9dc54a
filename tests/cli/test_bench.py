"""Tests of `robopolicy bench`: several seeds, their report, and resuming."""

import json

import pytest

from robopolicy.cli.main import main
from robopolicy.training import many_runs
from robopolicy.training.loop import Trainer

PPO = ["task=point_mass", "task.reward=shaped", "algorithm=ppo", "policy=gaussian", "sim.num_envs=4"]
QUICK = [*PPO, "algorithm.num_steps=8", "budget.updates=2", "evaluation.episodes=2"]


def test_seeds_are_trained_and_reported_together(tmp_path, capsys):
    out = tmp_path / "bench"
    assert main(["bench", "--seeds", "2", "--out", str(out), *QUICK, "seed=3"]) == 0
    printed = capsys.readouterr().out
    assert "2 seeds" in printed and "final return" in printed and "Only 2 seeds" in printed
    report = json.loads((out / "report.json").read_text())
    runs = [json.loads((out / name / "report.json").read_text()) for name in ("seed3", "seed4")]
    assert report["seeds"] == [3, 4] and report["base"] is None
    final = report["final"]["return_mean"]
    assert final["by_seed"] == [run["final"]["return_mean"] for run in runs]
    assert final["low"] <= final["value"] <= final["high"]
    assert (out / "curves.png").stat().st_size > 1000
    assert "| final success |" in (out / "report.md").read_text()


def test_finished_seeds_are_reused_and_interrupted_seeds_resume(tmp_path, monkeypatch, capsys):
    words = ["bench", "--out", str(tmp_path / "bench"), *QUICK]
    assert main([*words, "--seeds", "1"]) == 0
    whole = json.loads((tmp_path / "bench/report.json").read_text())
    iterate = Trainer._iterate

    def stopped(trainer: Trainer) -> None:
        iterate(trainer)
        trainer._signal = 2

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_iterate", stopped)
        assert main([*words, "--seeds", "2"]) == 130
        assert "same command" in capsys.readouterr().out
    assert main([*words, "--seeds", "2"]) == 0
    report = json.loads((tmp_path / "bench/report.json").read_text())
    assert report["seeds"] == [0, 1] and report["seconds"][0] == whole["seconds"][0]
    assert report["final"]["return_mean"]["by_seed"][0] == whole["final"]["return_mean"]["by_seed"][0]


def test_seeds_missing_from_the_report_are_named(tmp_path, capsys):
    words = ["bench", "--seeds", "1", "--out", str(tmp_path / "bench"), *QUICK, "evaluation.episodes=0"]
    assert main(words) == 0
    assert "are not in the report" not in capsys.readouterr().out
    assert main([*words, "seed=4"]) == 0
    assert f"note: seed0 of {tmp_path}/bench are not in the report" in capsys.readouterr().out


def test_changed_settings_and_invalid_options_are_refused(tmp_path, capsys):
    words = ["bench", "--seeds", "1", "--out", str(tmp_path / "bench"), *QUICK, "evaluation.episodes=0"]
    assert main(words) == 0
    assert main([*words, "algorithm.lr=1e-3"]) == 2
    assert "has other settings" in capsys.readouterr().err
    for wrong, words in (("drop out=", [*QUICK, "name=a"]), ("--seeds", [*QUICK, "--seeds", "0"])):
        assert main(["bench", "--out", str(tmp_path / "other"), *words]) == 2
        assert wrong in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_seeds_in_processes_give_the_same_runs(tmp_path):
    for name, jobs in (("one", "1"), ("two", "2")):
        assert main(["bench", "--seeds", "2", "--jobs", jobs, "--out", str(tmp_path / name), *QUICK]) == 0
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert one["final"] == two["final"]


def test_undefined_scores_are_omitted():
    scores = many_runs._scores([{"success": None, "return_mean": 1.0}, {"success": None, "return_mean": 3.0}])
    assert scores is not None and list(scores) == ["return_mean"] and scores["return_mean"]["value"] == 2.0
    assert many_runs._scores([None, None]) is None
