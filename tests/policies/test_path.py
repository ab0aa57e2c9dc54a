"""Tests that every parameterisation round-trips on every path to 1e-5 in single precision."""

import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.path import (
    PathEstimate,
    edm_sigma,
    estimate,
    interpolate,
    left_grid,
    prediction_target,
    vp_coefficients,
)

TIMES = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.95]).repeat(8).view(-1, 1, 1)
PATHS = {
    "flow": (TIMES, 1 - TIMES),
    "vp": vp_coefficients(TIMES**2 / (TIMES**2 + (1 - TIMES) ** 2)),
    "edm": (torch.ones_like(TIMES), edm_sigma(TIMES)),
}


def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, 4, 2, generator=generator) * 2 - 1, torch.randn(40, 4, 2, generator=generator)


@pytest.mark.parametrize("kind", ["noise", "data", "velocity", "v", "score"])
@pytest.mark.parametrize("path", PATHS)
def test_a_perfect_model_recovers_data_noise_and_velocity(path: str, kind: str) -> None:
    data, noise = pair()
    a, b = PATHS[path]
    found = estimate(kind, prediction_target(kind, data, noise, a, b), a * data + b * noise, a, b)
    # Dividing by a small coefficient magnifies the rounding of x_t; measure the error at the scale of the division.
    scale = torch.minimum(a, b).clamp(max=1.0)
    for value, expected in ((found.data, data), (found.noise, noise), (found.velocity, data - noise)):
        assert float(((value - expected) * scale).abs().max()) < 1e-5


def test_flow_path_matches_the_published_formulas() -> None:
    data, noise = pair()
    x = interpolate(noise, data, TIMES)
    u = data - noise
    found = estimate("velocity", u, x, TIMES, 1 - TIMES)
    torch.testing.assert_close(found.data, x + (1 - TIMES) * u)
    torch.testing.assert_close(found.noise, x - TIMES * u)


def test_edm_time_is_one_over_one_plus_sigma() -> None:
    sigma = torch.tensor([0.002, 0.5, 80.0])
    torch.testing.assert_close(edm_sigma(1 / (1 + sigma)), sigma, rtol=1e-4, atol=1e-6)


def test_the_ends_of_the_path_are_noise_and_data() -> None:
    data, noise = pair()
    assert torch.equal(interpolate(noise, data, torch.tensor(0.0)), noise)
    torch.testing.assert_close(interpolate(noise, data, torch.tensor(1.0)), data, atol=1e-6, rtol=0)
    assert torch.equal(PathEstimate(data, noise).velocity, data - noise)


def test_the_grid_holds_the_start_of_each_step() -> None:
    assert left_grid(1).tolist() == [0.0]
    assert left_grid(4).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_unknown_predictions_suggest_the_nearest_name() -> None:
    x = torch.zeros(1)
    with pytest.raises(UserError, match="Did you mean 'velocity'"):
        estimate("velocty", x, x, x, x)
    with pytest.raises(UserError, match="Did you mean 'noise'"):
        prediction_target("nois", x, x, x, x)
