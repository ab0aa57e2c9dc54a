"""Tests of the bound for log-likelihoods that are averages of samples."""

import pytest
import torch
from surrogate_rules import (
    HIGH,
    LOW,
    A,
    Z,
    check_broadcast,
    check_extreme_ratios,
    check_finite_differences,
    check_fresh_data,
    check_ratio_one,
)
from theme_names import parts_of

from robopolicy.contrib.text_diffusion.recipe_parts import linear_bound

NAMES = parts_of("text_diffusion", "surrogate")


@pytest.mark.parametrize("name", NAMES)
def test_diffusion_surrogate_gradient_equals_finite_differences(name):
    check_finite_differences(name)


@pytest.mark.parametrize("name", NAMES)
def test_diffusion_surrogate_is_a_policy_gradient_at_ratio_one(decisions, shift, name):
    check_ratio_one(name)
    check_broadcast(name, decisions, shift)
    check_fresh_data(name, decisions)
    check_extreme_ratios(name, decisions)


def test_value_of_the_linear_bound():
    torch.testing.assert_close(linear_bound(Z, A, LOW, HIGH).loss, torch.where(A < 0, -A * Z.exp(), -A * (1 + Z)))


def test_linear_bound_lies_below_the_objective_and_matches_its_gradient_at_zero():
    """Rows are decisions, columns samples of their log-likelihood; at zero change values and gradients are equal."""
    samples = 0.5 * torch.randn(200, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for sign in (1.0, -1.0):
        a = torch.full((200, 1), sign, dtype=torch.float64)
        bound = -linear_bound(samples, a, LOW, HIGH).loss.mean(1)
        objective = sign * samples.mean(1).exp()
        assert bool((bound <= objective + 1e-12).all())
        leaf = torch.zeros(200, 8, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(-linear_bound(leaf, a, LOW, HIGH).loss.mean(1).sum(), leaf)
        (expected,) = torch.autograd.grad((sign * leaf.mean(1).exp()).sum(), leaf)
        torch.testing.assert_close(gradient, expected)
