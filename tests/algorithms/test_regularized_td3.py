"""TD3+BC: the limits of alpha, and a bandit of mixed quality."""

import pytest
import torch
from chunk_bandit import STATISTICS
from mixed_bandit import batches, mixed, regret
from td3_learners import check_accepts_only_a_squashed_gaussian_and_sane_settings, drawn, gradient, td3_bc

from robopolicy.algorithms.td3 import actor_loss
from robopolicy.algorithms.td3_bc import chunk_distance, regularized_loss
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy


def test_the_loss_by_hand() -> None:
    value, penalty = torch.tensor([1.0, -3.0]), torch.tensor([0.2, 0.4])
    assert float(regularized_loss(value, penalty, 4.0)) == pytest.approx(0.3 - 4.0 / 2.0 * -1.0)
    assert float(regularized_loss(10 * value, penalty, 4.0)) == pytest.approx(2.3)  # the unit of Q does not matter
    assert float(regularized_loss(0 * value, penalty, 4.0)) == pytest.approx(0.3)  # and no value is no division by 0


def test_without_alpha_it_imitates_and_with_much_of_it_it_climbs() -> None:
    algorithm = td3_bc(alpha=0.0)
    data = drawn(algorithm)
    mode = algorithm.policy.mode(data.obs)
    error = (mode - data.chunk)[:, :1].square().mean()
    assert float(algorithm.actor_loss(data)[0].detach()) == pytest.approx(error.item(), rel=1e-5)
    greedy = td3_bc(alpha=1e6)
    climb = gradient(greedy, actor_loss(greedy.policy, greedy.critic, data.obs))
    found = gradient(greedy, greedy.actor_loss(data)[0])
    assert float(torch.cosine_similarity(climb, found, dim=0)) == pytest.approx(1, abs=1e-4)


def test_the_pull_is_measured_in_normalised_units_over_valid_executed_steps() -> None:
    policy = GaussianPolicy(
        GaussianConfig(hidden=(8,), squash=True, normalization="minmax", action_normalization="minmax"),
        PolicySpec({"state": (2,)}, action_dim=1, horizon=3, action_horizon=2),
    )
    policy.fit_normalizer(STATISTICS | {"action": {"min": [0.0], "max": [20.0]}})
    chunk, wanted = torch.zeros(2, 3, 1), torch.tensor([[5.0, 10.0, 99.0], [5.0, 10.0, 99.0]]).unsqueeze(-1)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(chunk_distance(policy, chunk, wanted, mask), torch.tensor([(0.25 + 1.0) / 2, 0.25]))


def test_only_a_squashed_gaussian_and_sane_settings_are_accepted() -> None:
    check_accepts_only_a_squashed_gaussian_and_sane_settings(td3_bc)


def test_bad_data_holds_imitation_back_more_than_td3_bc() -> None:
    episodes, found = mixed(), []
    for alpha in (0.0, 0.5):
        algorithm = td3_bc(alpha=alpha)
        for data in batches(algorithm, episodes, 200):
            algorithm.update(data)
        found.append(regret(algorithm.inference_policy()))
    assert found[0] > 0.7 and 0.12 < found[1] < 0.4
