"""Tests of BPO, MDPO and TA-LPO against closed forms and PPO."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from on_policy_learners import (
    algorithm,
    check_moves_statistics_when_the_epochs_are_over,
    check_takes_the_statistics_of_the_policy,
)
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, flatten, normalize
from robopolicy.algorithms.ppo import PPO
from robopolicy.contrib.control.bpo import BPO, median_loss
from robopolicy.contrib.control.mdpo import MDPO
from robopolicy.contrib.control.ta_lpo import TALPO
from robopolicy.core.surrogates import best_ratio, importance_sampling
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError


def rows_of(learner: PPO) -> RolloutBatch:
    return learner.process_rollout(tools.sampler_for(learner).collect(learner.act))


def test_median_loss_is_minimal_where_the_mean_sigmoid_is_one_half() -> None:
    returns = torch.tensor([0.0, 0.0, 0.0, 40.0, 80.0], dtype=torch.float64)
    u = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([u], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = median_loss(returns - u).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (returns - u.detach()).sigmoid().mean() == pytest.approx(0.5, abs=1e-6)
    assert float(u.detach()) < 3  # near the median 0, far from the mean 24


def test_target_ratios_of_skewed_returns_average_one_at_the_median_not_at_the_value() -> None:
    learner: BPO = algorithm("bpo")
    heavy = torch.randn(4096, generator=torch.Generator().manual_seed(0)).exp()
    returns = (heavy - heavy.mean()) / heavy.std()  # standard deviation 1, like normalised returns
    obs, zero = {"state": torch.zeros(len(returns), 1, 6)}, torch.zeros(len(returns))
    rows = RolloutBatch(obs, {}, zero[:, None], zero, returns, zero)
    optimizer = torch.optim.Adam([*learner.median.parameters(), *learner.critic.parameters()], lr=3e-3)
    for at in torch.arange(4096).view(64, 64).repeat(4, 1):
        optimizer.zero_grad()
        learner.critic_loss(rows[at]).backward()
        optimizer.step()
    with torch.no_grad():
        thresholds = [net(rows[slice(1)].obs) for net in (learner.median, learner.critic)]
    by_median, by_value = (float(best_ratio(returns - u, 0.7, 1.3, 0.001).mean()) for u in thresholds)
    assert by_median == pytest.approx(1.0, abs=0.03)
    assert by_value < 0.93


def test_bpo_starts_at_ratio_one_with_a_signed_policy_gradient() -> None:
    learner: BPO = algorithm("bpo", temperature=1e-6)
    rows = rows_of(learner)
    loss, info = learner.loss(rows, log_stats=True)
    assert float(info["approx_kl"]) == pytest.approx(0, abs=1e-9)
    assert float(info["outside"]) == 0.0
    actual = torch.autograd.grad(loss, list(learner.policy.parameters()))
    with torch.no_grad():
        side = torch.sign(rows.value_target - learner.median(rows.obs))
        weight = (rows.value_target - learner.critic(rows.obs)).abs()
    plain = -(side * weight * learner.policy.decisions(rows.obs, rows.record).logp.sum(1)).mean()
    for a, b in zip(actual, torch.autograd.grad(plain, list(learner.policy.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_bpo_gradient_lowers_ratios_above_their_target() -> None:
    learner: BPO = algorithm("bpo", temperature=1e-6)
    rows = rows_of(learner)
    rows = RolloutBatch(
        rows.obs, rows.record, rows.logp - 1.0, rows.advantage, rows.value_target, rows.value
    )  # ratio e
    loss, _ = learner.loss(rows, log_stats=False)
    actual = torch.autograd.grad(loss, list(learner.policy.parameters()))
    with torch.no_grad():
        weight = (rows.value_target - learner.critic(rows.obs)).abs()
    down = (weight * torch.e * learner.policy.decisions(rows.obs, rows.record).logp.sum(1)).mean()
    for a, b in zip(actual, torch.autograd.grad(down, list(learner.policy.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_bpo_multiplies_the_loss_of_a_row_by_its_importance_weight() -> None:
    learner: BPO = algorithm("bpo")
    rollout = tools.sampler_for(learner).collect(learner.act)
    weight = torch.rand(rollout.shape) * 2
    plain, weighted = (learner.process_rollout(replace(rollout, weight=each)) for each in (None, weight))
    each = torch.stack([learner.loss(row, log_stats=False)[0] for row in plain.split(1)])
    torch.testing.assert_close(learner.loss(weighted, log_stats=False)[0], (each * weight.flatten()).mean())


def assert_same_gradient(loss: Tensor, expected: Tensor, learner: PPO) -> None:
    parameters = list(learner.policy.parameters())
    tools.assert_close(tools.gradient(loss, parameters), tools.gradient(expected, parameters))


def test_mdpo_gradient_is_the_scaled_advantage_minus_the_log_ratio() -> None:
    learner: MDPO = algorithm("mdpo", step_size=0.5)
    rows = rows_of(learner)
    logp = learner.policy.decisions(rows.obs, rows.record).logp.sum(1)
    advantage = 0.5 * normalize(rows.advantage)
    loss, _ = learner.loss(rows, log_stats=False)
    assert_same_gradient(loss, -(advantage * logp).mean(), learner)
    moved = replace(rows, logp=rows.logp - 0.3)  # all ratios are exp(0.3); the KL subtracts 0.3
    loss, _ = learner.loss(moved, log_stats=False)
    assert_same_gradient(loss, ((0.3 - advantage) * math.exp(0.3) * logp).mean(), learner)


def divergence(learner: Any, rollout: Rollout) -> float:
    """Mean KL from the policy after an update to the policy before it, in the states of the rollout."""
    obs = flatten(rollout.obs)
    old = copy.deepcopy(learner.policy)
    metrics = learner.update(rollout)
    assert metrics["actor/epochs"] == learner.config.epochs
    buffers = {key: value for key, value in old.state_dict().items() if key in dict(old.named_buffers())}
    learner.policy.load_state_dict(learner.policy.state_dict() | buffers)
    with torch.no_grad():
        new_mean, new_log_std = learner.policy.distribution(obs)
        old_mean, old_log_std = old.distribution(obs)
        apart = kl_divergence(Normal(new_mean, new_log_std.exp()), Normal(old_mean, old_log_std.exp()))
    return float(apart.flatten(1).sum(1).mean())


def test_mdpo_update_kl_decreases_during_training() -> None:
    found = []
    for done in (0, 10, 15, 19):
        learner: MDPO = algorithm("mdpo", epochs=40, batch_size=256, lr=3e-3, lr_schedule="constant")
        rollout = tools.sampler_for(learner).collect(learner.act)
        learner.updates = done
        found.append(divergence(learner, rollout))
    assert [kl / found[0] for kl in found[1:]] == pytest.approx([0.5**2, 0.25**2, 0.05**2], rel=0.4)


def test_bpo_and_ppo_updates_have_similar_kl_on_the_same_rollout() -> None:
    bpo, ppo = (algorithm(name, epochs=10, lr=1e-3) for name in ("bpo", "ppo"))
    rollout = tools.sampler_for(bpo).collect(bpo.act)
    by_bpo, by_ppo = (divergence(learner, rollout) for learner in (bpo, ppo))
    assert 0.003 < min(by_bpo, by_ppo) < max(by_bpo, by_ppo) < 0.03
    assert 1 / 3 < by_bpo / by_ppo < 3


def test_mdpo_step_size_anneals_to_zero() -> None:
    learner: MDPO = algorithm("mdpo", step_size=2.0)
    assert learner.step_size == 2.0
    learner.updates = 15
    assert learner.step_size == pytest.approx(0.5)
    learner.updates = 20
    rows = rows_of(learner)
    loss, _ = learner.loss(rows, log_stats=True)
    assert max(float(g.abs().max()) for g in torch.autograd.grad(loss, list(learner.policy.parameters()))) < 1e-6


def test_ta_lpo_drift_narrows_with_the_budget_and_continues_after_resume() -> None:
    make = partial(algorithm, "ta_lpo", updates=4, entropy_coef=0.01, final=0.2)
    learner, other = tools.resumed(make)
    for trained in (learner, other):
        left = {name: controller.value for name, controller in trained.estimator.controllers.items()}
        assert left == pytest.approx({"alpha": 1.2, "beta": 0.36, "entropy": 0.006, "kl": 0.0, "ratio_variance": 0.0})
    sampler = tools.sampler_for(learner)
    for _ in range(2):
        metrics = learner.update(sampler.collect(learner.act))
    assert metrics["actor/drift_width"] == pytest.approx(0.8)  # of the last update; the next value is final
    assert learner.estimator.controllers["alpha"].value == pytest.approx(0.4)


def test_ta_lpo_with_wide_drifts_is_the_unclipped_gradient() -> None:
    learner: TALPO = algorithm("ta_lpo", alpha=1e6, beta=1e6)
    rows = rows_of(learner)
    rows = RolloutBatch(rows.obs, rows.record, rows.logp - 0.3, rows.advantage, rows.value_target, rows.value)
    parameters = list(learner.policy.parameters())
    actual = torch.autograd.grad(learner.loss(rows, log_stats=False)[0], parameters)
    change = learner.policy.decisions(rows.obs, rows.record).logp.sum(1) - rows.logp.sum(1)
    advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
    plain = torch.autograd.grad(importance_sampling(change, advantage, 0.8, 1.2).loss.mean(), parameters)
    for a, b in zip(actual, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


NAMES = ("bpo", "mdpo", "ta_lpo")


@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_update_after_the_epochs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_moves_statistics_when_the_epochs_are_over(name, monkeypatch)


def test_critics_with_the_policy_normalization_share_its_statistics() -> None:
    check_takes_the_statistics_of_the_policy("bpo")


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("bpo", {"bound": 1.0}, "bound"),
        ("bpo", {"temperature": 0.0}, "temperature"),
        ("mdpo", {"step_size": 0.0}, "step_size"),
        ("ta_lpo", {"final": 0.0}, "final must be positive"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        algorithm(name, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_learners_solve_the_point_mass(name: str) -> None:
    learner = algorithm(name, updates=100, num_steps=40, epochs=6, batch_size=512, lr=1e-3)
    sampler = tools.sampler_for(learner, num_envs=64)
    for _ in range(30):
        learner.update(sampler.collect(learner.act))
    for _ in range(2):
        sampler.episode_stats()
        sampler.collect(learner.act)
    assert sampler.episode_stats()["rollout/success"] > 0.85
