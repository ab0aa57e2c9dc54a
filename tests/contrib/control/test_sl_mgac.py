"""Tests of SL-MGAC: the reward head next to the value, noise-free targets, and separate values per group."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import batch, first_actions, flow, gaussian
from torch import Tensor

from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.contrib.control.reward_predicting_q import RewardPredictingQ
from robopolicy.contrib.control.sl_mgac import SLMGAC, SLMGACConfig
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

CRITIC = CriticConfig(members=2, hidden=(32, 32), activation="relu", layer_norm=False)
GAMMA, NOISE = 0.8, 0.5


def sl_mgac(seed: int = 0, **config: Any) -> SLMGAC:
    torch.manual_seed(seed)
    settings = {"critic": CRITIC, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    return SLMGAC(SLMGACConfig(**settings), gaussian(log_std_init=-1.0), total_updates=1000)


def peak(action: Tensor) -> Tensor:
    return 1 - 4 * (action.squeeze(1) - 0.4).square()


def bandit(rows: int = 128, noise: float = 0.0, discount: float = 0.0) -> Transitions:
    reward = lambda action: peak(action) + noise * torch.randn(len(action))  # noqa: E731
    return batch(torch.rand(rows, 2, 1) * 2 - 1, reward, discount=discount)


def loop(rows: int = 128) -> Transitions:
    """A task without termination in which every action has reward 1 plus noise."""
    reward = lambda action: 1 + NOISE * torch.randn(len(action))  # noqa: E731
    return batch(torch.rand(rows, 2, 1) * 2 - 1, reward, discount=GAMMA)


@pytest.mark.parametrize("bins", [0, 31])
def test_value_and_reward_are_outputs_of_one_trunk(bins: int) -> None:
    critic = RewardPredictingQ(replace(CRITIC, bins=bins, value_min=-2.0, value_max=2.0), gaussian())
    data = bandit(8)
    output = critic.output(critic.encode(data.obs), data.chunk)
    assert output.shape == (2, 8, (bins or 1) + 1)
    assert critic.value(output).shape == critic.reward(output).shape == (2, 8)
    torch.testing.assert_close(critic(data.obs, data.chunk), critic.value(output))
    torch.testing.assert_close(critic.min_q(data.obs, data.chunk), critic.value(output).amin(0))
    other = output.clone()
    other[..., -1] += 5.0  # the reward output does not affect the value
    assert torch.equal(critic.value(other), critic.value(output))
    assert torch.equal(critic.regression(other, data.reward), critic.regression(output, data.reward))
    trunk = next(critic.body.parameters())
    assert bool(torch.autograd.grad(critic.reward(output).sum(), trunk)[0].any())


def test_critic_loss_equals_value_error_plus_weighted_reward_error() -> None:
    algorithm, data = sl_mgac(reward_coef=0.7, reward_trust_coef=0.25), bandit(16, discount=0.9)
    algorithm.generator.manual_seed(3)
    loss, _ = algorithm.critic_loss(data)
    algorithm.generator.manual_seed(3)
    with torch.no_grad():
        slow = algorithm.target_critic
        expected = slow.reward(slow.output(slow.encode(data.obs), data.chunk)).mean(0)
        target = algorithm.target(replace(data, reward=0.75 * data.reward + 0.25 * expected))
    output = algorithm.critic.output(algorithm.critic.encode(data.obs), data.chunk)
    values, rewards = (output[..., 0] - target).square(), (output[..., 1] - data.reward).square()
    torch.testing.assert_close(loss, (values + 0.7 * rewards).mean(1).sum())


def test_zero_reward_trust_gives_the_sac_target() -> None:
    algorithm, data = sl_mgac(reward_trust_coef=0.0), bandit(16, discount=0.9)
    assert torch.equal(algorithm.smoothed(data).reward, data.reward)
    plain = SAC(SACConfig(critic=CRITIC), algorithm.policy, total_updates=1)
    plain.target_critic = algorithm.target_critic
    with torch.no_grad():
        for learner in (algorithm, plain):
            learner.generator.manual_seed(1)
        torch.testing.assert_close(algorithm.target(algorithm.smoothed(data)), plain.target(data))


def test_full_reward_trust_removes_reward_noise_from_the_target() -> None:
    variance, value = {}, {}
    for trust in (0.0, 1.0):
        algorithm = sl_mgac(reward_trust_coef=trust, backup_entropy=False, critic=replace(CRITIC, members=1))
        torch.manual_seed(1)
        for _ in range(300):
            optimizer_step(algorithm.critic_optimizer, algorithm.critic_loss(loop())[0])
            algorithm._target_update.step(0.05)
        _, info = algorithm.critic_loss(loop(2000))
        variance[trust], value[trust] = float(info["td_variance"]), float(info["value"])
    assert variance[0.0] == pytest.approx(NOISE**2, rel=0.15) and variance[1.0] < 0.1 * variance[0.0]
    assert value[0.0] == pytest.approx(1 / (1 - GAMMA), rel=0.1) == value[1.0]


def test_observed_groups_have_separate_values() -> None:
    torch.manual_seed(0)
    spec = PolicySpec({"state": (2,), "embedding.group": (3,)}, action_dim=1)
    settings = {"hidden": (16,), "squash": True, "normalization": "identity", "action_normalization": "minmax"}
    policy = GaussianPolicy(GaussianConfig(**settings), spec)
    policy.fit_normalizer({"action": {"min": [-1.0], "max": [1.0]}})
    critic = RewardPredictingQ(CRITIC, policy)
    group = torch.arange(64) % 2
    obs = {
        "state": torch.zeros(64, 1, 2),
        "embedding.group": torch.nn.functional.one_hot(group, 3).float()[:, None],
    }
    chunk, earned = torch.zeros(64, 1, 1), 2.0 * group - 1
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(60):
        output = critic.output(critic.encode(obs), chunk)
        optimizer_step(
            optimizer, (critic.regression(output, earned) + (critic.reward(output) - earned).square()).mean()
        )
    torch.testing.assert_close(critic(obs, chunk), earned.expand(2, -1), atol=0.1, rtol=0)
    assert all(bool(p.grad.any()) for p in critic.encoder.projections.parameters() if p.grad is not None)
    assert all(p.grad is None for p in policy.parameters())


def test_a_batch_of_one_window_has_finite_metrics() -> None:
    metrics = sl_mgac().update(bandit(1))
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["critic/td_variance"] == 0


def test_it_finds_the_best_action_of_a_noisy_bandit() -> None:
    algorithm = sl_mgac(temperature=0.05, temperature_lr=0.0)
    for _ in range(250):
        algorithm.update(bandit(noise=0.3))
    assert (first_actions(algorithm.inference_policy()) - 0.4).abs().mean() < 0.15


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UserError, match="reward_coef must not be negative"):
        SLMGACConfig(reward_coef=-1.0)
    with pytest.raises(UserError, match=r"reward_trust_coef must lie in \[0, 1\]"):
        SLMGACConfig(reward_trust_coef=1.5)
    with pytest.raises(UserError, match=r"set algorithm\.critic\.histogram=hl_gauss"):
        sl_mgac(critic=replace(CRITIC, bins=11, histogram="c51", value_min=-2.0, value_max=2.0))
    with pytest.raises(UserError, match="needs policy=squashed_gaussian"):
        SLMGAC(SLMGACConfig(), flow(), total_updates=1)
