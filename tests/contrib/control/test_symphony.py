"""Tests of Symphony: action penalty, sorted value and age-weighted replay in closed form, and a bandit."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SPEC, STATISTICS, batch, first_actions, flow, gaussian, seeded, shifted
from torch import Tensor

from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.contrib.control.symphony import (
    RewardScaler,
    Symphony,
    SymphonyConfig,
    action_penalty_loss,
    age_quantile,
    rising_gain,
    symmetric_loss,
)
from robopolicy.contrib.control.symphony_policy import SymphonyPolicy, SymphonyPolicyConfig
from robopolicy.contrib.control.weighted_quantile_q import WeightedQuantileQ
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError

SMALL = CriticConfig(members=3, hidden=(32, 32), activation="relu", layer_norm=False)


def swaddled() -> SymphonyPolicy:
    policy = SymphonyPolicy(SymphonyPolicyConfig(hidden=(32, 32), activation="relu", normalization="minmax"), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def symphony(seed: int = 0, **config: Any) -> Symphony:
    torch.manual_seed(seed)
    settings = {"critic": SMALL, "nodes": 8, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    return Symphony(SymphonyConfig(**settings), swaddled(), total_updates=1000)


def peak(action: Tensor) -> Tensor:
    return 1 - (action.squeeze(1) - 0.4).square()


def random_batch(rows: int = 128, discount: float = 0.0) -> Any:
    return batch(torch.rand(rows, 2, 1) * 2 - 1, peak, discount=discount)


# Losses.


def test_action_penalty_is_finite_and_steepest_near_full_strength() -> None:
    strength = torch.tensor([1e-3, 0.3, 0.9, 0.99, 0.999], requires_grad=True)
    for tightness in (0.2, 0.5, 0.9):
        loss = action_penalty_loss(strength, torch.full((5,), tightness))
        (slope,) = torch.autograd.grad(loss.sum(), strength)
        assert bool(loss.isfinite().all())
        assert float(slope[-1]) > 100 and float(slope[-1]) > float(slope[-2]) > float(slope[-3])
        assert float(slope[0]) < 0  # a small strength lowers the loss
    at = action_penalty_loss(torch.tensor(0.25), torch.tensor(0.5))
    early, late = math.log((1 + 0.0625) / (1 - 0.0625)), math.log((1 + 0.25) / (1 - 0.25))
    assert float(at) == pytest.approx(early + 0.5 * 0.25 * math.log(0.25) + late, rel=1e-5)


def test_a_tight_penalty_starts_at_lower_strength() -> None:
    strength = torch.full((2,), 0.5, requires_grad=True)
    (slope,) = torch.autograd.grad(action_penalty_loss(strength, torch.tensor([0.1, 0.9])).sum(), strength)
    assert float(slope[1]) > 1 > 10 * abs(float(slope[0]))


def test_losses_are_quadratic_near_zero_and_linear_for_large_errors() -> None:
    error = torch.tensor([-50.0, -0.01, 0.0, 0.01, 50.0])
    torch.testing.assert_close(symmetric_loss(error), torch.tensor([50.0, 5e-5, 0.0, 5e-5, 50.0]))
    torch.testing.assert_close(rising_gain(error), torch.tensor([-50.0, -5e-5, 0.0, 5e-5, 50.0]))


def test_advantages_are_relative_to_the_running_average() -> None:
    scaler = RewardScaler()
    scaler.average.fill_(-2.0)
    golden = (math.sqrt(5) - 1) / 2
    value = torch.tensor([-1.0, -4.0], requires_grad=True)
    average = -2.0 * golden + value.detach() * (1 - golden)
    found = scaler.advantage(value)
    torch.testing.assert_close(found, (value - average) / average.abs())
    assert float(scaler.average) == pytest.approx(float(average.mean()))
    (slope,) = torch.autograd.grad(found.sum(), value)
    torch.testing.assert_close(slope, 1 / average.abs())  # no gradient flows through the average


def test_the_first_nonzero_rewards_set_the_reward_scale() -> None:
    scaler = RewardScaler()
    assert scaler.scaled(torch.zeros(3)).tolist() == [0, 0, 0]
    assert scaler.scaled(torch.tensor([2.0, -6.0])).tolist() == [0.5, -1.5]
    assert scaler.scaled(torch.tensor([100.0])).tolist() == [25.0]


# The critic.


def test_value_weights_low_quantiles_most_regardless_of_node_order() -> None:
    critic = WeightedQuantileQ(SMALL, swaddled(), nodes=8)
    weights = critic.weights
    assert float(weights.sum()) == pytest.approx(1.0) and bool((weights.diff() <= 0).all())
    assert float(weights[0] / weights[-1]) > 50
    output = torch.randn(3, 5, 8)
    value = critic.value(output).squeeze(0)
    torch.testing.assert_close(value, critic.value(output.flip(2)[[2, 0, 1]]).squeeze(0))
    assert bool((value < output.mean((0, 2))).all())
    torch.testing.assert_close(critic.value(torch.full((3, 5, 8), 7.0)), torch.full((1, 5), 7.0))


def test_the_gradient_of_a_node_is_the_weight_of_its_rank() -> None:
    critic = WeightedQuantileQ(SMALL, swaddled(), nodes=8)
    output = torch.randn(3, 5, 8, requires_grad=True)
    value = critic.value(output)
    (gradient,) = torch.autograd.grad(value.sum(), output)
    ranks = output.detach().movedim(0, 1).flatten(1).argsort(1).argsort(1)
    torch.testing.assert_close(gradient.movedim(0, 1).flatten(1), critic.weights[ranks])
    torch.testing.assert_close(critic.value(output.detach()), value.detach())


def test_target_is_scaled_reward_plus_value_of_a_noisy_action() -> None:
    algorithm, data = symphony(), random_batch(discount=0.9)
    with torch.no_grad():
        algorithm.generator.manual_seed(3)
        found = algorithm.target(data)
        chunk, _, _ = algorithm.policy.rsample(data.next_obs, generator=torch.Generator().manual_seed(3))
        value = algorithm.target_critic.min_q(data.next_obs, chunk)
    torch.testing.assert_close(found, data.reward / data.reward.abs().mean() + 0.9 * value)


def test_all_nodes_of_all_members_share_one_target_under_the_symmetric_loss() -> None:
    algorithm, data = symphony(), random_batch(discount=0.9)
    data = replace(data, weight=torch.linspace(0.5, 1.5, 128))
    generator = seeded(algorithm)
    loss, info = algorithm.critic_loss(data)
    algorithm.generator.set_state(generator.get_state())
    with torch.no_grad():
        target = algorithm.target(data)
    output = algorithm.critic.output(algorithm.critic.encode(data.obs), data.chunk)  # (M, B, nodes)
    error = output - target[:, None]
    torch.testing.assert_close(loss, (error * (error / 2).tanh() * data.weight[:, None]).mean())
    torch.testing.assert_close(info["td_errors"], error.detach().abs().mean((0, 2)))


# Replay.


def counts(age_quantile: Any, lanes: int = 2, steps: int = 30) -> Tensor:
    """Number of samples `(steps,)` of each step from a buffer that stores the last 20 steps per lane."""
    replay, no = Replay(20 * lanes, lanes), torch.zeros(lanes, dtype=torch.bool)
    for t in range(steps):
        obs = {"state": torch.full((lanes, 1), float(t))}
        replay.add(torch.arange(lanes), obs, torch.zeros(lanes, 1), torch.zeros(lanes), no, no, obs)
    sample_spec = ReplaySampleSpec(batch_size=20_000, horizon=1, steps=1, gamma=0.9, age_quantile=age_quantile)
    sampled = replay.sample(sample_spec, torch.Generator().manual_seed(0)).obs["state"].flatten().long()
    return torch.bincount(sampled, minlength=steps)


def test_age_weighted_replay_samples_recent_steps_more_often() -> None:
    found = counts(age_quantile)
    assert int(found[:10].sum()) == 0  # overwritten
    position = (torch.arange(20) + 0.5) / 20
    expected = (math.pi * position).pow(math.e).tanh()[:19]  # the newest has no successor yet
    torch.testing.assert_close(found[10:29] / found.sum(), expected / expected.sum(), atol=0.01, rtol=0)
    assert float(found[28] / found[11].clamp(min=1)) > 10
    even = counts(None)[10:29]
    assert int(even.min()) > 900


def test_age_weighting_sets_the_age_quantile() -> None:
    assert symphony().sample_spec.age_quantile is age_quantile
    assert symphony(age_weighting=False).sample_spec.age_quantile is None


# The agent.


def test_action_noise_is_bounded_with_std_one_over_e() -> None:
    policy = swaddled()
    obs = {"state": torch.zeros(20_000, 1, 2)}
    mode, sampled = policy.mode(obs).detach(), policy.act(obs, generator=torch.Generator().manual_seed(0))
    noise = sampled.atanh() - mode.atanh()
    assert float(noise.abs().max()) <= 1 + 1e-4
    assert float(noise.std()) == pytest.approx(1 / math.e, rel=0.03)


def test_an_actor_step_leaves_both_critics_unchanged() -> None:
    algorithm, data = symphony(), random_batch()
    before = [p.clone() for p in (*algorithm.critic.parameters(), *algorithm.target_critic.parameters())]
    optimizer_step(algorithm.optimizer, algorithm.actor_loss(data)[0])
    after = [*algorithm.critic.parameters(), *algorithm.target_critic.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_actor_gain_is_the_advantage_of_the_next_value_under_the_target_critic() -> None:
    algorithm, data = symphony(action_penalty=0.5), random_batch()
    shifted(algorithm.target_critic)
    algorithm.scaler.average.fill_(2.0)
    policy, scaler, generator = copy.deepcopy(algorithm.policy), copy.deepcopy(algorithm.scaler), seeded(algorithm)
    found, info = algorithm.actor_loss(data)
    optimizer_step(algorithm.optimizer, found)
    chunk, strength, tightness = policy.rsample(data.next_obs, generator=generator)
    gain = rising_gain(scaler.advantage(algorithm.target_critic.min_q(data.next_obs, chunk))).mean()
    torch.testing.assert_close(info["gain"], gain)
    executed = strength[:, :1], tightness[:, :1]  # the policy executes one action per chunk
    loss = 0.5 * action_penalty_loss(*executed).mean() - gain
    slopes = torch.autograd.grad(loss, list(policy.parameters()))
    for weights, slope in zip(algorithm.policy.parameters(), slopes, strict=True):
        torch.testing.assert_close(weights.grad, slope)


def test_symphony_finds_near_optimal_bandit_actions() -> None:
    """The optimum is approximate: actions are noisy, and the gain favours positive advantages over negative ones."""
    algorithm = symphony(action_penalty=0.01)
    for _ in range(300):
        algorithm.update(random_batch())
    assert float(peak(first_actions(algorithm.inference_policy()).unsqueeze(1)).mean()) > 0.9  # random: 0.5


def test_action_penalty_reduces_action_magnitude() -> None:
    strengths = []
    for weight in (0.0, 1.0):
        algorithm = symphony(action_penalty=weight)
        for _ in range(200):
            algorithm.update(batch(torch.rand(128, 2, 1) * 2 - 1, lambda action: 2 + action.squeeze(1)))
        strengths.append(float(first_actions(algorithm.policy).mean()))
    assert strengths[0] > strengths[1] + 0.1 > 0.1


def test_unsupported_policies_and_settings_are_refused() -> None:
    for policy in (gaussian(), flow()):
        with pytest.raises(UserError, match="policy=swaddled"):
            Symphony(SymphonyConfig(), policy, total_updates=1)
    with pytest.raises(UserError, match="nodes"):
        SymphonyConfig(nodes=0)
    with pytest.raises(UserError, match="histogram"):
        WeightedQuantileQ(CriticConfig(bins=5), swaddled(), nodes=4)
