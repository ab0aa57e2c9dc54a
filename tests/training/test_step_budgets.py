"""Tests of `budget.env_steps`: no data source executes more control steps than the budget."""

from pathlib import Path

import pytest
from replay_runs import COMMON, FAST, assert_refused, trainer

SINGLE = ["chunk.horizon=1", "chunk.action_horizon=1"]
CHUNKS = ["chunk.horizon=3", "chunk.action_horizon=3"]  # episodes of 20 steps end inside a chunk
PPO_RUN = ["task=point_mass", "policy=gaussian", "policy.hidden=[8]", "algorithm=ppo", *FAST]
SAC_RUN = [*COMMON, "algorithm=sac", *SINGLE]


@pytest.mark.parametrize(
    "settings, planned",
    [
        ([*PPO_RUN, "budget.env_steps=300"], 300),  # shorter than one rollout of 128 decisions
        ([*PPO_RUN, "budget.env_steps=301", *CHUNKS], 300),
        ([*PPO_RUN, "budget.env_steps=100", "algorithm.num_steps=8"], 96),
        ([*PPO_RUN, "budget.env_steps=100", "algorithm.num_steps=8", "sim.overlap=1"], 96),
        ([*SAC_RUN, "budget.env_steps=151"], 148),  # 100 steps of warm-up, then 4 per update
        ([*SAC_RUN, "budget.env_steps=151", "algorithm.num_steps=3", *CHUNKS], 147),
        ([*SAC_RUN, "budget.env_steps=151", "sim.overlap=1"], 148),
    ],
)
def test_runs_stay_within_their_budget(tmp_path: Path, settings: list[str], planned: int) -> None:
    run = trainer(tmp_path, *settings)
    report = run.train()
    assert planned - 20 <= report["env_steps"] <= planned


def test_workers_stay_within_the_budget(tmp_path: Path) -> None:
    settings = ["algorithm.num_steps=5", "sim.num_workers=2", "budget.env_steps=190"]
    assert 160 <= trainer(tmp_path, *SAC_RUN, *settings).train()["env_steps"] <= 190


def test_the_configuration_of_a_run_has_its_shortened_rollouts(tmp_path: Path) -> None:
    run = trainer(tmp_path, *PPO_RUN, "budget.env_steps=300")
    assert (run.total, run.config.algorithm["num_steps"]) == (1, 300 // 4)
    run.close()


@pytest.mark.parametrize(
    "settings, message",
    [
        ([*PPO_RUN, "budget.env_steps=3"], "budget.env_steps=3 is less than one chunk of all environments, 4 steps"),
        ([*SAC_RUN, "budget.env_steps=106"], "budget.env_steps=106 ends before the first update, after replay.learn"),
        ([*SAC_RUN, "budget.env_steps=90", "replay.learning_starts=1"], "is less than a window of every environment"),
    ],
)
def test_budgets_without_an_update_are_refused(
    tmp_path: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(settings, message, tmp_path, capsys)
