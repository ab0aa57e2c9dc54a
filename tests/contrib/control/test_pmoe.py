"""Tests of PMOE: frequency loss, gradient routing, soft target, checkpoints, and a bandit with two optima."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, SPEC, STATISTICS, batch, first_actions, flow, gaussian, seeded
from torch import Tensor

from robopolicy.algorithms.registry import make_algorithm
from robopolicy.contrib.control.pmoe import PMOE, PMOEConfig, actor_loss, frequency_loss
from robopolicy.errors import UserError
from robopolicy.policies.heads.mixture import MixtureConfig, MixturePolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint


def mixture(**config: Any) -> MixturePolicy:
    small: dict[str, Any] = {"hidden": (32,), "router_hidden": (), "experts": 3, "normalization": "minmax"}
    settings = small | {"squash": True, "state_dependent_std": True, "log_std_min": -5.0} | config
    policy = MixturePolicy(MixtureConfig(**settings), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def pmoe(policy: MixturePolicy | None = None, **config: Any) -> PMOE:
    settings = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    return PMOE(PMOEConfig(**settings), policy or mixture(), total_updates=100)


def peaks(action: Tensor) -> Tensor:
    """Reward `(B,)` of actions `(B, 1)` with equal optima at +-0.7."""
    return torch.exp(-((action.squeeze(1).abs() - 0.7) / 0.2).square())


def random_batch(rows: int, **settings: Any) -> Any:
    return batch(torch.rand(rows, 2, 1) * 2 - 1, peaks, **settings)


def test_frequency_loss_is_minimal_when_the_router_equals_the_frequencies() -> None:
    best = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    logit = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logit], lr=0.1)
    for _ in range(200):
        loss, info = frequency_loss(logit.log_softmax(0).expand(10, 3), best)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(logit.detach().softmax(0), torch.tensor([0.5, 0.3, 0.2]), atol=1e-3, rtol=0)
    assert float(info["router_entropy"]) == pytest.approx(-sum(p * math.log(p) for p in (0.5, 0.3, 0.2)), abs=1e-2)


def test_actor_loss_trains_only_the_best_expert_and_frequency_loss_only_the_router() -> None:
    algorithm = pmoe(router_coef=0.0)
    data = random_batch(64)

    def gradients(coefficient: float) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        policy, critic = algorithm.policy, algorithm.critic
        chunks, _, _ = policy.rsample_experts(data.obs, generator=generator)
        best = critic.candidate_values(data.obs, chunks).min(0).values.argmax(1)
        generator.manual_seed(0)
        loss, _ = actor_loss(policy, critic, data.obs, torch.tensor(0.1), coefficient, generator)
        parameters = [policy.centres, *policy.router.parameters()]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        router = torch.cat([torch.zeros(1) if g is None else g.flatten() for g in found[1:]])
        return found[0].flatten(), router, best

    centres, router, best = gradients(0.0)
    chosen = torch.bincount(best, minlength=3) > 0
    assert torch.equal(centres != 0, chosen) and not bool(router.any())
    again, router, _ = gradients(1.0)
    assert torch.equal(again, centres) and bool(router.any())


def test_target_is_the_soft_value_of_the_expert_sampled_by_the_router() -> None:
    algorithm = pmoe(temperature=0.3)
    data = random_batch(256, discount=0.9)
    state = algorithm.generator.get_state()
    target = algorithm.target(data)
    algorithm.generator.set_state(state)
    chunks, logp, log_weight = algorithm.policy.rsample_experts(data.next_obs, generator=algorithm.generator)
    values = algorithm.target_critic.candidate_values(data.next_obs, chunks).min(0).values
    choices = data.reward[:, None] + 0.9 * (values - 0.3 * logp)  # (B, M)
    distance = (choices - target[:, None]).abs()
    assert float(distance.detach().min(1).values.max()) < 1e-5
    frequency = torch.bincount(distance.argmin(1), minlength=3) / 256
    assert float((frequency - log_weight.exp().mean(0)).abs().max().detach()) < 0.1


def test_actor_maximises_the_expert_with_the_highest_minimum_value() -> None:
    algorithm, data = pmoe(router_coef=2.0), random_batch(64)
    spec = algorithm.policy.spec
    assert algorithm.target_entropy == -spec.action_horizon * spec.action_dim  # executed actions only
    generator = seeded(algorithm)
    policy, critic = algorithm.policy, algorithm.critic
    loss, info = actor_loss(policy, critic, data.obs, torch.tensor(0.3), 2.0, algorithm.generator)
    chunks, densities, log_weight = algorithm.policy.rsample_experts(data.obs, generator=generator)
    values = algorithm.critic.candidate_values(data.obs, chunks).amin(0)
    best = values.argmax(1)
    rows = torch.arange(64)
    torch.testing.assert_close(info["logp"], densities[rows, best].detach())
    wrong = (log_weight.exp() - torch.eye(3)[best]).square().mean()
    torch.testing.assert_close(loss, (0.3 * densities - values)[rows, best].mean() + 2 * wrong)


def test_actor_step_does_not_change_the_critic() -> None:
    algorithm = pmoe()
    before = copy.deepcopy([algorithm.critic.state_dict(), algorithm.target_critic.state_dict()])
    policy = copy.deepcopy(algorithm.policy.state_dict())
    algorithm.actor_step(random_batch(64))
    after = [algorithm.critic.state_dict(), algorithm.target_critic.state_dict()]
    assert all(torch.equal(a[key], b[key]) for a, b in zip(before, after, strict=True) for key in a)
    assert any(not torch.equal(policy[key], value) for key, value in algorithm.policy.state_dict().items())
    assert all(p.grad is None for p in algorithm.critic.parameters())
    assert all(p.requires_grad for p in algorithm.critic.parameters())


def learn(algorithm: PMOE, updates: int = 150) -> None:
    for _ in range(updates):
        algorithm.update(random_batch(128))


def shares(policy: MixturePolicy) -> list[float]:
    """Fraction of samples near each optimum."""
    action = first_actions(policy, 2000, deterministic=False)
    return [float(((action - optimum).abs() < 0.25).float().mean()) for optimum in (-0.7, 0.7)]


def test_mixture_experts_cover_both_optima_while_one_gaussian_covers_one() -> None:
    common = {"temperature": 0.02, "temperature_lr": 0.0, "lr": 1e-2}
    several, single = pmoe(mixture(experts=4), **common), pmoe(mixture(experts=1), **common)
    learn(several)
    learn(single)
    assert min(shares(several.policy)) > 0.1 and sum(shares(several.policy)) > 0.7
    assert min(shares(single.policy)) < 0.02 and max(shares(single.policy)) > 0.9
    best = first_actions(several.inference_policy())
    assert float((best.abs() - 0.7).abs().max()) < 0.2


def test_the_deployed_policy_survives_a_checkpoint(tmp_path: Path) -> None:
    algorithm = pmoe()
    metrics = algorithm.update(random_batch(128))
    assert {"actor/router_loss", "actor/router_entropy", "actor/entropy", "actor/expert_entropy"} <= set(metrics)
    save_checkpoint(
        tmp_path / "checkpoint", algorithm.inference_policy(), task="toy/point_mass", obs_sample=random_batch(4).obs
    )
    assert verify_checkpoint(tmp_path / "checkpoint").ok
    again, _ = load_policy(tmp_path / "checkpoint")
    torch.testing.assert_close(first_actions(again), first_actions(algorithm.policy))


def test_warmup_actions_are_uniform_over_the_bounds() -> None:
    chunk = pmoe().warmup_action({"state": torch.zeros(5000, 1, 2)}, generator=torch.Generator().manual_seed(0)).chunk
    assert float(chunk.abs().max()) <= 1 and float(chunk.std()) == pytest.approx(1 / math.sqrt(3), abs=0.02)


def test_losses_are_finite_under_autocast_and_propagate_nan() -> None:
    algorithm = pmoe()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = actor_loss(
            algorithm.policy, algorithm.critic, random_batch(32).obs, torch.tensor(0.1), 1.0, algorithm.generator
        )
        critic, _ = algorithm.critic_loss(random_batch(32))
    assert bool(loss.isfinite() & critic.isfinite())
    broken = batch(torch.rand(32, 2, 1), lambda action: action.squeeze(1) * float("nan"))
    assert bool(algorithm.critic_loss(broken)[0].isnan())


def test_other_policies_are_refused_with_a_hint() -> None:
    for policy in (gaussian(), flow(), mixture(squash=False)):
        with pytest.raises(UserError, match="policy=squashed_mixture"):
            make_algorithm("pmoe", PMOEConfig(), policy, total_updates=1)
