"""Tests of `robopolicy bench`: several seeds, their report, and resuming."""

import json
import signal
import subprocess
import sys
import time

import pytest
from own_arm import record

from robopolicy.cli.main import main
from robopolicy.training import many_runs
from robopolicy.training.queue import QueueReport

PPO = ["task=point_mass", "task.reward=shaped", "algorithm=ppo", "policy=gaussian", "sim.num_envs=4"]
QUICK = [*PPO, "algorithm.num_steps=8", "budget.updates=2", "evaluation.episodes=2"]


@pytest.fixture
def in_process(monkeypatch):
    """Run the jobs in this process, which starts faster; `tests/training/test_queue.py` tests the queue."""

    def run_queue(jobs, work, **_):
        missing = [job for job in jobs if not job.is_done()]
        for job in missing:
            job.run(work)
        return QueueReport(done=[job.name for job in missing])

    monkeypatch.setattr(many_runs, "run_queue", run_queue)


@pytest.mark.usefixtures("in_process")
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
    assert final["low"] <= final["estimate"] <= final["high"]
    assert (out / "curves.png").stat().st_size > 1000
    assert "| final success |" in (out / "report.md").read_text()


@pytest.mark.usefixtures("in_process")
def test_runs_without_a_simulator_report_their_action_errors(tmp_path, capsys):
    data = record(tmp_path / "arm")
    words = ["task=none", "algorithm=bc", "policy=gaussian", "policy.hidden=[8]", "budget.updates=2"]
    out = tmp_path / "bench"
    assert main(["bench", "--seeds", "2", "--out", str(out), f"dataset={data}", *words]) == 0
    assert "final action error" in capsys.readouterr().out
    final = json.loads((out / "report.json").read_text())["final"]
    assert list(final) == ["action_error"] and len(final["action_error"]["by_seed"]) == 2
    assert (out / "curves.png").exists()


@pytest.mark.slow
def test_finished_seeds_are_reused_and_interrupted_seeds_resume(tmp_path):
    out = tmp_path / "bench"
    words = ["--out", str(out), *QUICK[:-2], "evaluation.episodes=2", "budget.updates=300", "checkpoint_every=10"]
    process = subprocess.Popen([sys.executable, "-m", "robopolicy", "bench", "--seeds", "2", "--jobs", "1", *words])
    last = out / "seed1/checkpoints/last"
    while not last.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143 and not (out / "seed1/report.json").exists()
    first = (out / "seed0/report.json").read_text()
    assert main(["bench", "--seeds", "2", *words]) == 0
    assert json.loads((out / "report.json").read_text())["seeds"] == [0, 1]
    assert (out / "seed0/report.json").read_text() == first


@pytest.mark.parametrize(
    ("queue", "code"), [(QueueReport(interrupted=["seed0"], signal=2), 130), (QueueReport(elsewhere=["seed0"]), 1)]
)
def test_runs_that_have_not_ended_are_not_reported(tmp_path, monkeypatch, capsys, queue, code):
    monkeypatch.setattr(many_runs, "run_seeds", lambda *_, **__: queue)
    assert main(["bench", "--out", str(tmp_path / "bench"), *QUICK]) == code
    assert "run the same command again" in capsys.readouterr().out
    assert not (tmp_path / "bench/report.json").exists()


def test_failed_runs_are_named_with_their_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(many_runs, "run_seeds", lambda *_, **__: QueueReport(failed=["seed3"]))
    assert main(["bench", "--out", str(tmp_path / "bench"), *QUICK]) == 2
    assert "seed3 failed; see" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_seeds_missing_from_the_report_are_named(tmp_path, capsys):
    words = ["bench", "--seeds", "1", "--out", str(tmp_path / "bench"), *QUICK, "evaluation.episodes=1"]
    assert main(words) == 0
    assert "are not in the report" not in capsys.readouterr().out
    assert main([*words, "seed=4"]) == 0
    assert f"note: seed0 of {tmp_path}/bench are not in the report" in capsys.readouterr().out


@pytest.mark.usefixtures("in_process")
def test_changed_settings_and_invalid_options_are_refused(tmp_path, capsys):
    words = ["bench", "--seeds", "1", "--out", str(tmp_path / "bench"), *QUICK, "evaluation.episodes=1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "1 seed " in printed and printed.count(" [-] ") >= 2 and "note: One seed gives no interval" in printed
    assert main([*words, "algorithm.lr=1e-3"]) == 2
    assert "has other settings" in capsys.readouterr().err
    assert main([*words, "algorithm.lr=1e-3", "seed=1"]) == 2  # no folder of that seed exists
    assert "has other settings" in capsys.readouterr().err
    assert main([*words, "seed=1"]) == 0
    refused = {
        "drop out=": [*QUICK, "name=a"],
        "--seeds": [*QUICK, "--seeds", "0"],
        "evaluation.episodes must be at least 1": [*QUICK, "evaluation.episodes=0"],
    }
    for wrong, words in refused.items():
        assert main(["bench", "--out", str(tmp_path / "other"), *words]) == 2
        assert wrong in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_undefined_scores_are_omitted():
    summary = {"success": None, "n": 2}
    scores = many_runs._scores([{**summary, "return_mean": 1.0}, {**summary, "return_mean": 3.0}])
    assert scores is not None and list(scores) == ["return_mean"] and scores["return_mean"]["estimate"] == 2.0
    assert many_runs._scores([None, None]) is None


def test_intervals_of_few_episodes_hold_only_possible_values():
    scores = many_runs._scores([{"success": rate, "action_error": 0.01 + rate, "n": 1} for rate in (0.0, 1.0)])
    assert scores is not None and (scores["success"]["low"], scores["success"]["high"]) == (0.0, 1.0)
    assert scores["action_error"]["low"] == 0.0


def test_scores_count_seeds_not_episodes():
    scores = many_runs._scores([{"success": rate, "return_mean": rate, "n": 100} for rate in (0.2, 0.5, 0.8)])
    assert scores is not None and scores["success"]["n"] == 3
    assert scores["success"]["low"] < 0.1 and scores["success"]["high"] > 0.9  # three seeds that disagree
