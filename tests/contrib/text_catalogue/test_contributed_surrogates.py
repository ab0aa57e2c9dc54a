"""Tests of the surrogate that preserves gradients beyond its bounds."""

import pytest
import torch
from surrogate_rules import (
    HIGH,
    LOW,
    A,
    Z,
    check_broadcast,
    check_extreme_ratios,
    check_fresh_data,
    check_ratio_one,
    check_straight_through,
    slope,
)
from theme_names import parts_of

from robopolicy.contrib.text_catalogue.surrogates import gradient_preserving
from robopolicy.core.surrogates import clip, dual_clip

NAMES = parts_of("text_catalogue", "surrogate")


@pytest.mark.parametrize("name", NAMES)
def test_contributed_surrogate_is_a_policy_gradient_at_ratio_one(decisions, shift, name):
    check_ratio_one(name)
    check_broadcast(name, decisions, shift)
    check_fresh_data(name, decisions)
    check_extreme_ratios(name, decisions)


def test_gradient_preserving_has_the_value_of_dual_clip_and_another_gradient():
    torch.testing.assert_close(gradient_preserving(Z, A, LOW, HIGH).loss, dual_clip(Z, A, LOW, HIGH).loss)
    check_straight_through("gradient_preserving")


def test_gradient_preserving_clip_keeps_the_bound_gradient_outside_the_clip_range():
    gradient, plain = slope(gradient_preserving, Z, A), slope(dual_clip, Z, A)
    beyond = clip(Z, A, LOW, HIGH).clipped
    assert torch.equal(gradient[~beyond], plain[~beyond])
    bound = torch.where(A > 0, HIGH, LOW).to(A)
    torch.testing.assert_close(gradient[beyond], (-A * bound)[beyond])
    assert torch.equal(slope(gradient_preserving, Z, A, low_gain=0.0, high_gain=0.0), plain)
    torch.testing.assert_close(
        slope(gradient_preserving, Z, A, low_gain=0.5)[beyond & (A < 0)], 0.5 * gradient[beyond & (A < 0)]
    )
