"""Tests of TD3+BC: limits of alpha and a bandit with data of mixed quality."""

import pytest
import torch
from chunk_bandit import STATISTICS
from mixed_bandit import batches, mixed, regret
from td3_learners import (
    check_a_policy_tau_of_one_removes_the_target_policy,
    check_accepts_only_a_squashed_gaussian_and_sane_settings,
    check_critic_targets_move_only_with_the_actor,
    drawn,
    gradient,
    td3_bc,
)

from robopolicy.algorithms.td3 import actor_loss
from robopolicy.algorithms.td3_bc import chunk_distance, regularized_loss
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy


def test_loss_equals_the_hand_computed_value() -> None:
    value, penalty = torch.tensor([1.0, -3.0]), torch.tensor([0.2, 0.4])
    assert float(regularized_loss(value, penalty, 4.0)) == pytest.approx(0.3 - 4.0 / 2.0 * -1.0)
    assert float(regularized_loss(10 * value, penalty, 4.0)) == pytest.approx(2.3)  # invariant to the scale of Q
    assert float(regularized_loss(0 * value, penalty, 4.0)) == pytest.approx(0.3)  # zero Q gives no division by zero


def test_zero_alpha_imitates_and_large_alpha_follows_the_critic_gradient() -> None:
    algorithm = td3_bc(alpha=0.0)
    data = drawn(algorithm)
    mode = algorithm.policy.mode(data.obs)
    error = (mode - data.chunk)[:, :1].square().mean()
    assert float(algorithm.actor_loss(data)[0].detach()) == pytest.approx(error.item(), rel=1e-5)
    greedy = td3_bc(alpha=1e6)
    critic_gradient = gradient(greedy, actor_loss(greedy.policy, greedy.critic, data.obs))
    found = gradient(greedy, greedy.actor_loss(data)[0])
    assert float(torch.cosine_similarity(critic_gradient, found, dim=0)) == pytest.approx(1, abs=1e-4)


def test_chunk_distance_uses_normalised_units_over_valid_executed_steps() -> None:
    policy = GaussianPolicy(
        GaussianConfig(hidden=(8,), squash=True, normalization="minmax", action_normalization="minmax"),
        PolicySpec({"state": (2,)}, action_dim=1, horizon=3, action_horizon=2),
    )
    policy.fit_normalizer(STATISTICS | {"action": {"min": [0.0], "max": [20.0]}})
    chunk, target = torch.zeros(2, 3, 1), torch.tensor([[5.0, 10.0, 99.0], [5.0, 10.0, 99.0]]).unsqueeze(-1)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(chunk_distance(policy, chunk, target, mask), torch.tensor([(0.25 + 1.0) / 2, 0.25]))


def test_only_squashed_gaussians_and_valid_settings_are_accepted() -> None:
    check_accepts_only_a_squashed_gaussian_and_sane_settings(td3_bc)


def test_critic_targets_move_only_with_the_actor() -> None:
    algorithm = td3_bc()
    check_critic_targets_move_only_with_the_actor(algorithm, drawn(algorithm))


def test_a_policy_tau_of_one_removes_the_target_policy() -> None:
    check_a_policy_tau_of_one_removes_the_target_policy(td3_bc)


def test_td3_bc_has_lower_regret_than_imitation_on_mixed_data() -> None:
    episodes, found = mixed(), []
    for alpha in (0.0, 0.5):
        algorithm = td3_bc(alpha=alpha)
        for data in batches(algorithm, episodes, 200):
            algorithm.update(data)
        found.append(regret(algorithm.inference_policy()))
    assert found[0] > 0.7 and 0.12 < found[1] < 0.4
