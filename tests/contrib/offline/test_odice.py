"""Tests of ODICE: conjugate, orthogonal gradients, imitation weights, reward scale, and data without rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chunk_bandit import SMALL, flow, gaussian, shifted
from mixed_bandit import batches, mixed, regret
from torch import Tensor, nn

from robopolicy.contrib.offline.odice import (
    ODICE,
    ODICEConfig,
    chi_square_conjugate,
    discounted_returns,
    orthogonal_sum,
    parallel_share,
    visit_weight,
)
from robopolicy.core.gradients import flat_gradient
from robopolicy.data.batches import Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy

COMMON: dict[str, Any] = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05}
SHOWN = mixed(200)


def odice(seed: int = 0, policy: Policy | None = None, **config: Any) -> ODICE:
    torch.manual_seed(seed)
    algorithm = ODICE(ODICEConfig(**(COMMON | config)), policy or gaussian(imitation="mse"), total_updates=100)
    algorithm.attach_dataset(SHOWN)
    return algorithm


def chained(algorithm: ODICE, discount: float = 0.9) -> Transitions:
    return replace(batches(algorithm, SHOWN, 1)[0], discount=torch.full((128,), discount))


def gradients(algorithm: ODICE, data: Transitions) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of V through V(s), through V(s'), and of the update."""
    learned = list(algorithm.critic.parameters())
    kept, added, _ = algorithm.residual_losses(data)
    level = (1 - algorithm.config.conservatism) * algorithm.critic.values(data.obs).mean()
    used = flat_gradient(algorithm.critic_loss(data)[0], learned) - flat_gradient(level, learned)
    return flat_gradient(kept, learned), flat_gradient(added, learned), used


def test_the_derivative_of_the_conjugate_is_the_visitation_ratio() -> None:
    residual = torch.tensor([-4.0, -2.0, -1.0, 0.0, 2.0], requires_grad=True)
    value = chi_square_conjugate(residual)
    assert value.tolist() == [-1.0, -1.0, -0.75, 0.0, 3.0]
    slope = torch.autograd.grad(value.sum(), residual)[0]
    assert slope.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert visit_weight(torch.tensor([-1.0, 0.5, 9.0]), 5.0).tolist() == [0.0, 0.5, 5.0]


