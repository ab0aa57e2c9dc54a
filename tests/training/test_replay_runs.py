"""Tests of replay runs: schedules from offline to online, budgets, resume, guards, and refused settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import COMMON, QUICK, assert_interruption_changes_nothing, assert_refused, spy, trainer
from resumed_runs import assert_identical, kill_and_resume

from robopolicy.cli.main import main
from robopolicy.sim.contract import VectorSim
from robopolicy.training import loop
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.replay_source import ReplaySource
from robopolicy.training.runs import resume_run
from robopolicy_tasks.toy.point_mass import PointMassSim

SAC_RUN = [*COMMON, "algorithm=sac"]


RAW_FLOW = ["policy=flow", "policy.normalization=identity", "policy.action_normalization=identity"]


FLASH_RUN = ["task=point_mass", "task.reward=shaped", *QUICK, "chunk.horizon=1", "chunk.action_horizon=1"]
FLASH_RUN += ["policy=flash_sac", "policy.hidden=[16]", "algorithm=flash_sac", "algorithm.batch_size=16"]
FLASH_RUN += [
    "algorithm.critic.hidden=[16]",
    "algorithm.critic.bins=11",
    "replay.return_max=5",
    "replay.noise_repeat=4",
]


RLPD_RUN = [*COMMON, "algorithm=rlpd", "algorithm.utd=2", "algorithm.policy_delay=2"]


BATCH_NORM = ["algorithm.critic.backbone=inverted_residual"]


# Schedules and budgets.


def test_rewards_are_scaled_when_they_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = spy(monkeypatch)
    run = trainer(tmp_path, *FLASH_RUN, "budget.updates=3")
    run.train()
    source: Any = run.source
    replay, scale = source.sampler.replay, source.sampler.replay.return_scale
    assert len(batches[-1]) == 2 * 16  # two gradient steps, whatever the number of environments
    replay.return_scale = None
    raw = replay.take(batches[-1].index, source.sample_spec)
    torch.testing.assert_close(batches[-1].reward, scale.factor() * raw.reward)
    assert float(scale.factor()) != 1


def test_sac_runs_from_the_command_line(tmp_path: Path) -> None:
    settings = [setting for setting in SAC_RUN if "evaluation" not in setting]
    assert main(["train", *settings, "budget.env_steps=300", "evaluation.episodes=5", f"out={tmp_path}"]) == 0
    run = tmp_path / "point_mass_gaussian_sac_seed0"
    report = json.loads((run / "report.json").read_text())
    assert report["total_updates"] == (300 - 107) // (4 * 2)  # four environments, two actions per decision
    assert 250 < report["env_steps"] <= 300 and report["final"]["n"] == 5
    assert main(["verify", str(run / "checkpoints" / "last")]) == 0
    rows = read_jsonl(run / "metrics.jsonl")
    assert {"critic/loss", "actor/temperature", "rollout/return"} <= {key for row in rows for key in row}


def test_rollouts_begin_with_a_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = spy(monkeypatch)
    run = trainer(tmp_path, *SAC_RUN, "budget.updates=3", "algorithm.utd=2", "algorithm.num_steps=3")
    run.train()
    assert [len(batch) for batch in batches] == [16 * 2 * 4 * 3] * 3  # batch_size * utd * environments * decisions
    assert all(batch.online.all() for batch in batches)
    assert 100 + 2 * 24 < run.source.env_steps <= 108 + 3 * 24


def test_learning_goes_from_offline_to_online(
    tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy(monkeypatch)
    settings = [*SAC_RUN, f"dataset={demonstrations}", "replay.offline_updates=4", "replay.offline_fraction=0.25"]
    run = trainer(tmp_path, *settings, "budget.env_steps=150")
    assert run.total == 4 + 5  # five times eight steps after at most 107 of the warm-up
    steps: list[int] = []
    monkeypatch.setattr(run.source, "metrics", lambda: steps.append(run.source.env_steps) or {})
    run.train()
    assert steps[:4] == [0] * 4 and steps[4] > 100
    assert [len(batch) for batch in batches] == [16] * 4 + [16 * 4] * 5
    assert [float(batch.online.float().mean()) for batch in batches] == [0.0] * 4 + [0.75] * 5


def test_batches_have_the_fraction_of_the_dataset_among_all_steps(
    tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy(monkeypatch)
    settings = [*SAC_RUN, f"dataset={demonstrations}", "replay.offline_fraction=null", "algorithm.batch_size=1000"]
    run = trainer(tmp_path, *settings, "budget.updates=1")
    run.train()
    assert isinstance(run.source, ReplaySource) and run.source.offline is not None
    online = run.source.env_steps / (run.source.offline.length + run.source.env_steps)
    assert 0.05 < online < 0.95
    assert float(batches[0].online.float().mean()) == pytest.approx(online, abs=1e-3)


def test_offline_learning_takes_no_steps(tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = spy(monkeypatch)
    settings = [*SAC_RUN, f"dataset={demonstrations}", "budget.updates=5", "replay.offline_updates=5"]
    run = trainer(tmp_path, *settings)
    report = run.train()
    assert report["env_steps"] == 0 and run.parts.eval_sim is None
    assert not any(batch.online.any() for batch in batches)
    # The task sets the action bounds, not the dataset.
    policy: Any = run.algorithm.policy
    assert policy.action_normalizer.scale.tolist() == [1.0, 1.0]


def test_rlpd_mixes_demonstrations_into_every_minibatch(
    tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy(monkeypatch)
    run = trainer(tmp_path, *RLPD_RUN, f"dataset={demonstrations}", "budget.updates=3")
    run.train()
    for batch in batches:
        for part in batch.split(16):
            assert part.online.tolist() == [False] * 8 + [True] * 8


def test_the_task_may_come_from_the_dataset(tmp_path: Path, demonstrations: Path) -> None:
    settings = [setting for setting in SAC_RUN if setting != "task=point_mass"]
    chunk = ["chunk.horizon=4", "chunk.action_horizon=2"]
    assert main(["train", *settings, *chunk, f"dataset={demonstrations}", "budget.updates=2", f"out={tmp_path}"]) == 0
    assert (tmp_path / "point_mass_gaussian_sac_seed0").exists()


def test_prioritised_replay_updates_its_priorities(tmp_path: Path, demonstrations: Path) -> None:
    settings = [*RLPD_RUN, f"dataset={demonstrations}", "budget.updates=4", "replay.prioritized=0.7"]
    run = trainer(tmp_path, *settings)
    run.train()
    source: Any = run.source
    source._update_priorities()
    for memory in (source.offline, source.sampler.replay):
        leaves = memory.priorities.tree[memory.priorities.leaves :]
        assert len(set(leaves[leaves > 0].round(9))) > 5  # the priorities differ


# Resume and guards.


@pytest.mark.parametrize(
    "kind",
    [
        "prioritized",
        "offline",
        "flash",
        "overlap",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sac", "rlpd")),
    ],
)
def test_interrupted_run_resumes_bit_identically(
    kind: str, tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"dataset={demonstrations}"
    settings = {
        "sac": [*SAC_RUN, "chunk.obs_horizon=2"],
        "flash": FLASH_RUN,
        "overlap": [*FLASH_RUN, "sim.overlap=1"],
        "rlpd": [*RLPD_RUN, data, "replay.offline_updates=2"],
        "prioritized": [*RLPD_RUN, data, "replay.prioritized=0.6"],
        "offline": [*SAC_RUN, data, "replay.offline_updates=8", "replay.prioritized=0.6"],
    }[kind]
    assert_interruption_changes_nothing(settings, tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically(tmp_path: Path, demonstrations: Path) -> None:
    settings = [*RLPD_RUN, f"dataset={demonstrations}", "budget.updates=150", "checkpoint_every=10"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    assert_identical(tmp_path / "whole", kill_and_resume(settings, tmp_path))


def test_backends_without_saved_state_keep_the_replay_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PointMassSim, "state_dict", VectorSim.state_dict)
    run = trainer(tmp_path, *SAC_RUN, "budget.updates=4", "checkpoint_every=1")
    run.total = 3
    monkeypatch.setattr(run, "_finish", dict)
    run.train()
    before: Any = run.source
    resumed = resume_run(tmp_path / "run")
    assert "starts new episodes" in capsys.readouterr().out
    after: Any = resumed.source
    assert after.env_steps == before.env_steps > 0
    assert len(after.sampler.replay) == len(before.sampler.replay)
    assert after.sampler.sim.sim.episode_seed.min() > before.sampler.sim.sim.episode_seed.max()
    assert resumed.train()["env_steps"] > before.env_steps


def test_only_a_collapse_at_the_end_restores_the_best_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([0.9, 0.1, 0.1])

    class Result:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def summary(self) -> dict[str, Any]:
            interval = {"low": self.rate - 0.05, "high": self.rate + 0.05, "n": 100}
            returns = {"return_mean": 0.0, "return_low": 0.0, "return_high": 0.0}
            return {"success": self.rate, **interval, **returns}

    monkeypatch.setattr(loop, "evaluate", lambda *args, **kwargs: Result(next(results)))
    settings = [setting for setting in SAC_RUN if "evaluation" not in setting]
    run = trainer(tmp_path, *settings, "budget.updates=3", "evaluation.every=1", "evaluation.episodes=1")
    report = run.train()
    assert (report["num_restores"], report["best"]["update"], run.algorithm.updates) == (1, 1, 1)


# Refusals.


@pytest.mark.parametrize(
    "settings, message",
    [
        ([*RLPD_RUN, "budget.updates=1"], "also needs demonstrations; pass dataset=FOLDER"),
        ([*SAC_RUN, "budget.updates=1", "replay.offline_updates=1"], "offline_updates needs a dataset"),
        ([*SAC_RUN, "budget.env_steps=80"], "ends before the first update, after replay.learning_starts=100"),
        ([*SAC_RUN, "budget.updates=1", "algorithm.utd=1e30"], "algorithm.utd must lie in (0, 1000], got 1e+30"),
        ([*SAC_RUN, "budget.updates=1", "algorithm.utd=0.3"], "gives 1.2 gradient steps"),
        ([*SAC_RUN, "budget.updates=1", "algorithm.utd=0.1"], "is an integer"),
        ([*SAC_RUN, "budget.updates=1", "algorithm.critic.histogram=x"], "histogram"),
        (["algorithm=td3", *COMMON, "budget.updates=1", *BATCH_NORM], "does not support critic.backbone"),
        ([*SAC_RUN, "budget.updates=1", "replay.capacity=5"], "replay.capacity=5 is too small"),
        ([*SAC_RUN, "budget.updates=1", "replay.offline_fraction=1.5"], "must lie in [0, 1]"),
        ([*SAC_RUN, "budget.updates=1", "algorithm.tau=1.5"], "algorithm.tau must lie in (0, 1]"),
        ([*SAC_RUN, "budget.updates=1", "algorithm.critic.members=0"], "algorithm.critic.members must be at least 1"),
        ([*SAC_RUN, "budget.updates=1", "policy=gaussian"], "needs policy=squashed_gaussian"),
        (
            ["algorithm=dsrl_sac", "task=point_mass", "budget.updates=1", "replay.prioritized=0.5", *RAW_FLOW],
            "whole decisions does not support priorities",
        ),
        (
            ["algorithm=pa_rl", "policy=gaussian", "task=gymnasium/Pendulum-v1", "budget.updates=1"],
            "requires the action bounds of gymnasium/Pendulum-v1",
        ),
        (
            ["algorithm=dppo", "algorithm.lr=1e-5", "task=point_mass", "budget.updates=1"],
            "lr_final must be at most lr=1e-05",
        ),
        (["algorithm=ppo", "policy=gaussian", "task=point_mass", "budget.updates=1", "dataset=x"], "drop dataset="),
        (["algorithm=dsrl_sac", "task=point_mass", "budget.updates=1", "dataset=x"], "drop dataset="),
    ],
)
def test_contradicting_settings_are_refused_in_one_line(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(settings, message, tmp_path, capsys)
