"""Tests of PolicyFlow: closed forms of the ratio, gradient and regulariser, noise bounds, and modes on a ring."""

import math
from typing import Any

import pytest
import torch
from matching_tools import (
    BARE,
    SPEC,
    GaussianFlow,
    bandit,
    gradient,
    head,
    modes,
    near_goal,
    observations,
    point_mass_return,
    prepared,
    ring,
    tuner,
)

from robopolicy.algorithms.common.rollout_batch import normalize
from robopolicy.algorithms.policyflow import PolicyFlowConfig, brownian_loss
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.exploration.endpoint_noise import EndpointNoiseConfig, EndpointNoisePolicy


def with_zero_velocity(policy: Any) -> Any:
    """Set the velocity of `policy` to zero everywhere and return it."""
    last = policy.backbone.body[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    return policy


def test_zero_velocity_policy_is_gaussian_around_the_initial_noise() -> None:
    policy = EndpointNoisePolicy(with_zero_velocity(head(**BARE)), EndpointNoiseConfig(std_init=0.3))
    sample = policy.sample(observations(20_000), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample.record["endpoint"], sample.record["noise"])
    offset = sample.record["action"] - sample.record["noise"]
    assert float(offset.mean()) == pytest.approx(0.0, abs=0.005)
    assert float(offset.std()) == pytest.approx(0.3, rel=0.02)
    assert float(sample.chunk.std()) == pytest.approx(math.sqrt(1 + 0.3**2), rel=0.02)
    expected = torch.distributions.Normal(0.0, 0.3).log_prob(offset[:, : SPEC.action_horizon]).sum((1, 2))
    torch.testing.assert_close(sample.logp[:, 0], expected)


def test_velocity_shift_gives_the_density_ratio_of_two_gaussians() -> None:
    algorithm = tuner("policyflow", head(**BARE), times=3)
    rows = prepared(algorithm, bandit(algorithm.policy, 32))
    shift = 0.02
    with torch.no_grad():
        algorithm.policy.head.backbone.body[-1].bias.add_(shift)
    offset = (rows.record["action"] - rows.record["endpoint"])[:, : SPEC.action_horizon]
    expected = ((2 * shift * offset - shift**2) / (2 * 0.1**2)).sum((1, 2))
    torch.testing.assert_close((algorithm.logp(rows) - rows.logp)[:, 0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("times", [1, 3])
def test_a_changed_noise_std_gives_the_gaussian_ratio_and_its_gradient(times: int) -> None:
    algorithm = tuner("policyflow", head(**BARE), times=times)
    rows = prepared(algorithm, bandit(algorithm.policy, 32))
    std = torch.tensor([0.13, 0.08])
    with torch.no_grad():
        algorithm.policy.raw_log_std.copy_(std.log())
    offset = (rows.record["action"] - rows.record["endpoint"])[:, : SPEC.action_horizon]
    densities = [torch.distributions.Normal(0.0, spread).log_prob(offset).sum((1, 2)) for spread in (std, 0.1)]
    change = algorithm.logp(rows)[:, 0] - rows.logp[:, 0]
    torch.testing.assert_close(change, densities[0] - densities[1], atol=1e-4, rtol=1e-4)
    weight = torch.linspace(-1, 1, 32)
    (slope,) = torch.autograd.grad((weight * change).sum(), algorithm.policy.raw_log_std)
    expected = (weight[:, None, None] * ((offset / std).square() - 1)).sum((0, 1))
    torch.testing.assert_close(slope, expected, atol=1e-3, rtol=1e-4)


def test_ratio_averages_the_density_over_several_times() -> None:
    algorithm = tuner("policyflow", head(**BARE), times=4)
    rows = prepared(algorithm, bandit(algorithm.policy, 32))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in algorithm.policy.head.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    change = (algorithm.policy.velocities(rows.obs, rows.record) - rows.record["velocity"])[:, :, : SPEC.action_horizon]
    offset = (rows.record["action"] - rows.record["endpoint"])[:, None, : SPEC.action_horizon]
    density = torch.distributions.Normal(change.double(), 0.1).log_prob(offset.double()).sum((2, 3)).exp()
    torch.testing.assert_close(algorithm.logp(rows)[:, 0].double(), density.mean(1).log(), atol=1e-4, rtol=1e-4)


def test_times_are_sampler_grid_points_and_midpoints() -> None:
    policy = EndpointNoisePolicy(head(steps=4), EndpointNoiseConfig(), times=50)
    obs = observations(20)
    record = policy.complete(obs, policy.sample(obs).record, torch.Generator().manual_seed(0))
    assert sorted(set(record["t"].flatten().tolist())) == [i / 8 for i in range(8)]
    start, end = record["noise"].unsqueeze(1), record["endpoint"].unsqueeze(1)
    torch.testing.assert_close(policy.points(record), start + record["t"][..., None, None] * (end - start))


def test_first_gradient_equals_its_closed_form_on_a_gaussian_bandit() -> None:
    """For reward a, the gradient with respect to the mean is `E_t[1 - c t]` over the grid of times."""
    policy = GaussianFlow(0.3, 0.5, steps=5)
    algorithm = tuner("policyflow", policy, entropy_coef=0.0, brownian_coef=0.0)
    obs, gradients = {"state": torch.zeros(1000, 1, 1)}, []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        sample = algorithm.policy.sample(obs, generator=generator)
        record = algorithm.policy.complete(obs, sample.record, generator)
        output = algorithm.policy.decisions(obs, record)
        advantage = sample.record["action"].flatten() - 0.3
        loss = -(advantage * (output.logp[:, 0] - sample.logp[:, 0]).exp()).mean()
        gradients.append(torch.autograd.grad(loss, policy.mean)[0])
    found = torch.stack(gradients)
    t = torch.arange(10) / 10
    expected = -float((1 - policy.slope(t) * t).mean())
    error = float(found.std()) / math.sqrt(len(found))
    assert expected < 0 and error < 0.1
    assert float(found.mean()) == pytest.approx(expected, abs=3 * error)


def test_loss_increases_the_density_of_actions_with_positive_advantage() -> None:
    policy = GaussianFlow(0.3, 0.5, steps=5)
    algorithm = tuner("policyflow", policy, entropy_coef=0.0, brownian_coef=0.0)
    rows = prepared(algorithm, bandit(algorithm.policy, 2000, lambda chunk: chunk[:, 0, 0]))
    loss, _ = algorithm.loss(rows)
    found = torch.autograd.grad(loss, (policy.mean, algorithm.policy.raw_log_std), retain_graph=True)
    plain = -(normalize(rows.advantage) * algorithm.logp(rows)[:, 0]).mean()
    torch.testing.assert_close(found, torch.autograd.grad(plain, (policy.mean, algorithm.policy.raw_log_std)))
    offset = (rows.record["action"] - rows.record["endpoint"]).flatten()
    sensitivity = 1 - policy.slope(rows.record["t"][:, 0]) * rows.record["t"][:, 0]  # d velocity / d mean
    expected = -(normalize(rows.advantage) * offset * sensitivity / 0.1**2).mean()
    assert float(expected) < -1
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)


def test_brownian_loss_equals_its_closed_form_and_the_target_changes_its_gradient() -> None:
    velocity, old = torch.full((1, 1, 1, 1), 2.0), torch.full((1, 1, 1, 1), 3.0)
    x, t = torch.full((1, 1, 1, 1), 0.5), torch.full((1, 1, 1, 1), 0.25)
    assert float(brownian_loss(velocity, old, x, t)[0]) == pytest.approx((0.75 * 2.0 - (0.5 - 0.25 * 3.0)) ** 2)
    assert float(brownian_loss(velocity, velocity, x, t)[0]) == pytest.approx((2.0 - 0.5) ** 2)  # |v - x|^2
    found = {}
    for target in ("old", "present"):
        algorithm = tuner("policyflow", brownian_coef=1.0, brownian_target=target)
        rows = prepared(algorithm, bandit(algorithm.policy, 32))
        loss, info = algorithm.loss(rows)
        found[target] = (float(info["brownian"].detach()), gradient(loss, algorithm.policy.head))
    assert found["old"][0] == pytest.approx(found["present"][0], rel=1e-5)  # equal before the first step
    assert not torch.allclose(found["old"][1], found["present"][1], rtol=1e-3)


def test_regulariser_vanishes_when_the_velocity_is_minus_the_score() -> None:
    """The flow from N(0, 1) to N(0, s^2) has score -x / v(t); the Brownian velocity is x / v(t)."""
    t = torch.tensor([0.25, 0.5, 0.75])[None, :, None, None]
    x = torch.randn(100, 3, 1, 1)
    policy = GaussianFlow(0.0, 0.5)
    with torch.no_grad():
        old = policy.slope(t) * x
    variance = (1 - t).square() + t.square() * 0.25
    assert float(brownian_loss(x / variance, old, x, t)[0]) == pytest.approx(0.0, abs=1e-10)


def test_entropy_bonus_trains_only_the_noise_within_its_bounds() -> None:
    algorithm = tuner("policyflow", brownian_coef=0.0, entropy_coef=0.5)
    policy = algorithm.policy
    rows = prepared(algorithm, bandit(policy, 32))
    output = policy.decisions(rows.obs, rows.record)
    expected = torch.distributions.Normal(0.0, policy.log_std.exp()).entropy().sum() * SPEC.action_horizon
    torch.testing.assert_close(output.entropy, expected.expand(32, 1))
    assert not bool(gradient(output.entropy.sum(), policy.head).any())
    for value, bound in ((-9.0, 0.02), (9.0, 1.0)):
        with torch.no_grad():
            policy.raw_log_std.fill_(value)
        torch.testing.assert_close(policy.log_std.exp(), torch.full((2,), bound))


def test_only_executed_steps_are_scored_and_the_noise_is_not_deployed() -> None:
    algorithm = tuner("policyflow")
    rows = prepared(algorithm, bandit(algorithm.policy, 16))
    other = dict(rows.record)
    other["action"] = rows.record["action"].clone()
    other["action"][:, SPEC.action_horizon :] += 1.0
    assert torch.equal(algorithm.policy.decisions(rows.obs, other).logp, algorithm.logp(rows))
    assert algorithm.inference_policy() is algorithm.policy.head


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown brownian_target 'new'"):
        PolicyFlowConfig(brownian_target="new")


def on_the_ring(brownian_coef: float, updates: int) -> tuple[float, float]:
    """Effective number of goals and final reward after training from scratch on six goals."""
    goals = ring(6)
    policy = with_zero_velocity(head(spec=PolicySpec({"state": (1,)}, action_dim=2), **BARE))
    rates: dict[str, Any] = {"lr": 1e-3, "lr_final": 1e-3, "target_kl": None, "batch_size": 512, "epochs": 4}
    noise = EndpointNoiseConfig(std_init=0.3)
    algorithm = tuner("policyflow", policy, entropy_coef=0.0, brownian_coef=brownian_coef, perturbation=noise, **rates)
    reward, obs = 0.0, {"state": torch.zeros(512, 1, 1)}
    for seed in range(updates):
        rollout = bandit(algorithm.policy, 512, lambda chunk: near_goal(chunk, goals), seed, obs)
        reward = float(rollout.reward.mean())
        algorithm.update(rollout)
    return modes(policy, goals), reward


@pytest.mark.slow
def test_brownian_regulariser_preserves_goal_modes_on_a_ring() -> None:
    plain, spread = on_the_ring(0.0, 110), on_the_ring(0.4, 110)
    assert plain[0] < 3.0 and spread[0] > 4.5
    assert min(plain[1], spread[1]) > 0.12  # 0.05 untrained


@pytest.mark.slow
def test_it_learns_the_point_mass_from_scratch() -> None:
    settings: dict[str, Any] = {"perturbation": EndpointNoiseConfig(std_init=0.4), "target_kl": None}
    assert point_mass_return("policyflow", updates=20, epochs=6, brownian_coef=0.0, **settings) > -5.2  # -6 untrained


@pytest.mark.parametrize(("beyond", "inwards"), [(1.0, 1), (-4.5, -1)])  # log std above log 1, below log 0.02
def test_noise_beyond_its_bound_is_clamped_and_has_only_inward_gradients(beyond: float, inwards: int) -> None:
    policy = EndpointNoisePolicy(head(**BARE), EndpointNoiseConfig(std_init=1.0))  # at the upper bound from the start
    plain = policy.log_std.sum()
    torch.testing.assert_close(torch.autograd.grad(plain, policy.raw_log_std)[0], torch.ones(SPEC.action_dim))
    with torch.no_grad():
        policy.raw_log_std.fill_(beyond)
    bound = 1.0 if inwards > 0 else 0.02
    torch.testing.assert_close(policy.log_std.exp(), torch.full((SPEC.action_dim,), bound))
    outwards = torch.autograd.grad(-inwards * policy.log_std.sum(), policy.raw_log_std)[0]
    assert not bool(outwards.any())
    optimizer = torch.optim.SGD([policy.raw_log_std], lr=0.3)
    for _ in range(5):
        optimizer.zero_grad()
        (inwards * policy.log_std.sum()).backward()
        optimizer.step()
    assert bool((policy.log_std.exp() > 0.02).all() and (policy.log_std.exp() < 1.0).all())
