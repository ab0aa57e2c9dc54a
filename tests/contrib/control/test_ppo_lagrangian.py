"""Tests of PPO-Lagrangian: hand-computed surrogate, multiplier updates, and a satisfied cost limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import compute_advantages
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.contrib.control.ppo_lagrangian import EpisodeCosts, PPOLagrangian, PPOLagrangianConfig, lagrangian
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

SETTINGS: dict[str, Any] = {"num_steps": 45, "epochs": 2, "batch_size": 64, "critic": ValueConfig(hidden=(16,))}


def learner(seed: int = 0, spec: PolicySpec | None = None, **config: Any) -> PPOLagrangian:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), log_std_init=-1.0), spec or PolicySpec({"state": (6,)}, 2))
    policy.fit_normalizer(tools.STATISTICS if spec is None else LINE)
    settings = SETTINGS | {"costs": ("energy",), "limits": (0.5,)} | config
    return PPOLagrangian(PPOLagrangianConfig(**settings), policy, total_updates=60)


def with_energy(batch: Rollout, algorithm: PPOLagrangian) -> Rollout:
    """The rollout with an energy penalty as one part of its reward."""
    part = -batch.record["raw"].square().flatten(2).mean(-1)
    return replace(batch, reward=batch.reward + part, terms={"energy": part})


def energy_rollout(algorithm: PPOLagrangian) -> Rollout:
    return with_energy(tools.sampler_for(algorithm).collect(algorithm.act), algorithm)


LINE = {
    "state": {"min": [-1.0], "max": [1.0], "mean": [0.0], "std": [1.0], "count": [9]},
    "action": {"min": [-1.0], "max": [1.0]},
}


def line_rollout(algorithm: Any, rows: int = 256) -> Rollout:
    """One decision per episode: the reward is maximal at action 2, and the cost is the squared action."""
    obs = {"state": torch.zeros(1, rows, 1, 1)}
    sample = algorithm.act({"state": obs["state"][0]}, generator=algorithm.generator)
    action, end = sample.chunk[None, :, 0, 0], torch.ones(1, rows, dtype=torch.bool)
    cost = action.square()
    return Rollout(
        obs=obs,
        record={key: value[None] for key, value in sample.record.items()},
        logp=sample.logp[None],
        reward=-(action - 2).square() - cost,
        steps=end.long(),
        terminated=end,
        truncated=~end,
        final_obs={"state": obs["state"][0, :0]},
        last_obs={"state": obs["state"][0]},
        terms={"energy": -cost},
    )


def test_surrogate_equals_the_hand_computed_value() -> None:
    advantage = torch.tensor([[-1.0, -4.0, 6.0], [2.0, 0.0, -1.0]])  # two negative costs, then the other reward
    assert lagrangian(advantage, torch.tensor([1.0, 0.5])).tolist() == pytest.approx(
        [(6 - 1 - 2) / 2.5, (-1 + 2) / 2.5]
    )
    assert lagrangian(advantage, torch.zeros(2)).tolist() == [6.0, -1.0]  # no constraint is active


def test_episode_costs_accumulate_across_rollouts() -> None:
    costs = EpisodeCosts()

    def of(*values: float) -> Tensor:
        return torch.tensor(values)[:, None, None].expand(-1, 2, 1).clone()

    assert costs.update(of(1.0, 2.0), torch.tensor([[False, False], [False, False]])) is None
    other = EpisodeCosts()
    other.load_state_dict(costs.state_dict())
    for one in (costs, other):
        mean = one.update(of(4.0, 8.0), torch.tensor([[True, False], [False, True]]))
        assert mean is not None and mean.tolist() == [(7.0 + 15.0) / 2]
        again = one.update(of(16.0), torch.tensor([[True, True]]))
        assert again is not None and again.tolist() == [(24.0 + 16.0) / 2]


def test_multiplier_rises_with_costs_and_falls_without_them() -> None:
    found = []
    for factor in (1.0, 3.0, 0.0):
        algorithm = learner(spec=tools.LINE, multiplier_init=0.1)
        batch = line_rollout(algorithm)
        terms = {"energy": factor * batch.terms["energy"]}
        metrics = algorithm.update(replace(batch, terms=terms))
        cost = float(-terms["energy"].mean())
        expected = max(0.1 + 0.05 * (cost - 0.5), 0.0)
        assert metrics["multiplier/energy"] == pytest.approx(expected, rel=1e-5)
        assert metrics["cost/energy"] == pytest.approx(cost, rel=1e-5)
        found.append(metrics["multiplier/energy"])
    assert found[2] < found[0] < found[1]


def test_costs_are_summed_without_discount_within_chunks() -> None:
    sim = ChunkedSim(make_sim("half_cheetah", SimOptions(num_envs=2)), action_horizon=5, gamma=0.5)
    spec = PolicySpec(
        {"state": sim.sim.spec.observation["state"].shape}, sim.sim.spec.action_dim, horizon=5, action_horizon=5
    )
    policy = GaussianPolicy(GaussianConfig(hidden=(8,), normalization="identity"), spec)
    algorithm = PPOLagrangian(PPOLagrangianConfig(costs=("ctrl",), limits=(1.0,)), policy, total_updates=1)
    batch = RolloutSampler(sim, decisions=3, seed=0).collect(algorithm.act)
    executed = batch.record["raw"].clamp(-1, 1)  # (T, N, H, A)
    expected = 0.1 * executed.square().sum((2, 3))
    torch.testing.assert_close(algorithm.costs(batch)[..., 0], expected, rtol=1e-4, atol=1e-6)
    assert bool((-batch.terms["ctrl"] < 0.5 * expected).all())  # discounted, as the reward is


def test_without_costs_rows_equal_ppo_rows() -> None:
    algorithm = learner(costs=(), limits=())
    batch = energy_rollout(algorithm)
    rows = algorithm.process_rollout(batch)
    plain = compute_advantages(batch, algorithm.critic, gamma=0.99, gae_lambda=0.95)
    torch.testing.assert_close(rows.advantage, plain.advantage, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows.value_target[:, 0], plain.value_target, rtol=1e-4, atol=1e-5)


def test_constrained_penalties_are_removed_from_the_reward() -> None:
    algorithm = learner()
    batch = energy_rollout(algorithm)
    parts = algorithm.rewards(batch)
    torch.testing.assert_close(parts[..., 1], batch.reward - batch.terms["energy"])
    idle = learner(limits=(1e9,))
    rows = idle.process_rollout(batch)  # multiplier 0: the advantage excludes the penalty
    plain = replace(batch, reward=batch.reward - batch.terms["energy"])
    values = compute_advantages(plain, lambda obs: idle.critic.by_term(obs)[:, 1], gamma=0.99, gae_lambda=0.95)
    torch.testing.assert_close(rows.advantage, values.advantage, rtol=1e-4, atol=1e-5)


def test_ppo_lagrangian_satisfies_a_cost_limit_that_ppo_exceeds() -> None:
    """Within the limit, the best action has mean square 0.5, including noise; without it, the best action is 2."""
    settings = SETTINGS | {"epochs": 3, "lr": 1e-2, "batch_size": 128, "normalize_reward": False}
    bound = learner(spec=tools.LINE, multiplier_lr=0.2, **settings)
    torch.manual_seed(0)
    free = PPO(PPOConfig(**settings), bound.policy.__class__(bound.policy.config, tools.LINE), total_updates=60)
    free.policy.fit_normalizer(LINE)
    late: list[float] = []
    for update in range(45):
        batch = line_rollout(free)
        free.update(replace(batch, reward=batch.reward - batch.terms["energy"]))
        metrics = bound.update(line_rollout(bound))
        if update >= 30:
            late.append(metrics["cost/energy"])
    cost = sum(late) / len(late)
    assert 0.35 < cost < 0.65, cost
    assert metrics["multiplier/energy"] == pytest.approx(2 / 0.7 - 1, abs=0.6)  # where the gradients at 0.7 cancel
    assert float(-line_rollout(free).terms["energy"].mean()) > 2.0


def test_invalid_costs_are_refused() -> None:
    algorithm = learner()
    batch = energy_rollout(algorithm)
    with pytest.raises(UserError, match="never exceeds 0, but 'energy' does"):
        algorithm.update(replace(batch, terms={"energy": -batch.terms["energy"]}))
    with pytest.raises(UserError, match=r"'energy'.*success"):
        algorithm.update(replace(batch, terms={"success": batch.terms["energy"]}))
    with pytest.raises(UserError, match="one number for each"):
        PPOLagrangianConfig(costs=("a",), limits=())
    with pytest.raises(UserError, match="must not be negative"):
        PPOLagrangianConfig(costs=("a",), limits=(-1.0,))
