"""Tests of HAMNet: reward parts add up, also within chunks, and each part has its own value and clip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, compute_advantages
from robopolicy.contrib.control.hamnet import HAMNet, HAMNetConfig, normalized
from robopolicy.contrib.control.vector_value import VectorValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy


def learner(seed: int = 0, action_horizon: int = 1, **config: Any) -> HAMNet:
    torch.manual_seed(seed)
    spec = PolicySpec({"state": (6,)}, 2, horizon=action_horizon, action_horizon=action_horizon)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), backbone="modular", backbone_options={"modules": 2}), spec)
    policy.fit_normalizer(tools.STATISTICS)
    critic = VectorValueConfig(hidden=(16,), modules=2, context_width=8)
    settings = {"num_steps": 45, "epochs": 2, "batch_size": 64, "terms": ("success",), "critic": critic} | config
    return HAMNet(HAMNetConfig(**settings), policy, total_updates=20)


def rollout_of(algorithm: HAMNet) -> Rollout:
    return tools.sampler_for(algorithm).collect(algorithm.act)


def towards_goal(obs: dict[str, torch.Tensor], *, generator: Any = None) -> Sample:
    """A controller that reaches goals, sometimes in the middle of a chunk."""
    state = obs["state"][:, -1]
    chunk = (3 * (state[:, 4:] - state[:, :2]) - 1.5 * state[:, 2:4])[:, None].expand(-1, 3, -1)
    return Sample(chunk, {}, torch.zeros(len(state), 1))


def test_reward_terms_sum_to_the_discounted_chunk_reward() -> None:
    algorithm = learner(action_horizon=3, num_steps=15)
    batch = tools.sampler_for(algorithm).collect(towards_goal)
    goal = batch.terminated.float() * 0.99 ** (batch.steps - 1)  # discounted within the chunk, as the reward
    torch.testing.assert_close(batch.terms["success"], goal)
    assert bool(batch.terminated.any())
    parts = algorithm.rewards(batch)
    torch.testing.assert_close(parts.sum(-1), batch.reward)
    torch.testing.assert_close(parts[..., 0], goal)


def test_reward_term_advantages_sum_to_the_advantage_of_the_reward() -> None:
    algorithm = learner()
    batch = rollout_of(algorithm)
    assert bool(batch.truncated.any())
    rows = algorithm.process_rollout(batch)
    plain = compute_advantages(batch, algorithm.critic, gamma=0.99, gae_lambda=0.95)
    for name in ("advantage", "value_target", "value"):
        assert getattr(rows, name).shape == (len(plain), 2)
        torch.testing.assert_close(getattr(rows, name).sum(1), getattr(plain, name), rtol=1e-4, atol=1e-4)


def test_advantages_of_all_terms_are_multiplied_by_the_importance_weight() -> None:
    algorithm = learner()
    batch = rollout_of(algorithm)
    weight = torch.rand(batch.shape) * 2
    plain, weighted = (algorithm.process_rollout(replace(batch, weight=each)) for each in (None, weight))
    torch.testing.assert_close(weighted.advantage, plain.advantage * weight.flatten()[:, None])
    torch.testing.assert_close(weighted.value_target, plain.value_target)


def test_fresh_gradient_uses_summed_advantages_and_clips_each_reward_term_separately() -> None:
    algorithm = learner()
    rows = algorithm.process_rollout(rollout_of(algorithm))
    parameters = list(algorithm.policy.parameters())
    loss, info = algorithm.loss(rows, log_stats=True)
    assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9)
    advantage = normalized(rows.advantage)
    logp = algorithm.policy.decisions(rows.obs, rows.record).logp.sum(1)
    expected = torch.autograd.grad(-(advantage.sum(1) * logp).mean(), parameters)
    for one, other in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    # All ratios are e: a positive advantage of one part is clipped independently of the other part.
    moved = replace(rows, logp=rows.logp - 1.0)
    logp = algorithm.policy.decisions(rows.obs, rows.record).logp.sum(1)
    expected = torch.autograd.grad(-(advantage.clamp(max=0).sum(1) * torch.e * logp).mean(), parameters)
    loss, _ = algorithm.loss(moved, log_stats=False)
    for one, other in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_advantages_are_scaled_by_the_std_of_their_sum() -> None:
    torch.manual_seed(0)
    advantage = normalized(torch.randn(5000, 2) * torch.tensor([3.0, 4.0]) + 7)
    assert advantage.mean(0).abs().max() < 1e-5
    torch.testing.assert_close(advantage.std(0), torch.tensor([0.6, 0.8]), rtol=0.05, atol=0)


def test_each_value_output_learns_its_own_reward_term() -> None:
    algorithm = learner(epochs=20, batch_size=64, lr=3e-3, normalize_reward=False, terms=("a", "b"))
    obs = {"state": torch.rand(1, 256, 1, 6)}
    sample = algorithm.act({"state": obs["state"][0]})
    end = torch.ones(1, 256, dtype=torch.bool)
    terms = {"a": torch.full((1, 256), 2.0), "b": obs["state"][..., 0, 0]}
    batch = Rollout(
        obs=obs,
        record={key: value[None] for key, value in sample.record.items()},
        logp=sample.logp[None],
        reward=terms["a"] + terms["b"] - 3.0,
        steps=end.long(),
        terminated=end,
        truncated=~end,
        final_obs={"state": obs["state"][0, :0]},
        last_obs={"state": obs["state"][0]},
        terms=terms,
    )
    for _ in range(3):
        algorithm.update(batch)
    values = algorithm.critic.by_term({"state": obs["state"][0]}).detach()
    expected = torch.stack([terms["a"][0], terms["b"][0], torch.full((256,), -3.0)], 1)
    assert float((values - expected).square().mean().sqrt()) < 0.25


def test_unknown_reward_parts_are_refused() -> None:
    algorithm = learner(terms=("energy",))
    with pytest.raises(UserError, match=r"'energy'.*success"):
        algorithm.update(rollout_of(algorithm))
    with pytest.raises(UserError, match="duplicates"):
        HAMNetConfig(terms=("a", "a"))


def test_nan_reward_parts_give_finite_advantages() -> None:
    algorithm = learner()
    batch = rollout_of(algorithm)
    broken = batch.terms["success"].clone()
    broken[0] = torch.nan
    rows: RolloutBatch = algorithm.process_rollout(replace(batch, terms={"success": broken}))
    assert bool(rows.advantage.isfinite().all())
