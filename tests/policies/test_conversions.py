"""Tests of velocity conversions: heads of all families have the same field, whose flow maps noise to the data."""

from collections.abc import Callable

import pytest
import torch
from closed_forms import GAUSSIAN, TWO_MODES, Mixture, exact_diffusion, exact_edm, exact_flow, nothing
from torch import Tensor

from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import estimate, interpolate, vp_coefficients

MIXTURES = {"gaussian": GAUSSIAN, "two-modes": TWO_MODES}
HEADS: dict[str, Callable[[Mixture], GenerativePolicy]] = {
    "flow": exact_flow,
    "diffusion-noise": lambda mixture: exact_diffusion(mixture, prediction="noise"),
    "diffusion-data": lambda mixture: exact_diffusion(mixture, prediction="data"),
    "diffusion-v": lambda mixture: exact_diffusion(mixture, prediction="v"),
    "diffusion-1000": lambda mixture: exact_diffusion(mixture, train_steps=1000),
    "diffusion-linear": lambda mixture: exact_diffusion(mixture, train_steps=1000, schedule="linear"),
    "edm": exact_edm,
}
heads = pytest.mark.parametrize("head", HEADS)


@heads
@pytest.mark.parametrize("mixture", MIXTURES)
def test_velocity_of_an_exact_head_is_exact_at_any_time(head: str, mixture: str) -> None:
    target = MIXTURES[mixture]
    t = torch.linspace(0.05, 0.95, 181)
    x = interpolate(torch.randn(181, 1, 1), target.draw(181), t.view(-1, 1, 1))
    velocity = HEADS[head](target).field(nothing(181), x, t)
    # Computing data from predicted noise divides by a, which magnifies the rounding of x by 1 / t <= 20.
    torch.testing.assert_close(velocity, target.velocity(x, t.view(-1, 1, 1)), atol=1e-5, rtol=1e-5)


@heads
def test_velocity_survives_conversion_to_noise_on_any_path(head: str) -> None:
    t = torch.linspace(0.05, 0.95, 91)
    x = torch.randn(91, 1, 1)
    policy = HEADS[head](TWO_MODES)
    u = policy.field(nothing(91), x, t)
    row = t.view(-1, 1, 1)
    noise = x - row * u
    alpha_bar = row**2 / (row**2 + (1 - row) ** 2)
    for a, b in ((row, 1 - row), vp_coefficients(alpha_bar), (torch.ones_like(row), (1 - row) / row)):
        again = estimate("noise", noise, x * (a + b), a, b).velocity
        torch.testing.assert_close(again * row, u * row, atol=1e-5, rtol=1e-5)


def flow_map(policy: GenerativePolicy, noise: Tensor, steps: int = 400) -> Tensor:
    """Solve the probability-flow ODE on the linear path with the midpoint rule."""
    obs, x = nothing(len(noise)), noise
    for i in range(steps):
        half = x + policy.field(obs, x, torch.full((len(x),), i / steps)) / (2 * steps)
        x = x + policy.field(obs, half, torch.full((len(x),), (i + 0.5) / steps)) / steps
    return x


@heads
def test_probability_flow_maps_noise_to_the_gaussian(head: str) -> None:
    noise = torch.linspace(-2.5, 2.5, 41).view(-1, 1, 1)
    x = flow_map(HEADS[head](GAUSSIAN), noise)
    torch.testing.assert_close(x, 0.4 + 0.3 * noise, atol=4e-3, rtol=0)


@heads
def test_probability_flow_covers_both_modes_in_the_right_proportion(head: str) -> None:
    noise = torch.special.ndtri((torch.arange(1000) + 0.5) / 1000).view(-1, 1, 1)
    x = flow_map(HEADS[head](TWO_MODES), noise, 200).flatten()
    assert float((x < 0).float().mean()) == pytest.approx(0.7, abs=0.01)
    assert float(x[x < 0].mean()) == pytest.approx(-0.6, abs=0.02) and float(x[x > 0].mean()) == pytest.approx(
        0.6, abs=0.02
    )
    assert float(x[x < 0].std()) == pytest.approx(0.1, abs=0.02)


def test_heads_of_two_families_compose_gaussians_of_equal_variance_exactly() -> None:
    left, right = exact_diffusion(Mixture((-0.5,), (1.0,), 0.3)), exact_edm(Mixture((0.7,), (1.0,), 0.3))
    noise = torch.linspace(-2, 2, 21).view(-1, 1, 1)
    obs, x, steps = nothing(21), noise, 400
    for i in range(steps):
        t = torch.full((21,), (i + 0.5) / steps)
        x = x + (0.25 * left.field(obs, x, t) + 0.75 * right.field(obs, x, t)) / steps
    torch.testing.assert_close(x, 0.25 * -0.5 + 0.75 * 0.7 + 0.3 * noise, atol=1e-2, rtol=0)


@heads
def test_times_outside_the_noise_levels_use_the_nearest_level(head: str) -> None:
    policy = HEADS[head](TWO_MODES)
    x = torch.randn(2, 1, 1)
    velocity = policy.field(nothing(2), x, torch.tensor([0.0, 1.0]))
    assert bool(velocity.isfinite().all())
