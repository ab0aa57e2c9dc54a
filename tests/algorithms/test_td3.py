"""Tests of TD3: smoothed target in closed form, delayed updates, bounded actions, exploration noise, and a bandit."""

from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, batch, first_actions, flow, gaussian
from td3_learners import check_critic_targets_move_only_with_the_actor
from torch import Tensor

from robopolicy.algorithms.td3 import TD3, TD3Config, noisy_chunk, smoothed_chunk
from robopolicy.critics.q import CriticConfig
from robopolicy.errors import UserError
from robopolicy.training.compose import compose_config


def td3(seed: int = 0, **config: Any) -> TD3:
    torch.manual_seed(seed)
    settings = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    return TD3(TD3Config(**settings), gaussian(), total_updates=1000)


def peak(action: Tensor) -> Tensor:
    return 1 - (action.squeeze(1) - 0.4).square()


def random_batch(rows: int = 128, discount: float = 0.0) -> Any:
    return batch(torch.rand(rows, 2, 1) * 2 - 1, peak, discount=discount)


def test_target_is_the_minimum_value_of_the_smoothed_target_action() -> None:
    algorithm = td3(target_noise=0.2, target_noise_clip=0.1)
    data = random_batch(discount=0.9)
    with torch.no_grad():
        algorithm.generator.manual_seed(3)
        found = algorithm.target(data)
        mode = algorithm.target_policy.mode(data.next_obs)
        noise = 0.2 * torch.randn(mode.shape, generator=torch.Generator().manual_seed(3))
        chunk = (mode + noise.clamp(-0.1, 0.1)).clamp(-1, 1)
        expected = data.reward + 0.9 * algorithm.target_critic(data.next_obs, chunk).amin(0)
    torch.testing.assert_close(found, expected)


def test_exploration_noise_scale_increases_along_the_rows() -> None:
    algorithm = td3(noise=0.1, exploration_noise_max=0.3)
    obs = random_batch(3).obs
    with torch.no_grad():
        noise = torch.randn((3, 2, 1), generator=torch.Generator().manual_seed(3))
        scale = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
        expected = (algorithm.policy.mode(obs) + scale * noise).clamp(-1, 1)  # the bounds are -1 and 1
        found = noisy_chunk(algorithm.policy, obs, algorithm.config, torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected)
    with pytest.raises(UserError, match="spreads the noise over the environments of a process, and there is one"):
        algorithm.act(random_batch(1).obs)


def test_actor_updates_are_delayed_and_use_the_first_critic() -> None:
    algorithm = td3(policy_delay=2)
    before = [p.clone() for p in algorithm.policy.parameters()]
    same = lambda: all(torch.equal(a, b) for a, b in zip(before, algorithm.policy.parameters(), strict=True))  # noqa: E731
    algorithm.update(random_batch())
    assert same()
    algorithm.update(random_batch())
    assert not same()
    data = random_batch()
    body: Any = algorithm.critic.body
    with torch.no_grad():
        body.layers[-1].bias[1] += 100.0  # the second member must not matter
        value = algorithm.critic(data.obs, algorithm.policy.mode(data.obs))[0].mean()
    assert float(algorithm.actor_loss(data)[0].detach()) == pytest.approx(-float(value), rel=1e-5)


def test_critic_targets_move_only_with_the_actor_unless_an_interval_is_given() -> None:
    check_critic_targets_move_only_with_the_actor(td3(), random_batch())
    algorithm = td3(tau=1.0, critic_target_interval=1)
    algorithm.update(random_batch())
    assert all(map(torch.equal, algorithm.critic.parameters(), algorithm.target_critic.parameters()))


def test_fast_td3_updates_its_target_critic_in_every_step() -> None:
    config = compose_config(["algorithm=fast_td3"]).algorithm
    assert (config["policy_delay"], config["critic_target_interval"]) == (2, 1)


def test_target_networks_equal_the_networks_with_tau_one() -> None:
    algorithm = td3(tau=1.0, policy_delay=1)
    algorithm.update(random_batch())
    for mine, slow in zip(algorithm.policy.parameters(), algorithm.target_policy.parameters(), strict=True):
        assert torch.equal(mine, slow)
    for mine, slow in zip(algorithm.critic.parameters(), algorithm.target_critic.parameters(), strict=True):
        assert torch.equal(mine, slow)


