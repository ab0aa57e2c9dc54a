"""Tests of AWM: the gradient of advantage-weighted matching, its limits, its penalties, and its relation to FPO."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from matching_tools import (
    BARE,
    GaussianFlow,
    bandit,
    gradient,
    head,
    modes,
    near_goal,
    point_mass_return,
    prepared,
    ring,
    tuner,
)

from robopolicy.algorithms.awm import WEIGHTINGS, AWMConfig, awm_estimator
from robopolicy.algorithms.common.rollout_batch import normalize
from robopolicy.algorithms.fpo import fpo_loss
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec

FREE: dict[str, Any] = {"ref_coef": 0.0, "ema_coef": 0.0}


def rows_of(algorithm: Any, count: int = 64) -> Any:
    return prepared(algorithm, bandit(algorithm.policy, count))


def perturb(policy: Any, scale: float = 0.05) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def test_first_gradient_equals_the_advantage_weighted_matching_gradient() -> None:
    algorithm = tuner("awm", **FREE)
    rows = rows_of(algorithm)
    advantage = normalize(rows.advantage).clamp(-5, 5) / 5
    losses = algorithm.policy.losses(rows.obs, rows.record).mean((1, 2))
    found = gradient(algorithm.loss(rows)[0], algorithm.policy)
    torch.testing.assert_close(found, gradient((advantage * losses).mean(), algorithm.policy), rtol=1e-4, atol=1e-7)
    assert bool((advantage < 0).any())  # signed: bad chunks are pushed away


def test_zero_advantages_leave_only_the_penalty_gradient() -> None:
    algorithm = tuner("awm", ref_coef=0.5, ema_coef=2.0)
    rows = rows_of(algorithm)
    perturb(algorithm.policy)
    rows = replace(rows, advantage=torch.zeros(64))
    found = gradient(algorithm.loss(rows)[0], algorithm.policy)
    assert bool(found.any())
    torch.testing.assert_close(found, gradient(algorithm.penalties(rows)[0], algorithm.policy))


def test_equal_positive_advantage_gradient_equals_imitation_of_sampled_chunks() -> None:
    algorithm = tuner("awm", **FREE)
    rows = rows_of(algorithm)
    loss, _ = fpo_loss(algorithm.logp(rows), rows.logp, torch.ones(64), awm_estimator(1.0))
    record, features = rows.record, algorithm.policy.head.encode(rows.obs)
    cloning = [
        algorithm.policy.head.matching_loss(features, record["data"], noise, t)[:, :2].mean()
        for noise, t in zip(record["noise"].unbind(1), record["t"].unbind(1), strict=True)
    ]
    expected = gradient(torch.stack(cloning).mean(), algorithm.policy)
    torch.testing.assert_close(gradient(loss, algorithm.policy), expected, rtol=1e-4, atol=1e-7)


def test_fpo_ratio_is_the_geometric_mean_of_awm_ratios() -> None:
    matching = tuner("awm", num_mc_samples=8, **FREE)
    rows = rows_of(matching)
    fpo = tuner("fpo", num_mc_samples=8)
    perturb(matching.policy)
    fpo.policy.load_state_dict(matching.policy.state_dict())
    ratio = (matching.logp(rows) - rows.logp).detach().exp()  # (B, N)
    one = (fpo.logp(rows) - rows.logp).detach().mean(1).exp()
    torch.testing.assert_close(ratio.log().mean(1).exp(), one)
    assert bool((ratio.mean(1) >= one).all())


def test_the_gradient_matches_its_closed_form_on_a_gaussian_bandit() -> None:
    policy = GaussianFlow(0.3, 0.5)
    algorithm = tuner("awm", policy, **FREE)
    torch.manual_seed(0)
    action = 0.3 + 0.5 * torch.randn(4000, 1, 1)
    obs = {"state": torch.zeros(4000, 1, 1)}
    record = algorithm.policy.complete(obs, {"data": action}, torch.Generator().manual_seed(0))
    for sign in (1.0, -1.0):
        logp = algorithm.policy.decisions(obs, record).logp
        loss, _ = fpo_loss(logp, logp.detach(), sign * (action - 0.3).flatten(), algorithm.estimator)
        slope = float(torch.autograd.grad(loss, policy.mean)[0])
        t = (torch.arange(10_000) + 0.5) / 10_000
        expected = -sign * 2 * 0.25 * float((1 - policy.slope(t) * t).square().mean())
        assert slope == pytest.approx(expected, rel=0.1)


def test_penalties_are_zero_at_their_anchors_and_mean_squares_elsewhere() -> None:
    algorithm = tuner("awm", ref_coef=0.5, ema_coef=2.0)
    rows = rows_of(algorithm)
    penalty, info = algorithm.penalties(rows)
    assert float(penalty.detach()) == 0.0 == float(info["ref_distance"].detach())
    perturb(algorithm.policy)
    penalty, info = algorithm.penalties(rows)
    now, old = (algorithm.policy.velocities(h, rows.obs, rows.record) for h in (algorithm.policy.head, algorithm.base))
    distance = (now - old).square().mean()
    torch.testing.assert_close(info["ref_distance"], distance)
    torch.testing.assert_close(penalty, 2.5 * distance)  # both anchors are still the pretrained policy
    assert float(tuner("awm", **FREE).penalties(rows)[0]) == 0.0


def test_each_penalty_pulls_to_its_own_anchor() -> None:
    algorithm = tuner("awm", ref_coef=0.5, ema_coef=2.0)
    rows = rows_of(algorithm)
    perturb(algorithm.policy, 0.05)
    algorithm.average.module.load_state_dict(algorithm.policy.head.state_dict())
    perturb(algorithm.policy, 0.02)
    penalty, info = algorithm.penalties(rows)
    now, base, average = (
        algorithm.policy.velocities(head, rows.obs, rows.record)
        for head in (algorithm.policy.head, algorithm.base, algorithm.average.module)
    )
    far, near = ((now - anchor.detach()).square().mean() for anchor in (base, average))
    assert float(far.detach()) > 2 * float(near.detach()) > 0
    torch.testing.assert_close((info["ref_distance"], info["ema_distance"]), (far, near))
    torch.testing.assert_close(penalty, 0.5 * far + 2.0 * near)
    expected = gradient(0.5 * far + 2.0 * near, algorithm.policy.head)
    torch.testing.assert_close(gradient(penalty, algorithm.policy.head), expected)


def test_the_delayed_average_follows_once_per_rollout() -> None:
    algorithm = tuner("awm", ema_decay=0.3, critic_warmup=0)
    rollout = bandit(algorithm.policy, 64)
    algorithm.update(rollout)
    name = "backbone.body.0.weight"
    first = algorithm.policy.head.state_dict()[name].clone()
    assert torch.equal(algorithm.average.module.state_dict()[name], first)  # the first update copies
    algorithm.update(rollout)
    expected = 0.3 * first + 0.7 * algorithm.policy.head.state_dict()[name]
    torch.testing.assert_close(algorithm.average.module.state_dict()[name], expected)


def test_weightings_have_their_closed_forms() -> None:
    loss, t = torch.tensor([[0.0, 0.25, 4.0]]), torch.tensor([[0.5, 0.0, 0.75]])
    assert torch.equal(WEIGHTINGS["uniform"](loss, t, 0.25), loss)
    torch.testing.assert_close(WEIGHTINGS["noise"](loss, t, 0.25), torch.tensor([[0.0, 0.25, 1.0]]))
    torch.testing.assert_close(WEIGHTINGS["power"](loss, t, 1.0), torch.tensor([[0.0, 0.25, 1.0]]), atol=1e-6, rtol=0)
    huber = WEIGHTINGS["power"](loss, t, 0.5)
    torch.testing.assert_close(huber, torch.tensor([[0.0, 1.0, 1.0]]), atol=1e-4, rtol=0)
    zero = torch.zeros(1, 1, requires_grad=True)
    slope = torch.autograd.grad(WEIGHTINGS["power"](zero, torch.zeros(1, 1), 0.25).sum(), zero)[0]
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_every_weighting_starts_at_ratio_one(weighting: str) -> None:
    algorithm = tuner("awm", weighting=weighting)
    _, info = algorithm.loss(rows_of(algorithm))
    assert float(info["ratio_max"]) < 1e-5


def test_advantages_are_clipped_and_scaled_to_one() -> None:
    algorithm = tuner("awm", advantage_clip=2.0, **FREE)
    rows = rows_of(algorithm)
    outlier = rows.advantage.clone()
    outlier[0] = 1e3
    rows = replace(rows, advantage=outlier)
    advantage = normalize(outlier).clamp(-2, 2) / 2
    assert float(normalize(outlier).max()) > 2 and float(advantage.max()) == 1.0
    loss, _ = algorithm.loss(rows)
    assert float(loss.detach()) == pytest.approx(-float(advantage.mean()), abs=1e-5)  # all ratios are 1


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown weighting 'snr'"):
        AWMConfig(weighting="snr")


@pytest.mark.slow
def test_awm_penalties_preserve_goal_modes_that_fpo_loses() -> None:
    goals, kept = ring(6), {}
    for name in ("awm", "fpo"):
        policy = head(spec=PolicySpec({"state": (1,)}, action_dim=2), **BARE)
        algorithm = tuner(name, policy, lr=2e-3, lr_final=2e-3, batch_size=512, epochs=4)
        rewards = []
        for seed in range(60):
            obs = {"state": torch.zeros(512, 1, 1)}
            rollout = bandit(algorithm.policy, 512, lambda chunk: near_goal(chunk, goals), seed, obs)
            rewards.append(float(rollout.reward.mean()))
            algorithm.update(rollout)
        assert sum(rewards[-3:]) > 1.7 * sum(rewards[:3]), name
        kept[name] = modes(policy, goals)
    assert kept["fpo"] < 3 < 4.5 < kept["awm"]


@pytest.mark.slow
def test_it_learns_the_point_mass_from_scratch() -> None:
    assert point_mass_return("awm", updates=15, epochs=6) > -5  # -6 before
