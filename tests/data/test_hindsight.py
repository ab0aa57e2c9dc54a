"""Tests of goals in hindsight for environments with goals: choice of goals, rewards and a task of flipped bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from small_replay import generator, request

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.goals import HindsightConfig, HindsightReplay
from robopolicy.errors import UserError


def near(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    """Reward 0 at the goal, else -1."""
    return ((achieved - desired).abs().sum(-1) < 0.5).float() - 1


def attach(replay: HindsightReplay, **settings: Any) -> HindsightReplay:
    replay.hindsight, replay.goal_reward = HindsightConfig(**{"strategy": "future"} | settings), near
    return replay


def walk(
    replay: HindsightReplay, start: int, count: int, *, lanes: int = 1, end: bool = True, goal: float = -1
) -> None:
    """Add steps from state `start` to `start + count` in all lanes; lane l adds 100 l to its states."""
    offset = 100.0 * torch.arange(lanes)[:, None]
    for x in range(start, start + count):
        here, there = (
            {"state": offset + at, "achieved_goal": offset + at, "desired_goal": torch.full((lanes, 1), -1.0)}
            for at in (float(x), x + 1.0)
        )
        ended = torch.full((lanes,), end and x == start + count - 1)
        action, reward = torch.zeros(lanes, 1), torch.full((lanes,), -1.0)
        replay.add(torch.arange(lanes), here, action, reward, torch.zeros_like(ended), ended, there)


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_goals_are_later_states_of_the_same_episode(strategy: str) -> None:
    """Two episodes of 4 and 6 steps; from slot 1 of the first the goal is 1 to 3 steps later, or exactly 3."""
    replay = attach(HindsightReplay(40), strategy=strategy, fraction=1.0)
    walk(replay, 0, 4)
    walk(replay, 10, 6)
    rows = 3000
    distance = replay.sample_goals(torch.full((rows,), 1), generator())
    if strategy == "final":
        assert distance.tolist() == [3] * rows
    else:
        counts = torch.bincount(distance, minlength=4)[1:] / rows
        assert (counts - 1 / 3).abs().max() < 3 * math.sqrt(2 / 9 / rows)
    later = replay.sample_goals(torch.full((rows,), 5), generator())  # slot 5 is the first of the second episode
    assert int(later.max()) == 6 and int(later.min()) == (6 if strategy == "final" else 1)


def test_a_fraction_of_the_windows_keeps_its_own_goal() -> None:
    replay = attach(HindsightReplay(40), fraction=0.8)
    walk(replay, 0, 4)
    rows = 20_000
    own = (replay.sample_goals(torch.zeros(rows, dtype=torch.int64), generator()) == 0).float().mean()
    assert abs(float(own) - 0.2) < 3 * math.sqrt(0.16 / rows)


def test_running_episodes_keep_their_own_goals() -> None:
    replay = attach(HindsightReplay(40), fraction=1.0)
    walk(replay, 0, 4, end=False)
    assert replay.sample_goals(torch.arange(4), generator()).tolist() == [0, 0, 0, 0]


def test_windows_are_relabelled_as_by_hand() -> None:
    """Windows of 3 steps from state 1 of a walk to 6 with the goals 1 + 2, 1 + 5 and its own, at discount 0.5."""
    replay = attach(HindsightReplay(40))
    walk(replay, 0, 6)
    spec = request(steps=3, horizon=3, gamma=0.5)
    batch = replay.take(torch.tensor([1, 1, 1]), spec)
    found = replay.relabel(batch, torch.tensor([2, 5, 0]), spec)
    assert found.obs["desired_goal"][:, 0, 0].tolist() == [3.0, 6.0, -1.0]
    assert found.next_obs["desired_goal"][:, 0, 0].tolist() == [3.0, 6.0, -1.0]
    assert found.rewards.tolist() == [[-1.0, 0.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]
    assert found.reward.tolist() == [-1.25, -1.75, -1.75]
    assert found.obs["state"].tolist() == batch.obs["state"].tolist() and found.steps.tolist() == [3, 3, 3]
    assert found.discount.tolist() == batch.discount.tolist() == [0.125] * 3


def test_rewards_after_the_end_of_an_episode_stay_zero() -> None:
    replay = attach(HindsightReplay(40))
    walk(replay, 0, 3)
    walk(replay, 50, 3)
    spec = request(steps=3, horizon=3, gamma=0.5)
    found = replay.relabel(replay.take(torch.tensor([2]), spec), torch.tensor([1]), spec)
    assert found.rewards.tolist() == [[0.0, 0.0, 0.0]] and found.steps.tolist() == [1]


def test_a_full_ring_with_several_lanes_takes_goals_of_the_lane_only() -> None:
    """Goals differ from states by at most the episode, also where the start of the oldest episode is overwritten."""
    replay = attach(HindsightReplay(3 * 17, 3), fraction=1.0)
    for episode in range(9):
        walk(replay, 10 * episode, 4, lanes=3)
    spec = request(batch_size=512)
    found = replay.sample(spec, generator())
    ahead = (found.obs["desired_goal"] - found.obs["state"])[:, 0, 0]
    chosen = found.obs["desired_goal"][:, 0, 0] >= 0
    assert float(chosen.float().mean()) > 0.7
    assert set(ahead[chosen].tolist()) == {1.0, 2.0, 3.0, 4.0}


def test_a_restored_buffer_draws_the_same_windows() -> None:
    replay = attach(HindsightReplay(3 * 17, 3), fraction=1.0)
    for episode in range(9):
        walk(replay, 10 * episode, 4, lanes=3)
    other = attach(HindsightReplay(3 * 17, 3), fraction=1.0)
    other.load_state_dict(replay.state_dict())
    first, second = (each.sample(request(batch_size=64), generator()) for each in (replay, other))
    assert torch.equal(first.obs["desired_goal"], second.obs["desired_goal"])
    assert torch.equal(first.reward, second.reward)


def test_a_dataset_is_relabelled_like_environment_steps() -> None:
    frames = [np.arange(5, dtype=np.float32)[:, None], 10 + np.arange(7, dtype=np.float32)[:, None]]
    episodes = [
        Episode({"state": x, "achieved_goal": x, "desired_goal": -x - 1, "action": x, "reward": np.zeros(len(x), "f4")})
        for x in frames
    ]
    stored = attach(HindsightReplay.from_episodes(Episodes.from_list(episodes, 0.1)), strategy="final", fraction=1.0)
    assert stored.sample_goals(torch.tensor([0, 3, 5, 10]), generator()).tolist() == [4, 1, 6, 1]
    bare = [Episode({"state": x, "action": x, "reward": np.zeros(len(x), "f4")}) for x in frames]
    with pytest.raises(UserError, match="no 'achieved_goal'"):
        HindsightReplay.from_episodes(Episodes.from_list(bare, 0.1))


class BitFlip(gymnasium.Env[Any, Any]):
    """Bits of which one step flips the one with the largest action; a random goal of bits, reward -1 until equal."""

    bits = 8

    def __init__(self) -> None:
        bits = gymnasium.spaces.Box(0, 1, (self.bits,), np.float32)
        keys = ("state", "achieved_goal", "desired_goal")
        self.observation_space = gymnasium.spaces.Dict(dict.fromkeys(keys, bits))
        self.action_space = gymnasium.spaces.Box(-1, 1, (self.bits,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.now, self.goal = self.np_random.integers(0, 2, (2, self.bits)).astype(np.float32)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.now[np.argmax(action)] = 1 - self.now[np.argmax(action)]
        reward = float(self.compute_reward(self.now, self.goal, {}))
        return self.observe(), reward, False, False, {"is_success": reward == 0}

    def observe(self) -> dict[str, Any]:
        return {"state": self.now.copy(), "achieved_goal": self.now.copy(), "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return np.equal(achieved, desired).all(-1).astype(np.float32) - 1


@pytest.fixture(scope="module", autouse=True)
def bit_flip() -> None:
    """Register the task of flipped bits and one without goals."""
    gymnasium.register("BitFlip-v0", BitFlip, max_episode_steps=BitFlip.bits)


def success(tmp_path: Path, strategy: str) -> float:
    """Success of SAC at any step after 5,000 steps of flipped bits."""
    import json

    settings = ["experiment=hindsight", "task=gymnasium/BitFlip-v0", "budget.env_steps=5000", "evaluation.every=100000"]
    settings += ["policy.hidden=[64,64]", "algorithm.critic.hidden=[64,64]", "replay.learning_starts=500"]
    settings += [f"replay.hindsight.strategy={strategy}", "evaluation.episodes=100", "evaluation.success_step=any"]
    assert main(["train", *settings, f"out={tmp_path}", "name=run"]) == 0
    return json.loads((tmp_path / "run" / "report.json").read_text())["final"]["success"]


@pytest.mark.slow
def test_hindsight_solves_flipped_bits_that_plain_sac_does_not(tmp_path: Path) -> None:
    """A random walk almost never reaches one of 256 goals in eight steps (Andrychowicz et al. 2017, section 3.1)."""
    assert success(tmp_path / "plain", "none") < 0.2
    assert success(tmp_path / "her", "future") > 0.8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task=gymnasium/Pendulum-v1"], "has no 'achieved_goal'"),
        (["task=gymnasium/BitFlip-v0", "replay.return_max=1"], "replay.return_max=0"),
        (["task=gymnasium/BitFlip-v0", "replay.hindsight.strategy=futur"], "Did you mean 'future'?"),
        (["task=gymnasium/BitFlip-v0", "replay.hindsight.fraction=2"], "lie in"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: list[str], message: str, tmp_path: Path, refused: Any) -> None:
    assert message in refused("train", "experiment=hindsight", "evaluation.episodes=0", *settings, f"out={tmp_path}")
