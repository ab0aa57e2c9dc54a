"""Tests of chunks, autoreset and GAE against hand-computed numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import compute_advantages
from robopolicy.policies.base import Sample
from robopolicy.rollout.on_policy import EpisodeStats, RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import SimSpec, Step, TensorSpec, VectorSim


class CountSim(VectorSim):
    """A simulator that observes the step count; the reward of step k is k, and row i ends after `ends[i]` steps."""

    def __init__(self, ends: Sequence[int], terminal: Sequence[bool]) -> None:
        bound = torch.ones(1)
        self.spec = SimSpec("test/count", {"state": TensorSpec((1,))}, -bound, bound, 0.1, 100)
        self.ends, self.terminal = torch.tensor(ends), torch.tensor(terminal)
        self.num_envs, self.device = len(ends), torch.device("cpu")
        self.episode_seed = torch.arange(self.num_envs)
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)

    def _obs(self) -> dict[str, Tensor]:
        return {"state": self.episode_step[:, None].float()}

    def reset(self, seed: int | Sequence[int] = 0) -> dict[str, Tensor]:
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._obs()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        self.episode_step = self.episode_step + active
        reward = torch.where(active, self.episode_step.float(), 0.0)
        final, done = self._obs(), active & (self.episode_step >= self.ends)
        self.episode_step = torch.where(done, 0, self.episode_step)
        return Step(self._obs(), reward, done & self.terminal, done & ~self.terminal, final)


def zero_policy(obs: dict[str, Tensor], *, generator: Any = None) -> Sample:
    rows = obs["state"].shape[0]
    return Sample(torch.zeros(rows, 3, 1), {"x": torch.zeros(rows, 1)}, torch.zeros(rows, 1))


def value(obs: dict[str, Tensor]) -> Tensor:
    return 10.0 * obs["state"][:, -1, 0]


def test_a_chunk_stops_where_its_episode_ends_and_reports_the_executed_steps() -> None:
    chunked = ChunkedSim(CountSim([2, 5, 4], [True, True, False]), action_horizon=3, gamma=0.5)
    chunked.reset()
    first = chunked.step(torch.zeros(3, 3, 1))
    assert first.steps.tolist() == [2, 3, 3]
    assert first.reward.tolist() == [1 + 0.5 * 2, 1 + 0.5 * 2 + 0.25 * 3, 1 + 0.5 * 2 + 0.25 * 3]
    assert first.undiscounted.tolist() == [1 + 2, 1 + 2 + 3, 1 + 2 + 3]
    assert first.terminated.tolist() == [True, False, False]
    assert first.obs["state"].flatten().tolist() == [0, 3, 3]  # the first row stays at the start of its next episode
    assert first.final_obs["state"].flatten().tolist() == [2, 3, 3]
    second = chunked.step(torch.zeros(3, 3, 1))
    assert second.steps.tolist() == [2, 2, 1]
    assert second.reward.tolist() == [1 + 0.5 * 2, 4 + 0.5 * 5, 4]
    assert second.terminated.tolist() == [True, True, False]
    assert second.truncated.tolist() == [False, False, True]
    assert second.final_obs["state"].flatten().tolist() == [2, 5, 4]


def test_history_repeats_the_first_observation_of_each_episode() -> None:
    chunked = ChunkedSim(CountSim([3, 9], [True, True]), action_horizon=2, obs_horizon=3)
    assert chunked.reset()["state"][:, :, 0].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert chunked.step(torch.zeros(2, 2, 1)).obs["state"][:, :, 0].tolist() == [[0, 1, 2], [0, 1, 2]]
    step = chunked.step(torch.zeros(2, 2, 1))
    assert step.obs["state"][:, :, 0].tolist() == [[0, 0, 0], [2, 3, 4]]
    assert step.final_obs["state"][:, :, 0].tolist() == [[1, 2, 3], [2, 3, 4]]


@pytest.mark.parametrize("unit", ["step", "chunk"])
def test_advantages_through_termination_truncation_and_early_ends_equal_hand_computed_numbers(unit: str) -> None:
    gamma, lam = 0.5, 0.8
    inner = gamma if unit == "step" else 1.0
    chunked = ChunkedSim(CountSim([2, 4, 9], [True, False, True]), action_horizon=3, gamma=inner)
    rollout = RolloutSampler(chunked, decisions=2).collect(zero_policy)
    rows = compute_advantages(rollout, value, gamma=gamma, gae_lambda=lam, discount_unit=unit)
    advantage = rows.advantage.view(2, 3)

    # Row 0: two episodes of 2 steps, both terminated: no bootstrap, no trace between them. V(start) = 0.
    episode = 1 + inner * 2
    assert advantage[:, 0].tolist() == pytest.approx([episode, episode])

    # Row 1: 3 steps to state 3 (V = 30), then 1 step to state 4 (V = 40), truncated there: bootstraps from 40.
    long, short = (gamma**3, gamma) if unit == "step" else (gamma, gamma)
    second = 4 + short * 40 - 30
    first = (1 + inner * 2 + inner**2 * 3) + long * 30 - 0 + long * lam * second
    assert advantage[:, 1].tolist() == pytest.approx([first, second])

    # Row 2: does not end; the last decision bootstraps from the observation after it, state 6 (V = 60).
    second = (4 + inner * 5 + inner**2 * 6) + long * 60 - 30
    first = (1 + inner * 2 + inner**2 * 3) + long * 30 + long * lam * second
    assert advantage[:, 2].tolist() == pytest.approx([first, second])


def test_an_episode_that_terminates_at_its_time_limit_does_not_bootstrap() -> None:
    class BothSim(CountSim):
        def step(self, action: Tensor, active: Tensor | None = None) -> Step:
            step = super().step(action, active)
            return replace(step, truncated=step.terminated | step.truncated)

    rollout = RolloutSampler(ChunkedSim(BothSim([2, 4], [True, False]), action_horizon=2), decisions=2).collect(
        zero_policy
    )
    assert rollout.truncated.tolist() == [[True, False], [True, True]]
    assert rollout.final_obs["state"].flatten().tolist() == [4]  # only of the row that is truncated and not terminated
    rows = compute_advantages(rollout, value, gamma=1.0, gae_lambda=0.0)
    assert rows.advantage.view(2, 2).tolist() == [[1 + 2, 1 + 2 + 20], [1 + 2, 3 + 4 + 40 - 20]]


def test_a_resumed_sampler_collects_the_same_rows_as_an_uninterrupted_one() -> None:
    from robopolicy.sim.registry import SimOptions, make_sim

    def act(obs: dict[str, Tensor], *, generator: Any = None) -> Sample:
        chunk = torch.randn(obs["state"].shape[0], 2, 2, generator=generator)
        return Sample(chunk, {"x": chunk}, chunk.sum((1, 2))[:, None])

    def sampler() -> RolloutSampler:
        sim = make_sim("toy/point_mass", SimOptions(num_envs=3))
        return RolloutSampler(ChunkedSim(sim, action_horizon=2, obs_horizon=2), decisions=30, seed=4)

    straight = sampler()
    straight.collect(act)
    state = straight.state_dict()
    expected = straight.collect(act)
    resumed = sampler()
    resumed.load_state_dict(state)
    actual = resumed.collect(act)
    for key in ("reward", "steps", "terminated", "truncated", "logp"):
        assert torch.equal(getattr(actual, key), getattr(expected, key)), key
    assert torch.equal(actual.obs["state"], expected.obs["state"])


def test_the_reported_return_of_an_episode_is_undiscounted() -> None:
    sampler = RolloutSampler(ChunkedSim(CountSim([2, 5], [True, True]), action_horizon=3, gamma=0.5), decisions=2)
    sampler.collect(zero_policy)
    stats = sampler.episode_stats()  # two episodes of 1 + 2 and one of 1 + 2 + 3 + 4 + 5
    assert (stats["rollout/episodes"], stats["rollout/return"]) == (3, (3 + 3 + 15) / 3)


class SuccessAtEnd(CountSim):
    """A simulator that reports success only in the step that ends an episode."""

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = super().step(action, active)
        return replace(step, info={"success": step.done}) if bool(step.done.any()) else step


def test_a_success_within_a_chunk_is_reported_at_its_end() -> None:
    chunked = ChunkedSim(SuccessAtEnd([1, 4], [True, True]), action_horizon=2)
    chunked.reset()
    assert chunked.step(torch.zeros(2, 2, 1)).info["success"].tolist() == [True, False]
    assert chunked.step(torch.zeros(2, 2, 1)).info["success"].tolist() == [True, True]


def test_means_over_episodes_do_not_depend_on_interruptions() -> None:
    sampler = RolloutSampler(ChunkedSim(CountSim([2, 3, 7], [True, False, True])), decisions=3 * EpisodeStats.BLOCK)
    sampler.collect(zero_policy)
    # In 96 steps, the rows finish 48, 32 and 13 episodes with returns 1 + 2, 1 + 2 + 3 and 1 + ... + 7.
    expected = {"episodes": 93, "return": (48 * 3 + 32 * 6 + 13 * 28) / 93, "length": (48 * 2 + 32 * 3 + 13 * 7) / 93}
    assert sampler.episode_stats() == {f"rollout/{key}": value for key, value in expected.items()}
    straight, stopped = (EpisodeStats(CountSim([2, 3, 7], [True, False, True])) for _ in range(2))
    chunked = ChunkedSim(CountSim([2, 3, 7], [True, False, True]))
    chunked.reset()
    for _ in range(50):
        step = chunked.step(torch.zeros(3, 1, 1))
        straight.observe(step)
        stopped.observe(step)
        resumed = EpisodeStats(CountSim([2, 3, 7], [True, False, True]))
        resumed.load_state_dict(stopped.state_dict())
        stopped = resumed
    assert straight.flush() == stopped.flush() != {}
