"""Tests of AC-Flow: weights from the intermediate critic, baseline invariance, warm-up, and the reference penalty."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matching_tools import BARE, bandit, gradient, head, point_mass_return, prepared, tuner

from robopolicy.algorithms.ac_flow import IntermediateConfig, IntermediateValue, ac_flow_loss, critic_weights
from robopolicy.algorithms.common.rollout_batch import normalize
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.critics.value import ValueConfig
from robopolicy.policies.base import PolicySpec

SMALL: dict[str, Any] = {"intermediate": IntermediateConfig(hidden=(16,), activation="silu")}


def rows_of(algorithm: Any, count: int = 64) -> Any:
    return prepared(algorithm, bandit(algorithm.policy, count))


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def test_infinite_penalty_keeps_the_policy_weights_at_the_reference() -> None:
    algorithm = tuner("ac_flow", critic_warmup=0, w2_coef=1e300, **SMALL)  # the loss rounds to 0 in comparison
    before = weights(algorithm.policy)
    for seed in range(2):
        algorithm.update(bandit(algorithm.policy, 64, seed=seed))
    assert all(torch.equal(before[key], value) for key, value in algorithm.policy.state_dict().items())


def test_a_stronger_penalty_reduces_the_distance_to_the_reference() -> None:
    distances = []
    for w2_coef in (0.0, 1.0, 10.0):
        algorithm = tuner("ac_flow", critic_warmup=0, w2_coef=w2_coef, lr=1e-3, lr_final=1e-3, epochs=10, **SMALL)
        for seed in range(3):
            algorithm.update(bandit(algorithm.policy, 64, seed=seed))
        distances.append(float(algorithm.loss(rows_of(algorithm))[1]["w2_distance"].detach()))
    assert distances[0] > distances[1] > distances[2] > 0


def test_weights_are_exponentials_of_clipped_advantages() -> None:
    advantage = torch.tensor([[-3.0, -0.5, 0.0, 0.5, 3.0]])
    found = critic_weights(advantage, clip=1.0, temperature=0.5)
    expected = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]]).exp()
    torch.testing.assert_close(found, expected)


def test_baseline_at_a_point_does_not_change_the_optimal_velocity() -> None:
    """The best velocity at a point with several targets does not change if all weights are scaled by one factor."""
    torch.manual_seed(0)
    outcome, target = torch.randn(50, 1), torch.randn(50, 3)

    def best(baseline: float) -> torch.Tensor:
        weight = critic_weights(outcome - baseline, clip=100.0, temperature=0.7)
        return (weight * target).sum(0) / weight.sum()  # minimum of the weighted squared error

    torch.testing.assert_close(best(0.0), best(1.3))
    assert not torch.allclose(best(0.0), target.mean(0))


def test_the_gradient_equals_the_weighted_loss_plus_the_penalty() -> None:
    algorithm = tuner("ac_flow", w2_coef=0.5, **SMALL)
    rows = rows_of(algorithm)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in algorithm.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    loss, info = algorithm.loss(rows)
    losses = algorithm.policy.losses(rows.obs, rows.record).mean(-1)  # (B, N)
    now, old = (algorithm.policy.velocities(h, rows.obs, rows.record) for h in (algorithm.policy.head, algorithm.base))
    distance = (now - old.detach()).square().mean()
    expected = ((rows.record["weight"] * losses).mean() + 0.5 * distance) / 1.5
    torch.testing.assert_close(gradient(loss, algorithm.policy), gradient(expected, algorithm.policy))
    torch.testing.assert_close(info["w2_distance"], distance)


def test_zero_advantage_gradient_equals_imitation_of_sampled_chunks() -> None:
    algorithm = tuner("ac_flow", w2_coef=0.0, **SMALL)
    rows = rows_of(algorithm)
    estimator = Estimator(EstimatorConfig(surrogate="policy_gradient"))
    weight = critic_weights(torch.zeros_like(rows.logp), 1.0, 0.5)
    loss, _ = ac_flow_loss(algorithm.logp(rows), rows.logp, weight, torch.zeros(()), estimator, 0.0)
    cloning = algorithm.policy.losses(rows.obs, rows.record).mean()
    torch.testing.assert_close(gradient(loss, algorithm.policy), gradient(cloning, algorithm.policy))


def test_outcomes_are_normalised_and_weights_use_the_critic_before_its_update() -> None:
    algorithm = tuner("ac_flow", **SMALL)
    rows = rows_of(algorithm)
    torch.testing.assert_close(rows.record["outcome"], normalize(rows.advantage))
    value = algorithm.intermediate_value(rows).detach()
    expected = critic_weights(rows.record["outcome"].unsqueeze(1) - value, 1.0, 0.5)
    torch.testing.assert_close(rows.record["weight"], expected)
    assert not torch.equal(rows.record["weight"], torch.ones_like(expected))


def test_critic_warmup_updates_both_critics_but_not_the_actor() -> None:
    algorithm = tuner("ac_flow", critic_warmup=1, **SMALL)
    parts = {name: getattr(algorithm, name) for name in ("policy", "critic", "intermediate")}
    before = {name: weights(part) for name, part in parts.items()}
    metrics = algorithm.update(bandit(algorithm.policy, 64))
    changed = {
        name: any(not torch.equal(before[name][key], value) for key, value in part.state_dict().items())
        for name, part in parts.items()
    }
    assert changed == {"policy": False, "critic": True, "intermediate": True}
    assert "actor/loss" not in metrics and "critic/loss" in metrics


def test_a_critic_step_regresses_the_outcomes_at_the_stored_pairs() -> None:
    algorithm = tuner("ac_flow", **SMALL)
    rows = rows_of(algorithm)
    error = algorithm.intermediate_value(rows) - rows.record["outcome"].unsqueeze(1)
    expected = gradient(error.square().mean(), algorithm.intermediate)
    algorithm.critic_step(rows)
    found = torch.cat([parameter.grad.flatten() for parameter in algorithm.intermediate.parameters()])
    torch.testing.assert_close(found, expected)


def test_the_critics_learn_the_outcome_from_observations() -> None:
    algorithm = tuner("ac_flow", critic_lr=1e-2, critic=ValueConfig(hidden=(32,)), **SMALL)
    rows = rows_of(algorithm)
    outcome = rows.obs["state"][:, 0, 0].sign()
    rows = replace(rows, record=rows.record | {"outcome": outcome}, value_target=-outcome)
    for _ in range(150):
        algorithm.critic_step(rows)
    with torch.no_grad():
        known, value = algorithm.intermediate_value(rows), algorithm.critic(rows.obs)
    assert float((known - outcome.unsqueeze(1)).square().mean()) < 0.3  # 1 at the start
    assert float((value + outcome).square().mean()) < 0.3


def test_intermediate_critic_predicts_the_mean_at_time_0_and_the_outcome_at_time_1() -> None:
    """With the action as outcome, the critic predicts its mean 0 at time 0 and the outcome itself at time 1."""
    torch.manual_seed(0)
    spec = PolicySpec({"state": (1,)}, action_dim=1)
    critic = IntermediateValue(IntermediateConfig(hidden=(32, 32), activation="silu", normalization="identity"), spec)
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3)
    for _ in range(250):
        data, noise, t = torch.randn(256, 1, 1, 1), torch.randn(256, 1, 1, 1), torch.rand(256, 1)
        x = noise + t[..., None, None] * (data - noise)
        loss = (critic({"state": torch.zeros(256, 1, 1)}, x, t) - data.view(256, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    obs, x = {"state": torch.zeros(1, 1, 1)}, torch.linspace(-1.5, 1.5, 7).view(1, 7, 1, 1)
    with torch.no_grad():
        start, end = (critic(obs, x, torch.full((1, 7), t)).flatten() for t in (0.0, 1.0))
    assert float(start.abs().max()) < 0.3
    assert float((end - x.flatten()).abs().max()) < 0.3


def test_unused_settings_of_the_intermediate_critic_are_refused(tmp_path: Path, refused: Any) -> None:
    command = ("train", "task=point_mass", "policy=flow", "algorithm=ac_flow", "budget.updates=1", f"out={tmp_path}")
    for setting in ("residual=true", "bias=3", "orthogonal_init=false", "privileged_obs={state:2}"):
        assert setting.split("=")[0] in refused(*command, f"algorithm.intermediate.{setting}")


def test_the_reward_of_a_bandit_rises() -> None:
    bare: dict[str, Any] = BARE | {"hidden": (32,)}
    policy = head(spec=PolicySpec({"state": (1,)}, action_dim=2), steps=3, **bare)
    rates: dict[str, Any] = {"lr": 3e-3, "lr_final": 3e-3, "critic_lr": 3e-3}
    algorithm = tuner("ac_flow", policy, batch_size=128, epochs=3, critic_warmup=2, w2_coef=0.1, **SMALL, **rates)
    target = torch.tensor([0.5, -0.5])
    rewards = []
    for seed in range(25):
        obs = {"state": torch.zeros(256, 1, 1)}
        rollout = bandit(algorithm.policy, 256, lambda chunk: -(chunk[:, 0] - target).square().sum(-1), seed, obs)
        rewards.append(float(rollout.reward.mean()))
        algorithm.update(rollout)
    assert sum(rewards[-3:]) / 3 > 0.75 * sum(rewards[:3]) / 3


@pytest.mark.slow
def test_it_learns_the_point_mass_from_scratch() -> None:
    settings: dict[str, Any] = {"critic_warmup": 2, "w2_coef": 0.1, **SMALL}
    assert point_mass_return("ac_flow", updates=12, epochs=6, **settings) > -5.2  # -6 before