def two_losses(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    here, there = torch.randn(16, 3).double(), torch.randn(16, 3).double()
    return net, (net(here) - 1).square().mean(), (net(there) + 2).square().mean()


def test_added_gradient_is_orthogonal_to_the_kept_gradient() -> None:
    net, kept, added = two_losses()
    total, _ = orthogonal_sum(kept, added, net.parameters())
    g_kept, g_total = flat_gradient(kept, net.parameters()), flat_gradient(total, net.parameters())
    assert float(torch.cosine_similarity(g_total - g_kept, g_kept, dim=0)) == pytest.approx(0, abs=1e-9)


def test_conflicting_losses_keep_the_full_kept_gradient() -> None:
    net, kept, _ = two_losses()
    added = -2 * kept + (next(net.parameters())).square().sum()
    g_kept, g_added = flat_gradient(kept, net.parameters()), flat_gradient(added, net.parameters())
    assert float(parallel_share(g_kept + g_added, g_kept)) < 0  # the naive sum increases the kept loss
    total, share = orthogonal_sum(kept, added, net.parameters())
    assert float(share) < 0
    assert float(parallel_share(flat_gradient(total, net.parameters()), g_kept)) == pytest.approx(1, abs=1e-9)


def test_orthogonal_sum_matches_a_hand_computed_example() -> None:
    x = torch.tensor([0.0, 0.0], requires_grad=True)
    kept, added = 2 * x[0], -3 * x[0] + 5 * x[1]
    total, share = orthogonal_sum(kept, added, [x])
    assert flat_gradient(total, [x]).tolist() == [2.0, 5.0]
    assert float(share) == -1.5


def test_a_zero_kept_gradient_leaves_the_added_gradient_whole() -> None:
    x = torch.tensor([1.0, 1.0], requires_grad=True)
    total, share = orthogonal_sum(0 * x.sum(), x.sum(), [x])
    assert flat_gradient(total, [x]).tolist() == [1.0, 1.0]
    assert float(share) == 0


def test_backward_gradient_is_projected_orthogonal_to_the_forward_gradient() -> None:
    algorithm = odice()
    forward, backward, used = gradients(algorithm, chained(algorithm))
    assert backward.any()
    # Both gradients are large compared with their difference, so the rounding error is larger than usual.
    assert float(torch.cosine_similarity(used - forward, forward, dim=0)) == pytest.approx(0, abs=1e-4)


def test_conflicting_gradients_keep_the_full_forward_step() -> None:
    algorithm = odice(eta=5.0)
    data = chained(algorithm, 0.99)
    data = replace(data, next_obs=data.obs, reward=0 * data.reward)  # V(s) = V(s'): the gradients conflict
    forward, backward, used = gradients(algorithm, data)
    assert float(parallel_share(forward + backward, forward)) < 0
    assert float(parallel_share(used, forward)) == pytest.approx(1, abs=1e-4)


def test_zero_eta_gives_the_semi_gradient() -> None:
    algorithm = odice(eta=0.0)
    data = chained(algorithm)
    learned = list(algorithm.critic.parameters())
    with torch.no_grad():
        target = algorithm.reward_scale * data.reward + 0.9 * algorithm.target_critic.values(data.next_obs).amin(0)
    value = algorithm.critic.values(data.obs)
    plain = 0.4 * value.mean() + 0.6 * chi_square_conjugate(target - value).mean()
    found = flat_gradient(algorithm.critic_loss(data)[0], learned)
    torch.testing.assert_close(found, flat_gradient(plain, learned), atol=1e-5, rtol=1e-4)


def test_residuals_use_target_values_of_the_other_state_and_weights_average_the_twins() -> None:
    algorithm = odice(eta=0.5, weight_max=0.8)
    data = chained(algorithm)
    shifted(algorithm.target_critic)
    kept, added, _ = algorithm.residual_losses(data)
    reward = algorithm.reward_scale * data.reward
    here, there = (algorithm.critic.values(obs) for obs in (data.obs, data.next_obs))  # (2, B)
    slow_here, slow_there = (algorithm.target_critic.values(obs).amin(0) for obs in (data.obs, data.next_obs))
    forward, backward = reward + 0.9 * slow_there - here, reward + 0.9 * there - slow_here
    torch.testing.assert_close(kept, 0.6 * chi_square_conjugate(forward).mean())
    torch.testing.assert_close(added, 0.6 * 0.5 * chi_square_conjugate(backward).mean())
    weight = algorithm.weights(data)
    torch.testing.assert_close(weight, forward.detach().clamp(0, 0.8).mean(0))
    assert float((forward[0] - forward[1]).detach().abs().max()) > 0.1 and float(weight.max()) > 0


def test_v_after_an_episode_end_is_not_used() -> None:
    algorithm = odice()
    data = chained(algorithm, 0.0)
    other = replace(data, next_obs={"state": data.next_obs["state"] + 5.0})
    torch.testing.assert_close(algorithm.critic_loss(data)[0], algorithm.critic_loss(other)[0])


def test_value_converges_where_the_mean_visitation_ratio_matches_conservatism() -> None:
    # One state, rewards -1 and 1, the end: mean of max(delta / 2 + 1, 0) over both must be (1 - lambda) / lambda.
    algorithm = odice(conservatism=0.6, largest_return=1.0)
    data = chained(algorithm, 0.0)
    data = replace(data, obs={"state": torch.zeros(128, 1, 2)}, reward=torch.arange(128) % 2 * 2.0 - 1)
    algorithm.reward_scale = 1.0
    for _ in range(150):
        algorithm.critic_step(data)
    value = float(algorithm.critic.values(data.obs).mean().detach())
    assert value == pytest.approx(2 / 3, abs=0.05)  # both in the linear part: 1 - V / 2 = 2 / 3
    torch.testing.assert_close(algorithm.weights(data), (data.reward - value).clamp(min=0), atol=0.05, rtol=0)


def test_the_largest_return_sets_the_reward_scale() -> None:
    arrays = {
        "state": np.zeros((5, 2), np.float32),
        "action": np.zeros((5, 1), np.float32),
        "reward": np.array([1.0, 2.0, 0.0, 0.0, -8.0]),
    }
    episodes = Episodes(arrays, np.array([2, 5]), ("", ""), np.array([-1, -1]), 0.1)
    assert discounted_returns(episodes, 0.5).tolist() == [2.0, -2.0]
    algorithm = odice(gamma=0.5, largest_return=50.0)
    algorithm.attach_dataset(episodes)
    assert algorithm.reward_scale == 25.0
    other = odice(seed=1)
    other.load_state_dict(algorithm.state_dict())
    assert other.reward_scale == 25.0
    with pytest.raises(UserError, match="have return 0"):
        algorithm.attach_dataset(replace(episodes, arrays=arrays | {"reward": np.zeros(5)}))
    with pytest.raises(UserError, match="no 'reward'"):
        algorithm.attach_dataset(replace(episodes, arrays={key: arrays[key] for key in ("state", "action")}))


def test_data_without_rewards_has_equal_imitation_weights() -> None:
    algorithm = odice(largest_return=0.0, conservatism=0.4)
    for data in batches(algorithm, SHOWN, 120):
        metrics = algorithm.update(data)
    assert algorithm.reward_scale == 0
    assert metrics["actor/imitated"] == 1
    assert metrics["actor/weight"] == pytest.approx(1, abs=0.1)  # 2 (.6 / .4 - 1)


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_odice_imitates_the_good_minority_of_the_data(head: str) -> None:
    policy = gaussian(imitation="mse") if head == "gaussian" else flow()
    algorithm = odice(policy=policy)
    for data in batches(algorithm, mixed(), 150):
        metrics = algorithm.update(data)
    assert 0.02 < metrics["actor/imitated"] < 0.3  # 15 % of the data is good
    assert regret(algorithm.inference_policy()) < 0.2


def test_weight_decay_changes_the_policy_and_not_v() -> None:
    plain, decayed = odice(weight_decay=0.0), odice(weight_decay=0.5)
    for algorithm in (plain, decayed):
        torch.manual_seed(1)
        algorithm.generator.manual_seed(1)
        algorithm.update(chained(algorithm))
    values, policies = (
        [torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
        for one, other in ((plain.critic, decayed.critic), (plain.policy, decayed.policy))
    )
    assert all(values) and not all(policies)


def test_imitation_weights_are_computed_without_dropout() -> None:
    algorithm = odice(critic=replace(SMALL, dropout=0.5))
    data = chained(algorithm)
    assert torch.equal(algorithm.weights(data), algorithm.weights(data))
    assert not torch.equal(algorithm.critic.values(data.obs), algorithm.critic.values(data.obs))  # mode is restored


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UserError, match="conservatism"):
        ODICEConfig(conservatism=1.0)
    with pytest.raises(UserError, match="eta"):
        ODICEConfig(eta=-1.0)
    with pytest.raises(UserError, match="Without rewards"):
        ODICEConfig(largest_return=0.0)
    with pytest.raises(UserError, match="histogram"):
        ODICEConfig(critic=replace(SMALL, bins=11))
    with pytest.raises(UserError, match="'odice' bootstraps from all members"):
        odice(num_min_qs=1)
