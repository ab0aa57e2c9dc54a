"""Tests of late chunks: time stamps compensate the latency, and results do not depend on the environment count."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.deploy.chunk_buffer import ChunkBuffer
from robopolicy.errors import UserError
from robopolicy.evaluation import latency
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.latency import (
    DelayedActor,
    RealTimeChunkingActor,
    latency_curve,
    latency_facts,
    latency_table,
)
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.contract import SimSpec, Step, TensorSpec, VectorSim

DT, RATE, LAG = 0.02, 1.5, 0.04  # [s], [rad/s], [s] time constant of the joint


class Pendulum(VectorSim):
    """A joint that follows its target with a lag; the desired motion is a sine whose phase depends on the seed."""

    def __init__(self, num_envs: int) -> None:
        bound = torch.full((1,), 2.0)
        self.spec = SimSpec("fake/sine", {"state": TensorSpec((2,))}, -bound, bound, DT, max_episode_steps=200)
        self.num_envs, self.device = num_envs, torch.device("cpu")

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else list(seed)
        self.episode_seed = torch.tensor(seeds)
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)
        self._next = max(seeds) + 1
        self.joint = self.phase().sin()
        return self.observe()

    def phase(self) -> Tensor:
        return 0.7 * self.episode_seed + RATE * DT * self.episode_step

    def observe(self) -> Observation:
        return {"state": torch.stack([self.joint, self.phase()], 1).float()}

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        moving = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        self.joint = torch.where(moving, self.joint + (action[:, 0] - self.joint) * DT / LAG, self.joint)
        self.episode_step = self.episode_step + moving
        reward = torch.where(moving, -((self.joint - self.phase().sin()) ** 2), 0.0).float()
        final, truncated = self.observe(), moving & (self.episode_step == 200)
        for row in truncated.nonzero().flatten().tolist():
            self.episode_seed[row], self.episode_step[row] = self._next, 0
            self._next += 1
        self.joint = torch.where(truncated, self.phase().sin(), self.joint)
        return Step(self.observe(), reward, torch.zeros_like(moving), truncated, final)


class Sine(Policy):
    """Policy that returns a chunk of the sine from the observed phase."""

    name = "sine"

    def __init__(self, horizon: int = 16, action_horizon: int = 8) -> None:
        super().__init__()
        self.spec = PolicySpec({"state": (2,)}, 1, horizon, action_horizon)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        phase = obs["state"][:, -1, 1:] + RATE * DT * torch.arange(1, self.spec.horizon + 1)
        return phase.sin().unsqueeze(-1)


def rmse(late: latency.LatencyResult) -> float:
    """Root mean square error of the joint's position [rad]."""
    return float(np.sqrt(-late.result.returns.sum() / late.result.lengths.sum()))