def test_exploration_noise_increases_across_environments() -> None:
    algorithm = td3(noise=0.01, exploration_noise_max=0.2)
    obs = {"state": torch.zeros(3, 1, 2)}
    mode = algorithm.policy.mode(obs).detach()
    draws = torch.stack([algorithm.act(obs).chunk.detach() - mode for _ in range(500)])
    spread = draws.flatten(2).std((0, 2))
    assert spread.tolist() == pytest.approx([0.01, 0.105, 0.2], rel=0.15)
    assert torch.equal(td3(noise=0.0).act(obs).chunk, td3().policy.mode(obs))


def test_actions_stay_within_their_bounds() -> None:
    algorithm = td3(noise=5.0)
    assert algorithm.act({"state": torch.zeros(64, 1, 2)}).chunk.abs().max() <= 1.0


def test_a_policy_tau_of_one_removes_the_target_policy() -> None:
    algorithm = td3(policy_tau=1.0, policy_delay=1)
    algorithm.update(random_batch())
    for mine, slow in zip(algorithm.policy.parameters(), algorithm.target_policy.parameters(), strict=True):
        assert torch.equal(mine, slow)
    critics = zip(algorithm.critic.parameters(), algorithm.target_critic.parameters(), strict=True)
    assert not any(torch.equal(mine, slow) for mine, slow in critics)


@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_the_actor_maximises_the_least_or_the_mean_value(reduction: str) -> None:
    algorithm, data = td3(value_reduction=reduction), random_batch(16, discount=0.9)
    values = algorithm.critic(data.obs, algorithm.policy.mode(data.obs))
    expected = values.amin(0) if reduction == "min" else values
    torch.testing.assert_close(algorithm.actor_loss(data)[0], -expected.mean())
    assert algorithm.target(data).shape == ((16,) if reduction == "min" else (2, 16))
    with pytest.raises(UserError, match="value_reduction"):
        td3(value_reduction="sum")


def test_the_penalty_of_actions_is_their_mean_square() -> None:
    data, plain, penalised = random_batch(), td3(), td3(action_l2=2.0)
    action = penalised.policy.mode(data.obs)  # the bounds are -1 and 1
    difference = penalised.actor_loss(data)[0] - plain.actor_loss(data)[0]
    torch.testing.assert_close(difference, 2.0 * action.square().mean())


def test_a_c51_target_is_a_distribution_with_the_mean_of_the_target_critic() -> None:
    algorithm = td3(critic=CriticConfig(hidden=(8,), bins=41, histogram="c51", value_min=-4.0, value_max=4.0))
    data = random_batch(16, discount=0.9)
    algorithm.generator.manual_seed(0)
    found = algorithm.target(data)
    algorithm.generator.manual_seed(0)
    expected = algorithm.bootstrap(
        data, smoothed_chunk(algorithm.target_policy, data.next_obs, algorithm.config, algorithm.generator)
    )
    assert found.shape == (1, 16, 41) and algorithm.critic.histogram is not None
    torch.testing.assert_close(algorithm.critic.histogram.expected(found[0]), expected, atol=0.05, rtol=0)
    _, info = algorithm.critic_loss(data)
    assert float(info["target"].mean()) == pytest.approx(float(expected.mean()), abs=0.05)


@pytest.mark.parametrize("critic", [{}, {"bins": 31}, {"bins": 31, "histogram": "c51"}])
def test_it_finds_the_best_action_of_a_bandit(critic: dict[str, Any]) -> None:
    settings = {"members": 2, "hidden": (32, 32), "activation": "relu", "value_min": -2.0, "value_max": 2.0}
    algorithm = td3(critic=CriticConfig(**(settings | critic)))  # type: ignore[arg-type]
    for _ in range(400):
        algorithm.update(random_batch())
    assert (first_actions(algorithm.inference_policy()) - 0.4).abs().mean() < 0.1


def test_unsupported_policies_are_refused() -> None:
    with pytest.raises(UserError, match="squashed"):
        TD3(TD3Config(), flow(), total_updates=1)
