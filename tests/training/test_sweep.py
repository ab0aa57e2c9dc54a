"""Tests of `robopolicy train --multirun`: the runs of a sweep, and training with Hydra's launchers."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from robopolicy.cli.main import main
from robopolicy.sim.contract import TensorSpec
from robopolicy.training import many_runs
from robopolicy.training.build import RunComponents
from robopolicy.training.config import TaskConfig
from robopolicy.training.many_runs import combinations

POINT_MASS = ["task=point_mass", "task.reward=shaped", "policy=gaussian", "sim.num_envs=4", "algorithm.num_steps=8"]
QUICK = [*POINT_MASS, "budget.updates=2", "evaluation.episodes=0"]
POLICIES = [*(word for word in QUICK if not word.startswith("policy=")), "policy=gaussian,mixture"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Changes to a temporary working folder, since launchers write there."""
    monkeypatch.chdir(tmp_path)


def test_every_combination_is_a_run_named_after_its_changes():
    words = [*POLICIES, "algorithm=ppo", "seed=range(0,2)", "hydra/launcher=joblib"]
    configs, launcher = combinations(words)
    assert launcher == ["hydra/launcher=joblib"]
    assert [(config.policy["name"], config.seed) for config in configs] == [
        ("gaussian", 0),
        ("gaussian", 1),
        ("mixture", 0),
        ("mixture", 1),
    ]
    assert configs[2].name == "policy=mixture,seed=0"


def test_runs_of_a_sweep_are_named_after_what_differs_and_lists_are_no_sweeps():
    words = ["experiment=from_scratch", "task=half_cheetah", "policy.hidden=[8,8]", "algorithm.lr=1e-3,1e-4"]
    configs, _ = combinations(words)
    assert [config.name for config in configs] == [f"algorithm.lr={lr}" for lr in ("0.001", "0.0001")]
    assert configs[0].policy["hidden"] == [8, 8]
    tasks, _ = combinations(["experiment=from_scratch", "task=locomotion/hopper,locomotion/walker2d"])
    assert [config.name for config in tasks][1] == "task=locomotion-walker2d"
    named, _ = combinations(["experiment=go1_ppo", "seed=0,1"])
    assert [config.name for config in named] == ["go1_ppo_seed=0", "go1_ppo_seed=1"]


@pytest.mark.parametrize(
    "wrong", ["algorithm=ppo,nope", "seed=interval(0,1)", "seed=range(2,2)", "algorithm.lr=1e-3,-1"]
)
def test_nothing_is_trained_when_one_run_is_wrong(tmp_path, capsys, wrong):
    assert main(["train", "--multirun", *QUICK, "algorithm=ppo", wrong, f"out={tmp_path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (["policy=gaussian,flow", "algorithm=ppo"], "requires dataset statistics for its normalisers"),
        (["policy=gaussian", "algorithm=ppo,dsrl_na"], "'gaussian' takes none"),
        (["policy=gaussian", "algorithm=ppo", "device=cpu,meta"], "Device 'meta' cannot be used"),
    ],
)
def test_refusals_of_policy_and_algorithm_come_before_the_first_run(tmp_path, refused, sweep, message):
    settings = [text for text in QUICK if not text.startswith(("policy", "algorithm"))]
    assert message in refused("train", "--multirun", *settings, *sweep, f"out={tmp_path}/out")
    assert not (tmp_path / "out").exists()


def test_validation_builds_no_simulator_unless_the_dummy_spec_is_refused(monkeypatch):
    built = []
    monkeypatch.setattr(many_runs, "build", lambda config: built.append(config) or RunComponents(*[Mock()] * 6))
    settings = [*QUICK, "algorithm=ppo", "task.obs_keys=[state]", "seed=0,1"]
    combinations(settings)
    assert not built
    other = replace(many_runs.dummy_spec(TaskConfig()), observation={"other": TensorSpec((3,))})
    monkeypatch.setattr(many_runs, "dummy_spec", lambda task: other)
    configs, _ = combinations(settings)
    assert built == configs[:1]  # the seeds differ only


def test_stopped_sweep_reports_how_to_continue(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("robopolicy.training.many_runs.launch", Mock(side_effect=KeyboardInterrupt))
    assert main(["train", "--multirun", *QUICK, "algorithm=ppo", f"out={tmp_path}"]) == 130
    assert "run the same command again to continue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("choice", "message"),
    [("nope", "Unknown launcher 'nope'"), ("submitit_slurm", "submitit"), ("basic hydra.launcher.x=1", "Hydra: ")],
)
def test_launchers_that_are_missing_or_set_wrongly_are_named(capsys, choice, message):
    if choice == "submitit_slurm":
        try:
            import hydra_plugins.hydra_submitit_launcher  # noqa: F401

            pytest.skip("it is installed")
        except ImportError:
            pass
    assert main(["train", "--multirun", *QUICK, "algorithm=ppo", *f"hydra/launcher={choice}".split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_basic_launcher_trains_all_runs_and_keeps_finished_ones(tmp_path, capsys):
    words = ["train", "--multirun", *POLICIES, "algorithm=ppo", f"out={tmp_path / 'out'}"]
    assert main(words) == 0
    reports = [tmp_path / f"out/policy={name}/report.json" for name in ("gaussian", "mixture")]
    written = [(json.loads(file.read_text())["algorithm"], file.stat().st_mtime_ns) for file in reports]
    assert [name for name, _ in written] == ["ppo", "ppo"]
    assert main(words) == 0
    assert [file.stat().st_mtime_ns for file in reports] == [when for _, when in written]
    (tmp_path / "out/policy=gaussian/config.yaml").write_text("seed: 1\n")
    assert main(words) == 2
    assert "1 of 2 runs failed, first policy=gaussian" in capsys.readouterr().err


@pytest.mark.slow
def test_joblib_trains_in_processes(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert main(["train", "--multirun", *POLICIES, "algorithm=ppo", f"out={tmp_path / 'out'}", *launcher]) == 0
    assert (tmp_path / "out/policy=mixture/report.json").exists()
