"""Tests of FPO and FPO++: closed forms of gradient, ratio, Huber loss and clamps, their relation, and learning."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matching_tools import (
    BARE,
    SPEC,
    GaussianFlow,
    bandit,
    gradient,
    head,
    observations,
    point_mass_return,
    prepared,
    tuner,
)

from robopolicy.algorithms.common.rollout_batch import normalize
from robopolicy.algorithms.fpo import FPOConfig, fpo_estimator, fpo_loss
from robopolicy.algorithms.fpo_pp import FPOPlusPlusConfig, huber, straight_through_clamp
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint

UNBOUNDED: dict[str, Any] = {"huber_delta": 0.0, "loss_clamp": None, "ratio_clamp": None, "reduction": "mean"}


def moved(algorithm: Any, rows: int = 64, scale: float = 0.05) -> Any:
    """Rows of a rollout; the weights change after the rollout."""
    data = prepared(algorithm, bandit(algorithm.policy, rows))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in algorithm.policy.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return data


def test_the_ratio_is_the_exponential_of_the_mean_difference_of_losses() -> None:
    algorithm = tuner("fpo", num_mc_samples=5)
    rows = moved(algorithm)
    loss, info = algorithm.loss(rows)
    losses = algorithm.policy.losses(rows.obs, rows.record).mean(-1)  # (B, N)
    ratio = (-rows.logp.mean(1) - losses.mean(1)).exp().detach()
    advantage = normalize(rows.advantage)
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage).mean()
    torch.testing.assert_close(loss, expected)
    assert float(info["ratio_mean"]) == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert 0 < float(info["clip_fraction"]) < 1


def test_the_first_gradient_has_its_closed_form_on_a_gaussian_bandit() -> None:
    """With reward a, E[A grad l] over noise and actions is `2 std^2 E_t[(1 - c t)^2]`, towards higher actions."""
    policy, std = GaussianFlow(0.3, 0.5), 0.5
    algorithm = tuner("fpo", policy, num_mc_samples=8)
    gradients = []
    for seed in range(30):
        noise = torch.Generator().manual_seed(seed)
        action = 0.3 + std * torch.randn(256, 1, 1, generator=noise)
        obs = {"state": torch.zeros(256, 1, 1)}
        record = algorithm.policy.complete(obs, {"data": action}, noise)
        logp = algorithm.policy.decisions(obs, record).logp
        loss, _ = fpo_loss(logp, logp.detach(), (action - 0.3).flatten(), algorithm.estimator)
        gradients.append(torch.autograd.grad(loss, policy.mean)[0])
    found = torch.stack(gradients)
    t = (torch.arange(10_000) + 0.5) / 10_000
    expected = -2 * std**2 * float((1 - policy.slope(t) * t).square().mean())
    error = float(found.std()) / math.sqrt(len(found))
    assert expected < 0 and error < 0.02
    assert float(found.mean()) == pytest.approx(expected, abs=3 * error)


@pytest.mark.parametrize("trust_region", ["clip", "aspo"])
def test_at_ratio_one_the_gradient_equals_weighted_matching(trust_region: str) -> None:
    settings: dict[str, dict[str, Any]] = {"fpo": {}, "fpo_pp": UNBOUNDED | {"trust_region": trust_region}}
    for name, config in settings.items():
        algorithm = tuner(name, **config)
        rows = prepared(algorithm, bandit(algorithm.policy, 64))
        found = gradient(algorithm.loss(rows)[0], algorithm.policy)
        losses = algorithm.policy.losses(rows.obs, rows.record).mean((1, 2))
        expected = gradient((normalize(rows.advantage) * losses).mean(), algorithm.policy)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_fpo_pp_with_one_pair_and_no_bounds_equals_fpo() -> None:
    plain = tuner("fpo", num_mc_samples=1, clip=0.02)
    rows = moved(plain)
    plus = tuner("fpo_pp", num_mc_samples=1, clip=0.02, **UNBOUNDED)
    plus.policy.load_state_dict(plain.policy.state_dict())
    expected, info = plain.loss(rows)
    loss, other = plus.loss(rows)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(other, info)
    torch.testing.assert_close(gradient(loss, plus.policy), gradient(expected, plain.policy))
    assert float(info["ratio_max"]) > 0.05


def test_the_mean_ratio_of_the_pairs_is_at_least_the_ratio_of_fpo() -> None:
    algorithm = tuner("fpo_pp", num_mc_samples=8, **UNBOUNDED)
    rows = moved(algorithm)
    difference = algorithm.logp(rows).detach() - rows.logp  # (B, N)
    assert bool((difference.exp().mean(1) >= difference.mean(1).exp()).all())
    ones = torch.ones(len(rows))
    per_pair = fpo_loss(
        rows.logp + difference, rows.logp, ones, Estimator(EstimatorConfig(surrogate="importance_sampling"))
    )[1]
    per_chunk = fpo_loss(rows.logp + difference, rows.logp, ones, fpo_estimator(0.05))[1]
    assert float(per_pair["ratio_mean"]) > float(per_chunk["ratio_mean"])


def test_aspo_has_a_gradient_for_bad_chunks_beyond_the_clip() -> None:
    old = torch.zeros(3, 1)
    ratio = torch.tensor([[0.9], [0.95], [0.97]])  # below, at and above 1 - clip
    found = {}
    for surrogate in ("clip", "aspo"):
        logp = ratio.log().requires_grad_()
        estimator = Estimator(EstimatorConfig(surrogate=surrogate, bounds=ConstantBounds(0.05)))
        loss, _ = fpo_loss(logp, old, -torch.ones(3), estimator)
        found[surrogate] = torch.autograd.grad(loss, logp)[0].flatten()
    assert float(found["clip"][0]) == 0.0 and float(found["aspo"][0]) < 0  # descending raises the ratio again
    assert float(found["aspo"][1]) == pytest.approx(0.0, abs=1e-5)
    assert float(found["aspo"][2]) > 0


@pytest.mark.parametrize("trust_region", ["clip", "aspo"])
def test_the_loss_of_fpo_pp_matches_its_trust_region(trust_region: str) -> None:
    algorithm = tuner("fpo_pp", num_mc_samples=4, clip=0.02, trust_region=trust_region)
    rows = prepared(algorithm, bandit(algorithm.policy, 64))
    ratio = torch.linspace(0.9, 1.1, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(0))].view(64, 4)
    loss, _ = algorithm.loss(replace(rows, logp=rows.logp - ratio.log()))
    advantage = normalize(rows.advantage)[:, None]
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.02) * advantage)
    quadratic = advantage * ratio - advantage.abs() / (2 * 0.02) * (ratio - 1).square()
    objective = torch.where(advantage < 0, quadratic, clipped) if trust_region == "aspo" else clipped
    torch.testing.assert_close(loss, -objective.mean(), atol=1e-5, rtol=1e-4)


def test_zero_advantages_give_no_gradient() -> None:
    for name in ("fpo", "fpo_pp"):
        algorithm = tuner(name)
        rows = replace(moved(algorithm), advantage=torch.zeros(64))
        assert not bool(gradient(algorithm.loss(rows)[0], algorithm.policy).any())


def test_the_huber_loss_is_quadratic_then_linear_and_smooth() -> None:
    error = torch.linspace(0, 3, 31, dtype=torch.float64)
    loss = huber(error.square(), 0.5)
    expected = torch.where(error <= 0.5, error.square(), error - 0.25)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(huber(error.square(), 0.0), error.square())
    zero = torch.zeros(3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(huber(zero, 0.5).sum(), zero)[0], torch.ones(3))
    # In one dimension it is the Huber loss of the error itself.
    torch.testing.assert_close(loss, 2 * torch.nn.functional.huber_loss(error, 0 * error, reduction="none", delta=0.5))


def test_the_log_probability_of_a_pair_is_the_huber_loss_of_its_steps() -> None:
    algorithm = tuner("fpo_pp", huber_delta=1.2, loss_clamp=None)
    rows = moved(algorithm)
    error = algorithm.policy.losses(rows.obs, rows.record).sqrt()
    assert 0.1 < float((error > 1.2).float().mean()) < 0.9
    bounded = torch.nn.functional.huber_loss(error, 0 * error, reduction="none", delta=1.2)
    torch.testing.assert_close(algorithm.logp(rows), -2 * bounded.sum(-1))


def test_step_losses_and_log_ratios_are_clamped() -> None:
    algorithm = tuner("fpo_pp", loss_clamp=0.3, huber_delta=0.0, ratio_clamp=None)
    rows = moved(algorithm, scale=0.3)
    steps = algorithm.policy.losses(rows.obs, rows.record)
    torch.testing.assert_close(algorithm.logp(rows), -steps.clamp(max=0.3).sum(-1))
    x = torch.tensor([-9.0, -1.0, 2.0, 9.0], requires_grad=True)
    assert straight_through_clamp(x, 5.0).tolist() == [-5.0, -1.0, 2.0, 5.0]
    assert torch.equal(torch.autograd.grad(straight_through_clamp(x, 5.0).sum(), x)[0], torch.ones(4))
    settings: dict[str, Any] = UNBOUNDED | {"ratio_clamp": 0.01}
    bounded = tuner("fpo_pp", **settings)
    rows = moved(bounded, scale=0.3)
    assert float(bounded.loss(rows)[1]["ratio_max"]) <= math.expm1(0.01) + 1e-6


def test_the_loss_of_a_chunk_is_a_mean_or_a_sum_over_executed_steps() -> None:
    mean, total = (tuner("fpo", reduction=reduction) for reduction in ("mean", "sum"))
    rows = prepared(mean, bandit(mean.policy, 32))
    torch.testing.assert_close(total.logp(rows), SPEC.action_horizon * mean.logp(rows))


def test_saving_leaves_the_ratio_of_fresh_data_at_one(tmp_path: Path) -> None:
    algorithm = tuner("fpo_pp", head(hidden_dropout=0.5))
    deployed = algorithm.inference_policy()
    save_checkpoint(tmp_path / "saved", deployed, task="toy/point_mass", obs_sample=observations(5))
    assert deployed.training and not any(module.training for module in algorithm.policy.head.modules())
    _, info = algorithm.loss(prepared(algorithm, bandit(algorithm.policy, 64)))
    assert float(info["ratio_max"]) < 1e-5


def test_deployment_starts_from_zero_noise_unless_disabled(tmp_path: Path) -> None:
    algorithm, obs = tuner("fpo_pp"), observations(5)
    deployed = algorithm.inference_policy()
    assert isinstance(deployed, ZeroNoisePolicy) and deployed.base is algorithm.policy.head
    zero = torch.zeros(5, SPEC.horizon, SPEC.action_dim)
    assert torch.equal(deployed.act(obs), algorithm.policy.head.decode(obs, zero))
    assert torch.equal(deployed.act(obs), deployed.act(obs))
    noise, t = torch.randn_like(zero), torch.full((5,), 0.4)
    assert torch.equal(deployed.field(obs, noise, t), algorithm.policy.head.field(obs, noise, t))
    assert torch.equal(deployed.decode(obs, noise), algorithm.policy.head.decode(obs, noise))
    save_checkpoint(tmp_path / "saved", deployed, task="toy/point_mass", obs_sample=obs)
    loaded, _ = load_policy(tmp_path / "saved")
    assert isinstance(loaded, ZeroNoisePolicy)
    again = tuner("fpo_pp", loaded.train())  # a deployed policy can be fine-tuned again
    assert again.policy.head is loaded.base
    assert tuner("fpo_pp", zero_noise=False).inference_policy().name == "flow"


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("fpo", {"reduction": "max"}, "Unknown reduction 'max'"),
        ("fpo_pp", {"trust_region": "spo"}, "Did you mean 'aspo'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        {"fpo": FPOConfig, "fpo_pp": FPOPlusPlusConfig}[name](**config)


@pytest.mark.parametrize("name", ["fpo", "fpo_pp"])
def test_the_reward_of_a_bandit_rises(name: str) -> None:
    bare: dict[str, Any] = BARE | {"hidden": (32,)}
    policy = head(spec=PolicySpec({"state": (1,)}, action_dim=2), steps=3, **bare)
    algorithm = tuner(name, policy, batch_size=128, lr=3e-3, lr_final=3e-3, clip=0.1, epochs=3)
    target = torch.tensor([0.5, -0.5])
    rewards = []
    for seed in range(25):
        obs = {"state": torch.zeros(256, 1, 1)}
        rollout = bandit(algorithm.policy, 256, lambda chunk: -(chunk[:, 0] - target).square().sum(-1), seed, obs)
        rewards.append(float(rollout.reward.mean()))
        algorithm.update(rollout)
    assert sum(rewards[-3:]) / 3 > 0.6 * sum(rewards[:3]) / 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fpo", "fpo_pp"])
def test_it_learns_the_point_mass_from_scratch(name: str) -> None:
    assert point_mass_return(name, updates=15, clip=0.05, epochs=6) > -4.7  # -6 before
