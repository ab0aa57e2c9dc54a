"""Tests of DSAC-T, STAC and off-policy MDPO: closed forms of values and spreads, and relations to SAC."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from chunk_bandit import SPEC, batch, first_actions, gaussian, seeded, shifted
from td3_learners import check_critic_targets_move_only_with_the_actor
from torch import Tensor, nn

from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.algorithms.registry import make_algorithm
from robopolicy.algorithms.sac import SAC, SACConfig, actor_loss
from robopolicy.contrib.control.dsac_t import DSACT, DSACTConfig, RunningStd, distribution_loss
from robopolicy.contrib.control.gaussian_critic import GaussianQ
from robopolicy.contrib.control.mdpo_off import MDPOOff, MDPOOffConfig
from robopolicy.contrib.control.stac import FLOOR, STAC, STACConfig, likelihood_loss
from robopolicy.critics.q import CriticConfig
from robopolicy.errors import UserError
from robopolicy.policies.density import sample_squashed

CONFIGS = {"sac": SACConfig, "dsac_t": DSACTConfig, "stac": STACConfig, "mdpo_off": MDPOOffConfig}
GAMMA, NOISE = 0.8, 0.5


def learner(name: str, seed: int = 0, members: int = 2, dropout: float = 0.0, **config: Any) -> Any:
    torch.manual_seed(seed)
    critic = CriticConfig(members=members, hidden=(32, 32), activation="relu", layer_norm=False, dropout=dropout)
    settings = {"critic": critic, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    return make_algorithm(name, CONFIGS[name](**settings), gaussian(), total_updates=1000)


def peak(action: Tensor) -> Tensor:
    """Reward `(B,)` of actions `(B, 1)` with its optimum at 0.4."""
    return 1 - (action.squeeze(1) - 0.4).square()


class Peak(nn.Module):
    """A critic whose value is `peak`."""

    def min_q(self, obs: Any, chunk: Tensor) -> Tensor:
        return peak(chunk[:, 0])


def loop(rows: int = 128) -> Any:
    """A task without termination in which every action has reward 1 plus noise."""
    reward = lambda action: 1 + NOISE * torch.randn(len(action))  # noqa: E731
    return batch(torch.rand(rows, 2, 1) * 2 - 1, reward, discount=GAMMA)


def moments(algorithm: Any) -> tuple[float, float]:
    sample = loop(512)
    with torch.no_grad():
        mean, std = algorithm.critic.moments(sample.obs, sample.chunk)
    return float(mean.mean()), float(std.mean())


def train(algorithm: Any, updates: int, data: Any) -> Any:
    for _ in range(updates):
        algorithm.update(data())
    return algorithm


class Crossing(nn.Module):
    """Two members of unequal spread whose means cross at action 0."""

    def moments(self, obs: Any, chunk: Tensor) -> tuple[Tensor, Tensor]:
        action = chunk[:, 0, 0]
        return torch.stack([3 + action, 3 - action]), torch.tensor([[0.5], [2.0]]).expand(2, len(action))


@pytest.mark.parametrize("backup_entropy", [True, False])
def test_dsac_t_targets_use_the_minimum_mean_under_the_target_policy(
    backup_entropy: bool,
) -> None:
    algorithm: DSACT = learner("dsac_t", temperature=0.3, backup_entropy=backup_entropy)
    algorithm.target_critic = Crossing()  # type: ignore[assignment]
    shifted(algorithm.target_policy)
    data, generator = loop(2048), seeded(algorithm)
    target, sampled = algorithm.targets(data)
    with torch.no_grad():
        chunk, logp = algorithm.target_policy.rsample(data.next_obs, generator=generator)
    action, z = chunk[:, 0, 0], torch.randn(2048, generator=generator)
    assert 0 < (action < 0).sum() < 2048 and float(z.abs().max()) > 3
    z = z.clamp(-3, 3)
    value = 3 - action.abs() - (0.3 * logp if backup_entropy else 0.0)
    torch.testing.assert_close(target, data.reward + GAMMA * value)
    spread = torch.where(action < 0, 0.5, 2.0)
    torch.testing.assert_close(sampled, data.reward + GAMMA * (value + spread * z))


def test_dsac_t_actor_maximises_the_minimum_mean() -> None:
    algorithm: DSACT = learner("dsac_t", temperature=0.3)
    data, generator = loop(), seeded(algorithm)
    loss, _, _ = algorithm.actor_loss(data, algorithm.temperature.value)
    chunk, logp = algorithm.policy.rsample(data.obs, generator=generator)
    mean, _ = algorithm.critic.moments(data.obs, chunk)
    assert (mean[0] != mean[1]).all()
    torch.testing.assert_close(loss, (0.3 * logp - mean.min(0).values).mean())


def test_dsac_t_target_policy_follows_by_tau() -> None:
    algorithm: DSACT = learner("dsac_t", policy_delay=1, tau=0.25)
    before = [weights.clone() for weights in algorithm.target_policy.parameters()]
    algorithm.update(loop())
    pairs = zip(before, algorithm.policy.parameters(), algorithm.target_policy.parameters(), strict=True)
    assert all(torch.allclose(slow, old.lerp(new, 0.25)) and not torch.equal(old, new) for old, new, slow in pairs)


def test_dsac_t_moves_critic_targets_only_with_the_actor() -> None:
    check_critic_targets_move_only_with_the_actor(learner("dsac_t"), loop())


def test_dsac_t_std_equals_the_std_of_the_return() -> None:
    torch.manual_seed(0)
    algorithm: DSACT = learner("dsac_t", temperature=1e-6, temperature_lr=0.0)
    mean, std = moments(train(algorithm, 800, loop))
    assert mean == pytest.approx(1 / (1 - GAMMA), abs=0.25)
    assert std == pytest.approx(NOISE / math.sqrt(1 - GAMMA**2), rel=0.15)


def test_stac_values_are_reduced_by_the_one_step_target_std() -> None:
    torch.manual_seed(0)
    algorithm: STAC = learner("stac", members=1, temperature=1e-6, temperature_lr=0.0, pessimism=0.5)
    mean, std = moments(train(algorithm, 800, loop))
    assert std == pytest.approx(NOISE, rel=0.15)
    assert mean == pytest.approx((1 - GAMMA * 0.5 * NOISE) / (1 - GAMMA), abs=0.25)


def test_dsac_t_std_learned_from_unclipped_squared_errors_is_unbiased() -> None:
    g = torch.Generator().manual_seed(0)
    config = DSACTConfig(spread_clip=10.0)
    raw = torch.tensor([0.0, 0.5], requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.02)
    for _ in range(2000):
        y = 3.0 * torch.randn(256, generator=g)
        mean, std = raw[0].expand(1, 256), nn.functional.softplus(raw[1]).expand(1, 256)
        loss = distribution_loss(mean, std, torch.zeros(256), y, torch.full((1, 1), 3.0), config)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert nn.functional.softplus(raw[1]).item() == pytest.approx(3.0, rel=0.03)


def test_dsac_t_mean_gradient_is_the_weighted_error_of_the_public_code() -> None:
    mean = torch.tensor([[0.0, 1.0]], requires_grad=True)
    std, target, config = torch.full((1, 2), 2.0), torch.tensor([3.0, -1.0]), DSACTConfig()
    loss = distribution_loss(mean, std, target, target, torch.full((1, 1), 2.0), config)
    (gradient,) = torch.autograd.grad(loss.sum(), mean)
    torch.testing.assert_close(gradient, torch.tensor([[-3.0, 2.0]]) * 4 / 4.1)


def test_dsac_t_spread_gradient_matches_the_formula_with_bounded_weights() -> None:
    std = torch.tensor([[0.01, 2.0, 100.0]], requires_grad=True)
    mean, target, sampled = torch.zeros(1, 3, requires_grad=True), torch.ones(3), torch.full((3,), 3.0)
    loss = distribution_loss(mean, std, target, sampled, torch.full((1, 1), 2.0), DSACTConfig())
    of_mean, of_std = torch.autograd.grad(loss.sum(), [mean, std])
    weight = torch.tensor([[10.0, 4 / 4.1, 0.1]])  # 4 / (std^2 + 0.1), clamped to [0.1, 10]
    torch.testing.assert_close(of_mean, -weight)
    torch.testing.assert_close(of_std, weight * (std.detach().square() - 9) / (std.detach() + 0.1))


def test_each_dsac_t_member_clips_by_its_own_average_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm: DSACT = learner("dsac_t", tau=1.0)
    limits: list[Tensor] = []

    def spy(mean: Tensor, std: Tensor, *others: Any) -> Tensor:
        limits.append(others[2])
        return distribution_loss(mean, std, *others)

    monkeypatch.setattr("robopolicy.contrib.control.dsac_t.distribution_loss", spy)
    data = loop()
    _, std = algorithm.critic.moments(data.obs, data.chunk)
    algorithm.critic_loss(data)
    torch.testing.assert_close(limits[0], std.detach().mean(1, keepdim=True))
    assert float((limits[0][0] - limits[0][1]).abs()) > 1e-3


def test_dsac_t_mean_gradient_scales_linearly_with_the_reward_scale() -> None:
    def gradient(scale: float) -> Tensor:
        mean = torch.zeros(1, 64, requires_grad=True)
        target = scale * torch.linspace(1, 2, 64)
        std, average = torch.full((1, 64), 2.0 * scale), torch.full((1, 1), 2.0 * scale)
        loss = distribution_loss(mean, std, target, target, average, DSACTConfig(huber=1e6))
        return torch.autograd.grad(loss.sum(), mean)[0]

    torch.testing.assert_close(gradient(100.0) / gradient(10.0), torch.full((1, 64), 10.0), rtol=0.01, atol=0)


def test_outlying_sampled_targets_are_clipped_in_the_spread_gradient() -> None:
    mean, average = torch.zeros(1, 1), torch.ones(1, 1)
    slopes = []
    for sampled in (3.0, 1000.0, -1000.0):
        std = torch.ones(1, 1, requires_grad=True)
        loss = distribution_loss(mean, std, torch.zeros(1), torch.tensor([sampled]), average, DSACTConfig())
        slopes.append(torch.autograd.grad(loss.sum(), std)[0].item())
    assert slopes[0] == pytest.approx(slopes[1]) == pytest.approx(slopes[2])
    assert slopes[0] < 0  # towards a larger spread


def test_average_spread_starts_at_the_first_batch() -> None:
    spread = RunningStd(2, 0.1)
    spread.observe(torch.tensor([[1.0, 3.0], [4.0, 4.0]]))
    assert spread.average.tolist() == [2.0, 4.0]
    spread.observe(torch.tensor([[4.0, 4.0], [4.0, 4.0]]))
    assert spread.average.tolist() == pytest.approx([2.2, 4.0])


def test_likelihood_gradient_of_the_mean_is_the_error() -> None:
    mean = torch.tensor([[0.0, 1.0]], requires_grad=True)
    loss = likelihood_loss(mean, torch.tensor([[0.3, 7.0]]), torch.tensor([2.0, 4.0]))
    (gradient,) = torch.autograd.grad(loss.sum(), mean)
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, -3.0]]))


def test_stac_with_zero_pessimism_bootstraps_from_the_mean() -> None:
    algorithm: STAC = learner("stac", members=1, pessimism=0.0)
    data, chunk, critic = loop(), torch.rand(128, 2, 1), algorithm.target_critic
    mean = algorithm.pessimistic(critic, data.next_obs, chunk)
    torch.testing.assert_close(mean, critic(data.next_obs, chunk).squeeze(0))
    cautious: STAC = learner("stac", members=1, pessimism=0.5)
    assert (cautious.pessimistic(critic, data.next_obs, chunk) < mean).all()


def test_stac_target_and_actor_subtract_the_spread() -> None:
    algorithm: STAC = learner("stac", members=1, temperature=0.3, pessimism=0.5)
    shifted(algorithm.target_critic)
    data, generator = loop(), seeded(algorithm)
    target = algorithm.target(data)
    chunk, logp = algorithm.policy.rsample(data.next_obs, generator=generator)
    mean, std = algorithm.target_critic.moments(data.next_obs, chunk)
    torch.testing.assert_close(target, data.reward + GAMMA * (mean[0] - 0.5 * std[0] - 0.3 * logp))
    generator = seeded(algorithm)
    loss, _, _ = algorithm.actor_loss(data, algorithm.temperature.value)
    chunk, logp = algorithm.policy.rsample(data.obs, generator=generator)
    mean, std = algorithm.critic.moments(data.obs, chunk)
    torch.testing.assert_close(loss, (0.3 * logp - (mean[0] - 0.5 * std[0])).mean())


def test_a_spread_below_the_likelihood_floor_never_decreases() -> None:
    raw = torch.full((1, 2), -12.0, requires_grad=True)
    std = nn.functional.softplus(raw)
    loss = likelihood_loss(torch.zeros(1, 2), std, torch.tensor([1.0, 0.0]))
    (slope,) = torch.autograd.grad(loss.sum(), std, retain_graph=True)
    torch.testing.assert_close(slope, torch.tensor([[FLOOR - 1 / FLOOR, 0.0]]))
    optimizer = torch.optim.Adam([raw], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        likelihood_loss(torch.zeros(1, 2), nn.functional.softplus(raw), torch.tensor([1.0, 0.0])).sum().backward()
        optimizer.step()
    grown = nn.functional.softplus(raw)[0]
    assert grown[0].item() == pytest.approx(1.0, rel=0.05)
    assert grown[1].item() < FLOOR


def test_stac_target_critic_applies_no_dropout() -> None:
    algorithm: STAC = learner("stac", members=1, dropout=0.5)
    data, chunk = loop(), torch.rand(128, 2, 1)
    online = [algorithm.critic(data.obs, chunk) for _ in range(2)]
    target = [algorithm.target_critic(data.obs, chunk) for _ in range(2)]
    assert not torch.equal(*online)
    assert torch.equal(*target)


def test_mdpo_with_kl_coef_equal_to_the_temperature_equals_sac() -> None:
    algorithm: MDPOOff = learner("mdpo_off")
    alpha = algorithm.temperature.value
    algorithm.config = MDPOOffConfig(kl_coef=float(alpha.detach()))
    data = loop()
    algorithm.generator.manual_seed(3)
    found, _, _ = algorithm.actor_loss(data, alpha)
    expected, _ = actor_loss(algorithm.policy, algorithm.critic, data.obs, alpha, torch.Generator().manual_seed(3))
    assert torch.equal(found, expected)


def test_mdpo_actor_weights_the_copy_by_kl_coef_minus_temperature() -> None:
    algorithm: MDPOOff = learner("mdpo_off", temperature=0.2, kl_coef=0.7)
    shifted(algorithm.previous)
    data, generator = loop(), seeded(algorithm)
    loss, _, _ = algorithm.actor_loss(data, algorithm.temperature.value)
    chunk, logp = algorithm.policy.rsample(data.obs, generator=generator)
    copied = algorithm.previous.log_density(data.obs, chunk)
    expected = (0.7 * logp - 0.5 * copied - algorithm.critic(data.obs, chunk).min(0).values).mean()
    torch.testing.assert_close(loss, expected)
    weights = list(algorithm.policy.parameters())
    for gradient, expected_gradient in zip(
        torch.autograd.grad(loss, weights, retain_graph=True), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_mdpo_loss_is_correct_for_saturated_samples() -> None:
    """With an equal copy and zero values, the loss is `lambda log pi`, although tanh rounds samples near 9 to 1."""
    algorithm: MDPOOff = learner("mdpo_off", temperature=0.2)
    algorithm.critic.min_q = lambda obs, chunk: torch.zeros(len(chunk))
    policy = algorithm.policy = gaussian(state_dependent_std=True)
    output = [layer for layer in policy.actor.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        output.weight.zero_()
        output.bias.view(2, 2).copy_(torch.tensor([9.0, -1.0]))
    algorithm.previous = copy.deepcopy(policy).requires_grad_(False)
    data, generator = loop(), seeded(algorithm)
    loss, logp, _ = algorithm.actor_loss(data, torch.tensor(0.2))
    assert float(loss.detach()) == pytest.approx(0.2 * float(logp.detach().mean()), abs=1e-3)
    noise, std = torch.randn(128, 2, 1, generator=generator)[:, 0, 0], math.exp(-1)
    slope = 2 * (9 + std * noise).tanh()  # of -log(1 - tanh^2)
    expected = torch.stack([0.2 * slope + 0.8 * noise / std, 0.2 * (slope * std * noise - 1) + 0.8 * (noise**2 - 1)])
    (found,) = torch.autograd.grad(loss, [output.bias])
    torch.testing.assert_close(found.view(2, 2)[0], expected.mean(1), atol=1e-3, rtol=1e-3)


def test_a_larger_kl_coef_keeps_the_mdpo_actor_nearer_to_its_copy() -> None:
    def divergence(kl_coef: float) -> float:
        algorithm: MDPOOff = learner("mdpo_off", kl_coef=kl_coef, temperature=0.02, lr=1e-2)
        algorithm.critic = Peak()  # type: ignore[assignment]
        data = loop()
        for _ in range(150):
            loss, _, _ = algorithm.actor_loss(data, algorithm.temperature.value)
            optimizer_step(algorithm.optimizer, loss)
        with torch.no_grad():
            chunk, logp = algorithm.policy.rsample(data.obs, generator=torch.Generator().manual_seed(0))
            return float((logp - algorithm.previous.log_density(data.obs, chunk)).mean())

    far, near = divergence(0.1), divergence(20.0)
    assert far > 0.3
    assert abs(near) < 0.01


def test_mdpo_copies_the_policy_at_intervals_and_never_trains_the_copy() -> None:
    algorithm: MDPOOff = learner("mdpo_off", target_update_interval=3)
    weights = lambda net: [p.clone() for p in net.parameters()]  # noqa: E731
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    first = weights(algorithm.previous)
    train(algorithm, 2, loop)
    assert same(first, weights(algorithm.previous))
    assert not same(first, weights(algorithm.policy))
    train(algorithm, 1, loop)
    assert same(weights(algorithm.policy), weights(algorithm.previous))


def test_chunk_density_equals_the_density_at_sampling() -> None:
    policy = gaussian()
    data = loop(64)
    chunk, logp = policy.rsample(data.obs, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.log_density(data.obs, chunk), logp, rtol=1e-3, atol=1e-3)
    mean, log_std = policy.distribution(data.obs)
    sampled, density = sample_squashed(mean, log_std, torch.zeros_like(mean))
    expected = density[:, : SPEC.action_horizon].sum((1, 2))
    torch.testing.assert_close(policy.log_density(data.obs, sampled), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "updates", "settings"),
    [
        ("dsac_t", 900, {"policy_delay": 1}),  # a spread near 0 slows the mean
        ("stac", 400, {"members": 1}),
        ("mdpo_off", 400, {"target_update_interval": 10, "kl_coef": 0.05}),
    ],
)
def test_each_learner_finds_the_best_action_of_a_bandit(name: str, updates: int, settings: dict[str, Any]) -> None:
    algorithm = learner(name, temperature=0.02, temperature_lr=0.0, **settings)
    train(algorithm, updates, lambda: batch(torch.rand(128, 2, 1) * 2 - 1, peak))
    assert (first_actions(algorithm.inference_policy()) - 0.4).abs().mean() < 0.1


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UserError, match="histogram"):
        GaussianQ(CriticConfig(bins=11), gaussian())
    with pytest.raises(UserError, match="pessimism"):
        STACConfig(pessimism=-1.0)
    with pytest.raises(UserError, match="target_update_interval"):
        MDPOOffConfig(target_update_interval=0)
    with pytest.raises(UserError, match="dropout"):
        CriticConfig(dropout=1.0)
    with pytest.raises(UserError, match="squashed"):
        SAC(SACConfig(), gaussian(squash=False), total_updates=1)


@pytest.mark.parametrize("name", ["dsac_t", "stac", "mdpo_off"])
def test_averaging_members_is_refused_where_the_losses_are_fixed(name: str) -> None:
    with pytest.raises(
        UserError, match=f"average_members=true has no effect with algorithm={name}, whose loss has a fixed form"
    ):
        learner(name, average_members=True)


@pytest.mark.parametrize("name", ["dsac_t", "stac"])
def test_num_min_qs_is_refused_where_all_members_bootstrap(name: str) -> None:
    with pytest.raises(
        UserError, match=f"Algorithm '{name}' bootstraps from all members, so algorithm.num_min_qs=1 has no effect;"
    ):
        learner(name, num_min_qs=1)
