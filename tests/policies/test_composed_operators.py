"""Tests of composition operators, guidance and corrector on Gaussians."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closed_forms import TWO_MODES, Mixture, exact_flow
from closed_forms import nothing as no_number
from composition_forms import CHUNK, Gaussian, exact, network, nothing, observations, round_
from torch import Tensor

from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.policies.composition.guidance import Langevin, ValueGuidance
from robopolicy.policies.composition.operators import (
    And,
    Convex,
    DensityWeighted,
    Lookahead,
    Or,
    Scheduled,
    make_operator,
)
from robopolicy.policies.wrappers.composed import compose
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

LEFT = Gaussian((-0.8, 0.0), ((0.5, 0.1), (0.1, 0.3)))
RIGHT = Gaussian((0.8, 0.4), ((0.3, 0.0), (0.0, 0.4)))
ABOVE = Gaussian((0.1, 0.9), ((0.4, -0.1), (-0.1, 0.3)))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def spread(x: Tensor, laws: tuple[Gaussian, ...]) -> float:
    """Mean distance between the highest and lowest log-density of clean samples [nats]."""
    levels = torch.stack([law.log_density(x, 1.0) for law in laws])
    return float((levels.amax(0) - levels.amin(0)).mean())


# And.


@pytest.mark.parametrize(
    ("laws", "operator", "steps"),
    [
        ((LEFT, RIGHT), And(sampler="ode", probes=0), 150),
        ((LEFT, RIGHT), And(sampler="sde"), 400),
        ((LEFT, RIGHT, ABOVE), And(sampler="ode", probes=0, reach=10.0), 200),
    ],
    ids=["ode", "sde", "three"],
)
def test_and_operator_samples_have_equal_parent_log_densities(
    laws: tuple[Gaussian, ...], operator: And, steps: int
) -> None:
    parents = [exact("flow", law, steps=steps) for law in laws]
    assert spread(compose(parents, operator).act(nothing(128), generator=seeded()), laws) < 0.02
    assert spread(compose(parents).act(nothing(128), generator=seeded()), laws) > 0.5


def test_finite_differences_match_exact_derivatives() -> None:
    parents, noise = [exact("flow", law, steps=12) for law in (LEFT, RIGHT)], torch.randn(8, 1, 2)
    found = [
        compose(parents, And(probes=0, derivative=how)).decode(nothing(8), noise) for how in ("difference", "exact")
    ]
    torch.testing.assert_close(found[0], found[1], atol=2e-3, rtol=0)


def test_sde_with_noise_dependent_weights_needs_the_jacobian_term(monkeypatch: pytest.MonkeyPatch) -> None:
    from robopolicy.policies.composition import joint_field

    def without(*args: Any) -> tuple[Tensor, Tensor]:
        noise, curvature = kept(*args)
        return noise, torch.zeros_like(curvature)

    kept = joint_field._remove_differences
    monkeypatch.setattr(joint_field, "_remove_differences", without)
    policy = compose([exact("flow", law, steps=100) for law in (LEFT, RIGHT)], And(sampler="sde"))
    assert spread(policy.act(nothing(128), generator=seeded()), (LEFT, RIGHT)) > 0.2


def test_and_uses_its_prior_weights_if_parents_agree_and_bounds_them_otherwise() -> None:
    operator, levels = And((0.3, 0.7), reach=0.5), torch.zeros(2, 2)
    apart = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    response = torch.stack([0.0 * apart, apart])
    found = operator.solve_weights(levels, lambda: Lookahead(torch.tensor([[1e-6, 0.0], [40.0, 0.0]]), response, 1e-3))
    torch.testing.assert_close(found[0], torch.tensor([0.3, 0.7]), atol=1e-3, rtol=0)
    torch.testing.assert_close(found[1], torch.tensor([-0.2, 1.2]), atol=1e-5, rtol=0)
    small = operator.solve_weights(levels, lambda: Lookahead(torch.tensor([[0.2, 0.0]] * 2), response, 1e-7))[1]
    level = torch.tensor([0.2, 0.0]) + apart @ (small - torch.tensor([0.3, 0.7]))
    assert float(small.sum()) == pytest.approx(1.0) and abs(float(level[0] - level[1])) < 1e-5


# Or.


def halves() -> list[Policy]:
    return [exact_flow(Mixture((mean,), (1.0,), TWO_MODES.std), steps=100) for mean in TWO_MODES.means]


def test_or_operator_flow_equals_the_exact_flow_of_the_mixture() -> None:
    noise = torch.special.ndtri((torch.arange(400) + 0.5) / 400).view(-1, 1, 1)
    found = compose(halves(), Or(TWO_MODES.shares, probes=0)).decode(no_number(400), noise)
    expected = exact_flow(TWO_MODES, steps=100).decode(no_number(400), noise)
    assert float(((found - expected).abs() < 0.02).float().mean()) > 0.97
    assert float((found < 0).float().mean()) == pytest.approx(TWO_MODES.shares[0], abs=0.02)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_of_or_divides_log_densities_but_not_prior_weights(temperature: float) -> None:
    levels = torch.tensor([[4.0, 1.0], [1.0, 9.0], [2.0, 2.0]]).log()
    found = Or((0.25, 0.75), temperature=temperature).solve_weights(levels, lambda: Lookahead(levels, levels, 0.0))
    powers = levels.exp() ** (1 / temperature) * torch.tensor([0.25, 0.75])
    torch.testing.assert_close(found, powers / powers.sum(1, keepdim=True))
    torch.testing.assert_close(found[2], torch.tensor([0.25, 0.75]))


def test_or_at_low_temperature_samples_a_single_parent() -> None:
    """At low temperature each of two mirrored parents decodes the noise on its side of 0."""
    noise = torch.special.ndtri((torch.arange(200) + 0.5) / 200).view(-1, 1, 1)
    warm, cold = (
        compose(halves(), Or(probes=0, temperature=value)).decode(no_number(200), noise) for value in (1.0, 1e-3)
    )
    for number, parent in enumerate(halves()):
        own = parent.decode(no_number(200), noise)
        side = (noise < 0) == (number == 0)
        assert float((cold - own)[side].abs().max()) < 0.02 < float((warm - own)[side].abs().max())


def test_or_with_sde_sampler_samples_the_mixture() -> None:
    sampled = compose(halves(), Or(TWO_MODES.shares, sampler="sde")).act(no_number(2000), generator=seeded()).flatten()
    low, high = sampled[sampled < 0], sampled[sampled > 0]
    assert len(low) / 2000 == pytest.approx(0.7, abs=0.04)
    assert float(low.mean()) == pytest.approx(-0.6, abs=0.02) and float(high.mean()) == pytest.approx(0.6, abs=0.02)
    assert float(low.std()) == pytest.approx(0.1, abs=0.02)


ADAPTIVE = [Or(), And(), Or(derivative="exact"), And(derivative="exact")]


@pytest.mark.parametrize("operator", ADAPTIVE, ids=lambda operator: f"{operator.name}-{operator.derivative}")
def test_adaptive_weights_are_independent_of_other_rows_and_differentiable(operator: DensityWeighted) -> None:
    policy = compose([network("flow", 0), network("edm", 1)], operator)
    obs, noise = observations(5), torch.randn(5, 4, 2)
    some = policy.decode({"state": obs["state"][:2]}, noise[:2])
    torch.testing.assert_close(some, policy.decode(obs, noise)[:2], atol=1e-3, rtol=0)
    with torch.inference_mode():
        assert policy.act(obs, generator=seeded()).isfinite().all()
    noise.requires_grad_()
    policy.decode(obs, noise).square().sum().backward()
    assert noise.grad is not None and noise.grad.isfinite().all() and float(noise.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    ("operator", "calls"),
    [
        (Or(), 4),
        (Or(sampler="sde"), 4),
        (And(probes=0), 4),
        (And(sampler="sde"), 3 * 2 + 1),  # the last step has no noise
    ],
)
def test_finite_differences_share_the_network_calls_of_the_velocities(operator: DensityWeighted, calls: int) -> None:
    parents = [network("flow", 0), network("flow", 1)]
    counted = [0]
    parents[0].backbone.register_forward_hook(lambda *_: counted.__setitem__(0, counted[0] + 1))
    policy = compose(parents, operator)
    policy.act(observations(2))
    assert counted[0] == calls and policy.nfe == 2 * calls


# Guidance and corrector.


def linear_critic(policy: Policy, slope: tuple[float, float]) -> QEnsemble:
    """Q(s, a) = slope . a, in action units."""
    critic = QEnsemble(CriticConfig(members=1, hidden=()), policy)
    layer: Any = critic.body.layers[-1]
    with torch.no_grad():
        layer.bias.zero_()
        layer.weight.copy_(torch.tensor([0.0, *slope]).view(1, 3, 1))
    return critic


def test_guidance_by_a_linear_critic_shifts_a_gaussian_by_variance_times_slope() -> None:
    law, slope, noise = round_((0.3, -0.2), 0.5), (0.4, -1.0), torch.randn(40, 1, 2)
    parents = [exact("flow", law, steps=6) for _ in range(2)]
    guidance = ValueGuidance(strength=1.5, data_std=0.5)
    policy = compose(parents, critic=linear_critic(parents[0], slope), guidance=guidance)
    shifted = round_((0.3 + 1.5 * 0.25 * 0.4, -0.2 - 1.5 * 0.25), 0.5)
    expected = exact("flow", shifted, steps=6).decode(nothing(40), noise)
    torch.testing.assert_close(policy.decode(nothing(40), noise), expected, atol=1e-4, rtol=0)
    with torch.inference_mode():
        assert policy.act(nothing(3)).shape == (3, 1, 2)
    noise.requires_grad_()
    policy.decode(nothing(40), noise).sum().backward()
    assert noise.grad is not None and float(noise.grad.abs().min()) > 0


def test_single_parent_can_be_guided_and_the_checkpoint_contains_the_critic(tmp_path: Path) -> None:
    parent, obs = network("flow", 0), observations(4)
    torch.manual_seed(1)
    policy = compose([parent], critic=QEnsemble(CriticConfig(hidden=(8,)), parent))
    save_checkpoint(tmp_path / "guided", policy, task="toy/point_mass", obs_sample=obs)
    again, _ = load_policy(tmp_path / "guided")
    noise = torch.randn(4, 4, 2)
    assert torch.equal(again.decode(obs, noise), policy.decode(obs, noise))
    assert verify_checkpoint(tmp_path / "guided").ok
    assert not torch.equal(policy.decode(obs, noise), parent.decode(obs, noise))
    other = network("flow", 0, replace(CHUNK, action_horizon=3))
    with pytest.raises(UserError, match="has other observations or actions"):
        compose([parent], critic=QEnsemble(CriticConfig(hidden=(8,)), other))
    with pytest.raises(UserError, match="need prescribed weights"):
        compose([parent, parent], "or", corrector=Langevin())


def test_langevin_corrector_samples_the_product_of_the_densities() -> None:
    wide, narrow = round_((1.0, 1.0), 0.6), round_((0.0, 0.0), 0.2)
    parents = [exact("flow", law, steps=60) for law in (narrow, wide)]
    precision = 0.5 / 0.04 + 0.5 / 0.36
    sampled = compose(parents, corrector=Langevin(steps=10, size=0.3)).act(nothing(2000), generator=seeded())
    assert float(sampled.std(0).mean()) == pytest.approx(precision**-0.5, abs=0.02)
    assert float(sampled.mean()) == pytest.approx(0.5 / 0.36 / precision, abs=0.03)
    plain = compose(parents).act(nothing(2000), generator=seeded())
    assert float(plain.std(0).mean()) == pytest.approx((0.2 * 0.6) ** 0.5, abs=0.02)


# Settings.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_operator({"name": "or", "temperature": 0.0}), "temperature must be positive"),
        (lambda: make_operator({"name": "or", "sampler": "euler"}), "Unknown sampler 'euler'"),
        (lambda: make_operator({"name": "and", "reach": 0.0}), "reach must be positive"),
        (lambda: make_operator({"name": "and", "probes": -1}), "probes must not be negative"),
        (lambda: make_operator({"name": "and", "derivative": "guess"}), "Unknown derivative 'guess'"),
        (lambda: make_operator({"name": "convex", "weight": [1.0]}), "Unknown setting 'weight'"),
        (lambda: make_operator({"name": "scheduled"}), "A schedule needs knots"),
        (lambda: Scheduled(((1.0, 0.0),)), "at least one for noise and one for data"),
        (lambda: Scheduled(((1.0, 0.0), (0.0, 1.0))).with_weights((1, 0)), "weights at every knot"),
        (lambda: Convex((float("nan"), 1.0)), "must sum to 1"),
        (lambda: Langevin(steps=0), "steps must be at least 1"),
        (lambda: ValueGuidance(data_std=0.0), "data_std must be positive"),
        (lambda: ValueGuidance(reduction="max"), "Unknown reduction 'max'"),
    ],
)
def test_invalid_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()
