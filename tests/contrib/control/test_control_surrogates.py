"""Tests of drift and target-ratio surrogates: values, gradients and the shared surrogate rules."""

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
    slope,
)
from theme_names import parts_of

from robopolicy.contrib.control.surrogates import bounded_ratio, discovered_drift, drift
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.regularizers import Anneal
from robopolicy.core.surrogates import clip, importance_sampling

NAMES = parts_of("control", "surrogate")


@pytest.mark.parametrize("name", NAMES)
def test_surrogate_gradients_match_finite_differences(name):
    check_finite_differences(name)


@pytest.mark.parametrize("name", NAMES)
def test_surrogates_start_as_the_policy_gradient(decisions, shift, name):
    check_ratio_one(name)
    check_broadcast(name, decisions, shift)
    check_fresh_data(name, decisions)
    check_extreme_ratios(name, decisions)


def test_values_equal_the_formulas():
    ratio, gain = Z.exp(), torch.where(A < 0, A * Z, A * (Z.exp() - 1))
    width = torch.where(A < 0, 0.6, 2.0)
    away = (gain - width * (gain / width).tanh()).clamp(min=0)
    torch.testing.assert_close(drift(Z, A, LOW, HIGH).loss, -A * ratio + away)
    target = torch.where(A > 0, HIGH, LOW)
    torch.testing.assert_close(bounded_ratio(Z, A, LOW, HIGH).loss, A.abs() * (ratio - target).abs())


def test_drift_is_nonnegative_and_zero_without_surrogate_gain():
    cost = discovered_drift(Z, A)
    gained = A * Z > 0
    assert bool((cost[gained] > 0).all()) and bool((cost[~gained] == 0).all())
    z = torch.zeros_like(Z, requires_grad=True)
    cost = discovered_drift(z, A)
    assert bool((cost == 0).all()) and bool((torch.autograd.grad(cost.sum(), z)[0] == 0).all())


def test_drift_gradient_equals_the_analytic_gradient():
    z = Z.clone().requires_grad_()
    (actual,) = torch.autograd.grad(discovered_drift(z, A, 1.5, 0.4).sum(), z)
    up = A * Z.exp() * (A * (Z.exp() - 1) / 1.5).tanh().square()  # d relu(u - w tanh(u / w)) = tanh(u / w)^2 du
    down = A * (A * Z / 0.4).tanh().square()
    torch.testing.assert_close(actual, torch.where(A * Z > 0, torch.where(A > 0, up, down), 0.0))


def test_drift_cancels_all_gain_for_narrow_widths_and_none_for_wide_widths():
    free = importance_sampling(Z, A, LOW, HIGH).loss
    torch.testing.assert_close(drift(Z, A, LOW, HIGH, alpha=1e6, beta=1e6).loss, free)
    gain = torch.where(A > 0, A * torch.expm1(Z), A * Z).clamp(min=0)
    torch.testing.assert_close(drift(Z, A, LOW, HIGH, alpha=1e-9, beta=1e-9).loss, free + gain)


def test_drift_widths_scale_with_the_advantage():
    scaled = discovered_drift(Z, A, 0.3 * 2.0, 0.3 * 0.6)
    torch.testing.assert_close(scaled, 0.3 * discovered_drift(Z, A / 0.3))


def test_clipped_marks_decisions_whose_gradient_opposes_the_advantage():
    turned = drift(Z, A, LOW, HIGH, beta=0.1).clipped
    back = A * slope(drift, Z, A, beta=0.1) > 0  # the loss decreases against the advantage
    assert torch.equal(turned, back) and bool(turned.any()) and not bool(turned[A > 0].any())


def test_bounded_ratio_gradient_equals_ppo_within_the_bounds_and_reverses_beyond():
    gradient, plain = slope(bounded_ratio, Z, A, temperature=1e-9), slope(clip, Z, A)
    beyond = clip(Z, A, LOW, HIGH).clipped
    torch.testing.assert_close(gradient[~beyond], plain[~beyond])
    torch.testing.assert_close(gradient[beyond], (A * Z.exp())[beyond])  # opposite to the policy gradient
    assert bool((plain[beyond] == 0).all())


def test_controller_changes_a_surrogate_option_between_updates(decisions, shift):
    def make() -> Estimator:
        return Estimator(EstimatorConfig(surrogate="drift"), {"alpha": Anneal(2.0, 0.5, steps=3)})

    advantage, logp, estimator = decisions.require("reward"), decisions.logp_old + shift, make()
    for alpha in (2.0, 1.5, 1.0, 0.5, 0.5):
        fixed = EstimatorConfig(surrogate="drift", surrogate_options={"alpha": alpha})
        torch.testing.assert_close(
            estimator(decisions, advantage, logp)[0], Estimator(fixed)(decisions, advantage, logp)[0]
        )
        resumed = make()
        resumed.load_state_dict(estimator.state_dict())
        assert resumed.controllers["alpha"].value == pytest.approx(alpha)
        estimator.observe({})
    with pytest.raises(ValueError, match="Unknown controller 'alpha'"):
        Estimator(EstimatorConfig(), {"alpha": Anneal(2.0, 0.5, steps=3)})
