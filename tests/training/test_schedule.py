"""Tests of schedules: evaluations take a bounded fraction of a run, and follow its budget."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robopolicy.cli.main import main
from robopolicy.training import loop
from robopolicy.training.build import resolve_config
from robopolicy.training.compose import compose_config
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.schedule import GRADIENT_STEP, Schedule, training_steps

PPO_RUN = ("task=point_mass", "policy=gaussian", "algorithm=ppo", "algorithm.num_steps=8", "sim.num_envs=4")
SAC_RUN = ("task=point_mass", "policy=squashed_gaussian", "algorithm=sac", "sim.num_envs=4")


def schedule(*settings: str, updates: int = 100, episode_steps: int = 50) -> Schedule:
    sim: Any = SimpleNamespace(spec=SimpleNamespace(max_episode_steps=episode_steps))
    return Schedule(resolve_config(compose_config([*settings, f"budget.updates={updates}"])), updates, sim)


def test_evaluations_before_the_last_take_a_fifth_of_the_control_steps():
    steps = training_steps(resolve_config(compose_config([*PPO_RUN, "budget.updates=1000"])), 1000, 50)
    assert steps == 1000 * 8 * 4
    assert schedule(*PPO_RUN, updates=1000).episodes(100) == 0.2 * steps / 10 // 50 == 12
    assert schedule(*PPO_RUN, "evaluation.max_fraction=0.5", updates=1000).episodes(100) == 32


@pytest.mark.parametrize(
    "settings, updates, expected",
    [
        (("evaluation.every=10",), 100, 10),  # never fewer, if `evaluation.episodes` has as many
        (("evaluation.every=10", "evaluation.episodes=4"), 100, 4),
        (("evaluation.max_fraction=0",), 100, 100),
        ((), 100_000, 100),
        (("evaluation.episodes=300",), 20_000, 256),
    ],
)
def test_episodes_shrink_within_limits(settings, updates, expected):
    found = schedule(*PPO_RUN, *settings, updates=updates)
    assert found.episodes(updates // 10) == expected


def test_the_last_evaluation_has_all_episodes():
    found = schedule(*PPO_RUN, "evaluation.every=10")
    assert (found.episodes(10), found.episodes(100), found.grows) == (10, 100, True)
    assert not schedule(*PPO_RUN, "evaluation.max_fraction=0").grows


@pytest.mark.parametrize("updates, every", [(100, 100), (320, 80), (500, 84), (1000, 100)])
def test_short_runs_are_evaluated_less_often(updates, every):
    """An update has 32 control steps, and an evaluation of 10 episodes 500, of which a fifth is affordable."""
    found = schedule(*PPO_RUN, updates=updates)
    assert (found.evaluate_every, found.episodes(every - 1)) == (every, max(10, found.episodes(every - 1)))
    assert found.episodes(1) * 50 * (updates // every - 1) <= 0.2 * 32 * updates
    assert schedule(*PPO_RUN, "evaluation.every=7", updates=updates).evaluate_every == 7


def test_rarer_evaluations_have_more_episodes():
    assert schedule(*PPO_RUN, "evaluation.every=500", updates=1000).episodes(500) == 0.2 * 32_000 / 2 // 50


def test_updates_without_a_simulator_count_as_control_steps(tmp_path):
    (tmp_path / "data").mkdir()
    bc = compose_config(["task=point_mass", "algorithm=bc", f"dataset={tmp_path / 'data'}", "budget.updates=7"])
    assert training_steps(bc, 7, 50) == 7 * GRADIENT_STEP
    sac = compose_config([*SAC_RUN, "replay.offline_updates=5", "dataset=x", "budget.updates=8"])
    sac = resolve_config(sac)
    assert training_steps(sac, 8, 50) == 5 * GRADIENT_STEP + 3 * 4 * sac.chunk.action_horizon


def test_evaluations_follow_a_changed_budget():
    every = {
        updates: schedule("experiment=from_scratch", "task=hopper", updates=updates).evaluate_every
        for updates in (50, 900)
    }
    assert every == {50: 5, 900: 90}


def test_the_best_checkpoint_is_reported_on_the_episodes_of_the_last_evaluation(tmp_path: Path):
    words = [*PPO_RUN, "policy.hidden=[8]", "budget.updates=4", "evaluation.every=1", "evaluation.episodes=20"]
    assert main(["train", *words, "guards.restore_best=false", f"out={tmp_path}", "name=run"]) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if "eval/n" in row]
    assert [row["eval/n"] for row in rows] == [10, 10, 10, 20]
    assert report["best"]["n"] == report["final"]["n"] == 20
    assert report["best"]["return_mean"] >= report["final"]["return_mean"]


def test_short_runs_do_not_spend_their_time_on_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps: list[int] = []
    evaluate = loop.evaluate

    def counted(*arguments: Any, **options: Any):
        result = evaluate(*arguments, **options)
        steps.append(int(result.lengths.sum()))
        return result

    monkeypatch.setattr(loop, "evaluate", counted)
    words = [*PPO_RUN, "policy.hidden=[8]", "algorithm.num_steps=64", "algorithm.epochs=1", "sim.num_envs=16"]
    words += ["budget.env_steps=30000", f"out={tmp_path}", "name=run"]
    assert main(["train", *words]) == 0
    assert len(steps) >= 10 and sum(steps[:10]) <= 0.2 * 30_000 and sum(steps) < 0.5 * 30_000