@pytest.mark.parametrize("join", ["replace", "hold", "ensemble"])
def test_aligned_chunks_compensate_a_latency_that_degrades_unaligned_ones(
    join: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec A6: at 150 ms the error is within 10 % of the error without latency."""
    none, aligned = latency_curve(Sine(), Pendulum(4), [0.0, 0.15], blending=join, episodes=4).values()
    assert aligned.delay == 8 and aligned.repeated == 0.0

    class Unaligned(ChunkBuffer):
        def put(self, chunk: np.ndarray, observed: float) -> None:
            super().put(chunk, observed + (8 if observed else 0))  # stamps the chunk with its time of arrival

    monkeypatch.setattr(latency, "ChunkBuffer", Unaligned)
    (unaligned,) = latency_curve(Sine(), Pendulum(4), [0.15], blending=join, episodes=4).values()
    assert rmse(aligned) < 1.1 * rmse(none) and rmse(unaligned) > 2 * rmse(none)


def test_without_latency_nothing_changes(make_sim, make_policy) -> None:
    for join, action_horizon in (("replace", 3), ("hold", 4)):  # hold executes a chunk of 4 to its end
        policy = make_policy(horizon=4, action_horizon=action_horizon)
        plain = evaluate(policy, make_sim(4), episodes=12, seed=50)
        (late,) = latency_curve(policy, make_sim(4), [0.0], blending=join, episodes=12, seed=50).values()
        assert np.array_equal(late.result.returns, plain.returns) and late.delay == 0 and late.repeated == 0.0
        assert np.array_equal(late.result.lengths, plain.lengths)


@pytest.mark.parametrize("join", ["replace", "hold", "ensemble"])
def test_the_number_of_environments_changes_nothing(make_sim, make_policy, join: str) -> None:
    policy = make_policy(horizon=8, action_horizon=3)
    found = [
        latency_curve(policy, make_sim(n), [0.1, 0.25], blending=join, episodes=12, seed=50, deterministic=False)
        for n in (1, 5, 16)
    ]
    for late in (0.1, 0.25):
        one, *others = (curve[late] for curve in found)
        assert 0 < one.result.success.sum() < 12 or one.result.lengths.std() > 0
        for other in others:
            assert np.array_equal(one.result.returns, other.result.returns) and one.repeated == other.repeated


def test_executed_actions_match_hand_computed_ones() -> None:
    class Numbered:
        action_horizon, obs_horizon, network_calls, policy_calls = 2, 1, 1, 0

        def __call__(self, sim, obs, rows, seeds, decisions) -> Tensor:
            return torch.tensor([[[10.0 * k + j] for j in range(4)] for k in decisions])  # chunk k is 10 k + row

    def executed(delay: int, join: str = "replace") -> list[int]:
        late = DelayedActor(Numbered(), delay, join)
        windows = [
            late(None, {}, torch.arange(1), torch.tensor([7]), torch.tensor([k])).flatten().tolist() for k in range(3)
        ]  # type: ignore
        return [int(action) for window in windows for action in window]

    assert executed(0) == [0, 1, 10, 11, 20, 21]
    assert executed(1) == [0, 1, 2, 11, 12, 21]  # the first chunk has no delay, the others arrive one step late
    assert executed(2) == [0, 1, 2, 3, 12, 13]
    assert executed(1, "hold") == [0, 1, 2, 3, 12, 13]
    assert executed(3) == [0, 1, 2, 3, 3, 3, 13, 13, 13]  # one inference at a time; row 3 is the last


def test_policy_slower_than_its_chunks_repeats_its_last_action_and_reports_it() -> None:
    """Spec A6: 300 ms of latency with chunks of 160 ms."""
    curves = {"sine": latency_curve(Sine(8, 8), Pendulum(2), [0.0, 0.3], episodes=2)}
    assert curves["sine"][0.3].repeated > 0.4 and rmse(curves["sine"][0.3]) > 3 * rmse(curves["sine"][0.0])
    header, ((label, good, bad),) = latency_table(curves)
    assert header == ["policy", "0 ms (0 steps)", "300 ms (15 steps)"] and label == "sine"
    assert "without" not in good and "% of steps without an action" in bad
    assert latency_facts(curves)["latencies"]["sine"]["300"]["delay"] == 15


@pytest.mark.parametrize(
    ("latencies", "join", "message"),
    [
        ([-0.1], "replace", "between 0 and 3600000 ms, got -100"),
        ([np.inf], "hold", "between 0 and 3600000 ms, got inf"),
        ([0.1], "rplace", "'replace'"),
        ([0.1], "rtc", "and 'sine' cannot"),
    ],
)
def test_invalid_latencies_and_blendings_are_refused(latencies, join, message) -> None:
    with pytest.raises(UserError, match=message):
        latency_curve(Sine(), Pendulum(1), latencies, blending=join, episodes=1)


def test_real_time_chunks_start_with_the_committed_actions_for_any_number_of_environments(make_sim) -> None:
    policy_class = POLICIES["flow"]
    config_class = policy_class.config_class
    policy = policy_class(config_class(), PolicySpec({"state": (7,)}, 3, horizon=8, action_horizon=4))
    policy.fit_normalizer({k: {"min": -torch.ones(n), "max": torch.ones(n)} for k, n in (("state", 7), ("action", 3))})
    found = []
    for n in (1, 5):
        (late,) = latency_curve(policy, make_sim(n), [0.2], blending="rtc", episodes=6, seed=50).values()
        found.append(late)
    assert np.array_equal(found[0].result.returns, found[1].result.returns) and found[0].repeated == 0.0
    actor = RealTimeChunkingActor(policy.eval())
    late, sim = DelayedActor(actor, 2, "rtc"), make_sim(1)
    obs = {"state": sim.reset(3)["state"].unsqueeze(1)}
    first = actor(sim, obs, torch.arange(1), torch.tensor([3]), torch.tensor([0]))[0]
    assert torch.equal(late(sim, obs, torch.arange(1), torch.tensor([3]), torch.tensor([0]))[0], first[:4])
    assert torch.equal(
        late(sim, obs, torch.arange(1), torch.tensor([3]), torch.tensor([1]))[0, :2], first[4:6]
    )  # committed
    assert np.allclose(actor.prefixes[3], first[4:6])
    second = actor(sim, obs, torch.arange(1), torch.tensor([3]), torch.tensor([1]))[0]
    assert torch.equal(second[:2], first[4:6]) and not torch.equal(second[2:4], first[6:])
    with pytest.raises(UserError, match="choose another blending"):
        latency_curve(actor, sim, [0.1], blending="rtc", episodes=1)
