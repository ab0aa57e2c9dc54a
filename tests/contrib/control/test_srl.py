"""Tests of SRL: one action is SAC, the model values later actions, and a carriage stops without feedback."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import gaussian, seeded, shifted
from torch import Tensor

from robopolicy.contrib.control.model_based_q import ModelBasedQ
from robopolicy.contrib.control.sequence import SequenceConfig, SequencePolicy
from robopolicy.contrib.control.srl import SRL, SRLConfig, actor_loss
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec

SMALL = CriticConfig(members=2, hidden=(64, 64), activation="relu", layer_norm=False)
LIMITS = {"state": {"min": [-1.0], "max": [1.0]}, "action": {"min": [-1.0], "max": [1.0]}}


def sequence(horizon: int = 3, obs_horizon: int = 1) -> SequencePolicy:
    spec = PolicySpec({"state": (1,)}, action_dim=1, horizon=horizon, action_horizon=horizon, obs_horizon=obs_horizon)
    policy = SequencePolicy(SequenceConfig(hidden=(32, 32), normalization="minmax"), spec)
    policy.fit_normalizer(LIMITS)
    return policy


def srl(seed: int = 0, horizon: int = 3, obs_horizon: int = 1, **config: Any) -> SRL:
    torch.manual_seed(seed)
    settings = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05, "model_hidden": (32,)}
    return SRL(SRLConfig(**(settings | config)), sequence(horizon, obs_horizon), total_updates=1000)


def moved(position: Tensor, action: Tensor) -> Tensor:
    """Position `(B,)` of a carriage after it moves by half the action."""
    return position + 0.5 * action


def pushes(rows: int = 128, obs_horizon: int = 1) -> Transitions:
    """Single steps from random positions; the reward is highest at the centre."""
    before, action = torch.rand(rows) - 0.5, torch.rand(rows) * 2 - 1
    after = moved(before, action)
    history = before.view(-1, 1, 1).expand(-1, obs_horizon, 1)
    reward = -after.square()
    return Transitions(
        obs={"state": history},
        chunk=action.view(-1, 1, 1),
        mask=torch.ones(rows, 1),
        rewards=reward[:, None],
        steps=torch.ones(rows, dtype=torch.int64),
        discount=torch.full((rows,), 0.5),
        reward=reward,
        next_obs={"state": torch.cat([history[:, 1:], after.view(-1, 1, 1)], 1)},
        returns=torch.full((rows,), torch.nan),
        record={},
        online=torch.ones(rows, dtype=torch.bool),
        weight=torch.ones(rows),
        index=torch.arange(rows),
    )


def test_srl_with_one_action_equals_sac() -> None:
    algorithm, data, alpha = srl(horizon=1), pushes(), torch.tensor(0.2)
    loss, logp = actor_loss(
        algorithm.policy, algorithm.critic, algorithm.target_critic, data.obs, alpha, torch.Generator().manual_seed(3)
    )
    chunk, again = algorithm.policy.rsample(data.obs, generator=torch.Generator().manual_seed(3))
    expected = (alpha * again.squeeze(1) - algorithm.critic(data.obs, chunk).amin(0)).mean()
    assert torch.equal(logp, again)
    torch.testing.assert_close(loss, expected)
    algorithm.generator.manual_seed(3)
    found = algorithm.target(data)
    chunk, logp = algorithm.policy.rsample(data.next_obs, generator=torch.Generator().manual_seed(3))
    soft = algorithm.target_critic(data.next_obs, chunk).amin(0) - algorithm.temperature.value * logp.squeeze(1)
    torch.testing.assert_close(found, data.reward + data.discount * soft)


def test_each_action_is_evaluated_in_the_state_predicted_by_the_model() -> None:
    algorithm, data = srl(obs_horizon=2), pushes(obs_horizon=2)
    seen: list[Tensor] = []

    class Known(ModelBasedQ):
        def min_q(self, obs: Any, chunk: Tensor) -> Tensor:
            seen.extend(obs["state"].clone().split(len(data.reward)))  # all states of the sequence in one batch
            return super().min_q(obs, chunk)

        def change(self, obs: Any, action: Tensor) -> Tensor:
            return 0.5 * action[:, 0]  # normalised units equal raw units

    critic = Known(SMALL, algorithm.policy, model_hidden=(8,))
    actor_loss(algorithm.policy, critic, critic, data.obs, torch.tensor(0.1), torch.Generator().manual_seed(1))
    chunk = algorithm.policy.rsample(data.obs, generator=torch.Generator().manual_seed(1))[0].detach()
    place = data.obs["state"][:, -1, 0]
    for j, obs in enumerate(seen):
        torch.testing.assert_close(obs[:, -1, 0].detach(), place)
        if j:
            torch.testing.assert_close(obs[:, 0], seen[j - 1][:, 1])
        place = moved(place, chunk[:, j, 0])
    assert len(seen) == 3 and not seen[-1].requires_grad


def test_loss_sums_over_the_sequence_in_states_of_the_target_model() -> None:
    algorithm, data, alpha = srl(), pushes(), torch.tensor(0.1)
    shifted(algorithm.target_critic)
    generator = seeded(algorithm)
    critic, slow = algorithm.critic, algorithm.target_critic
    loss, logps = actor_loss(algorithm.policy, critic, slow, data.obs, alpha, algorithm.generator)
    chunk, logp = algorithm.policy.rsample(data.obs, generator=generator)
    expected, place = torch.zeros(()), data.obs
    for j in range(3):
        action = chunk[:, j : j + 1]
        expected = expected + (alpha * logp[:, j] - algorithm.critic(place, action).amin(0)).mean()
        place = algorithm.target_critic.imagine(place, action)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logps, logp)


def test_the_temperature_follows_the_entropy_of_a_single_action() -> None:
    algorithm, data = srl(horizon=3), pushes()
    generator, policy = seeded(algorithm), copy.deepcopy(algorithm.policy)
    policy.rsample(data.next_obs, steps=1, generator=generator)  # for the target
    chunk_logp = policy.rsample(data.obs, generator=generator)[1]  # (B, 3)
    metrics = algorithm.update(data)
    assert metrics["actor/entropy"] == pytest.approx(-float(chunk_logp.detach().mean()))
    assert algorithm.target_entropy == -1.0
    torch.testing.assert_close(algorithm.temperature.log.grad, -(chunk_logp.mean() - 1.0).detach())


def test_the_model_learns_the_next_observation() -> None:
    algorithm = srl()
    for _ in range(120):
        metrics = algorithm.update(pushes())
    data = pushes()
    found = algorithm.critic.imagine(data.obs, data.chunk)["state"]
    assert float((found - data.next_obs["state"]).abs().max()) < 0.05
    assert metrics["critic/model_loss"] < 1e-3


def test_the_model_ignores_unobserved_next_states() -> None:
    learner, data = srl(), pushes()
    end = torch.arange(len(data)) % 2 == 0  # a dataset episode ends with a placeholder next observation
    wrong = replace(
        data,
        online=~end,
        discount=torch.where(end, 0.0, data.discount),
        next_obs={"state": torch.where(end.view(-1, 1, 1), 100.0, data.next_obs["state"])},
    )
    expected = learner.critic.model_loss(data.obs, data.chunk, data.next_obs)[~end].mean()
    torch.testing.assert_close(learner.critic_loss(wrong)[1]["model_loss"], expected)


def test_action_sequence_stops_the_carriage_where_a_held_action_overshoots() -> None:
    algorithm = srl(temperature=1e-3, temperature_lr=0.0)
    for _ in range(300):
        algorithm.update(pushes())
    place = torch.linspace(-0.4, 0.4, 21)
    chunk = algorithm.inference_policy().act({"state": place.view(-1, 1, 1)}, deterministic=True)[:, :, 0]
    position = held = place
    for j in range(3):
        position, held = moved(position, chunk[:, j]), moved(held, chunk[:, 0])
        assert float(position.abs().mean()) < 0.06  # at the centre from the first action on
    assert float(held.abs().mean()) > 0.3


def test_later_actions_depend_on_earlier_ones() -> None:
    policy = sequence()
    obs = {"state": torch.zeros(2, 1, 1)}
    record = {"raw": torch.tensor([[[-1.0], [0.3], [0.2]], [[1.0], [0.3], [0.2]]])}
    mean, _ = policy._teacher_forced(policy.encoder(obs), record["raw"])
    assert torch.equal(mean[0, 0], mean[1, 0]) and not torch.equal(mean[0, 1], mean[1, 1])


def test_sample_spec_requests_single_steps() -> None:
    sample_spec = srl().sample_spec
    assert (sample_spec.horizon, sample_spec.steps) == (1, 1)


def test_unsupported_policies_and_settings_are_refused() -> None:
    with pytest.raises(UserError, match="policy=sequence"):
        SRL(SRLConfig(), gaussian(), total_updates=1)
    with pytest.raises(UserError, match="n_step"):
        SRLConfig(n_step=3)
    assert srl(n_step=1).sample_spec.steps == 1
    with pytest.raises(UserError, match="hidden"):
        SequenceConfig(hidden=())
    spec = PolicySpec({"state": (1,), "image.front": (3, 32, 32)}, action_dim=1)
    policy = SequencePolicy(SequenceConfig(hidden=(8,)), spec)
    with pytest.raises(UserError, match=r"image\.front"):
        SRL(SRLConfig(critic=SMALL), policy, total_updates=1)
