"""Tests of the value and gradient of each surrogate, in float64."""

import pytest
import torch
from surrogate_rules import (
    HIGH,
    LOW,
    A,
    Z,
    check_broadcast,
    check_finite_differences,
    check_ratio_one,
    check_straight_through,
    slope,
)

from robopolicy.core.surrogates import (
    SURROGATES,
    aspo,
    best_ratio,
    cispo,
    clip,
    dual_clip,
    importance_sampling,
    nft,
    nft_scaled,
    soft_gate,
)

STRAIGHT_THROUGH = ["nft", "nft_scaled", "cispo"]


def closed_form(name: str, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratio = z.exp()
    clipped = -torch.minimum(a * ratio, a * ratio.clamp(LOW, HIGH))
    penalised = -(a * ratio - a.abs() / (2 * (1 - LOW)) * (ratio - 1) ** 2)
    tau = torch.where(a < 0, 1.05, 1.0)
    dual = torch.where(a < 0, torch.minimum(clipped, -3.0 * a), clipped)

    def negative_aware(success: torch.Tensor) -> torch.Tensor:
        q = success.clamp(0.02, 0.98)
        left = ((1 - q * ratio) / (1 - q)).clamp(min=1.0)
        return torch.where(a < 0, a * (1 - q) / q * left.log(), -a * z)

    return {
        "policy_gradient": -a * z,
        "importance_sampling": -a * ratio,
        "clip": clipped,
        "dual_clip": dual,
        "aspo": torch.where(a < 0, penalised, clipped),
        "mirror": -a * ratio + ratio * z - ratio + 1,
        "cispo": -a * ratio.clamp(LOW, HIGH) * z,
        "soft_gate": -a * 4 / tau * torch.sigmoid(tau * (ratio - 1)),
        "nft": negative_aware(-a),
        "nft_scaled": negative_aware(a**2 / (1 + a**2)),
    }[name]


@pytest.mark.parametrize("name", SURROGATES.product())
def test_value_equals_the_closed_form(name):
    torch.testing.assert_close(SURROGATES[name](Z, A, LOW, HIGH).loss, closed_form(name, Z, A))


@pytest.mark.parametrize("name", sorted(set(SURROGATES.product()) - {*STRAIGHT_THROUGH}))
def test_gradient_equals_finite_differences(name):
    check_finite_differences(name)


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_straight_through_gradients_differ_from_the_gradients_of_the_values(name):
    check_straight_through(name)


@pytest.mark.parametrize("name", SURROGATES.product())
def test_gradient_at_ratio_one_is_minus_the_advantage(name):
    check_ratio_one(name)


@pytest.mark.parametrize("name", SURROGATES.product())
def test_both_layouts_and_row_advantages_broadcast(decisions, shift, name):
    check_broadcast(name, decisions, shift)


@pytest.mark.parametrize("name", ["clip", "dual_clip"])
def test_clipped_marks_where_the_gradient_is_cut(name):
    z = Z.clone().requires_grad_()
    out = SURROGATES[name](z, A, LOW, HIGH)
    (gradient,) = torch.autograd.grad(out.loss.sum(), z)
    assert torch.equal(out.clipped, gradient == 0)
    assert bool(out.clipped.any()) and not bool(out.clipped.all())


def test_dual_clip_differs_from_clip_only_at_negative_advantage_and_high_ratio():
    differs = dual_clip(Z, A, LOW, HIGH).loss != clip(Z, A, LOW, HIGH).loss
    assert torch.equal(differs, (A < 0) & (Z.exp() > 3.0))


def test_aspo_is_the_clip_at_positive_advantage_and_a_parabola_at_negative():
    out, plain = aspo(Z, A, LOW, HIGH), clip(Z, A, LOW, HIGH)
    positive = A > 0
    assert torch.equal(out.loss[positive], plain.loss[positive])
    assert torch.equal(out.clipped[positive], plain.clipped[positive])
    z = torch.tensor([[-0.5, -0.3, LOW, -0.1, 0.5]], dtype=torch.float64)
    z[0, 2] = z[0, 2].log()
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(aspo(z, torch.full_like(z, -1.5), LOW, HIGH).loss.sum(), z)
    assert gradient[0, 2].item() == pytest.approx(0.0, abs=1e-12)  # the minimum is at the lower bound
    assert bool((gradient[0, :2] < 0).all()) and bool((gradient[0, 3:] > 0).all())
    assert torch.equal(aspo(z, torch.full_like(z, -1.5), LOW, HIGH).clipped[0, :2], torch.tensor([True, True]))


def test_bounds_may_differ_per_decision():
    low, high = torch.full_like(Z, LOW), torch.full_like(Z, HIGH)
    torch.testing.assert_close(clip(Z, A, low, high).loss, clip(Z, A, LOW, HIGH).loss)
    torch.testing.assert_close(clip(Z, A, LOW, high).loss, clip(Z, A, LOW, HIGH).loss)
    torch.testing.assert_close(aspo(Z, A, low, high).loss, aspo(Z, A, LOW, HIGH).loss)


def test_clip_adds_a_positive_cost_only_outside_the_bounds():
    cost = clip(Z, A, LOW, HIGH).loss - importance_sampling(Z, A, LOW, HIGH).loss
    outside = clip(Z, A, LOW, HIGH).clipped
    assert bool((cost[outside] > 0).all()) and bool((cost[~outside] == 0).all())


def test_cispo_weighs_every_decision_with_its_clamped_ratio():
    torch.testing.assert_close(slope(cispo, Z, A), -A * Z.exp().clamp(LOW, HIGH))


def test_soft_gate_gradient_decays_on_both_sides():
    force = slope(soft_gate, Z, A) / (-A * Z.exp())  # derivative with respect to the ratio
    assert bool((force <= 1.0).all()) and bool((force > 0.0).all())
    sharp = slope(soft_gate, Z, A, up=50.0, down=50.0) / (-A * Z.exp())
    assert sharp[Z.abs() >= 0.5].max().item() < 1e-3


def test_best_ratio_is_the_middle_of_the_bounds_at_zero_advantage():
    assert best_ratio(torch.zeros(1), 0.7, 1.5, 1e-4).item() == pytest.approx(1.1)


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_nft_surrogates_equal_the_negative_aware_loss_in_both_scalings(p):
    """-log ratio on successes, -log of the remaining old policy on failures; times 1 - p or sqrt((1 - p) / p)."""
    z = torch.tensor([[0.3, -0.4, 0.2, -0.2]], dtype=torch.float64)
    reward = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    left = (1 - p * leaf.exp()) / (1 - p)
    held = left + (left.clamp(min=1.0) - left).detach()
    written = -torch.where(reward > 0, leaf, held.log())
    (gradient,) = torch.autograd.grad(written.sum(), leaf)
    for surrogate, scale, factor in ((nft, 1.0, 1 - p), (nft_scaled, (p * (1 - p)) ** 0.5, ((1 - p) / p) ** 0.5)):
        a = (reward - p) / scale
        torch.testing.assert_close(surrogate(z, a, LOW, HIGH).loss, factor * written.detach())
        torch.testing.assert_close(slope(surrogate, z, a), factor * gradient)


def test_nft_has_no_gradient_at_zero_advantage():
    zero = torch.zeros_like(Z)
    assert bool((slope(nft, Z, zero) == 0).all()) and bool((slope(nft_scaled, Z, zero) == 0).all())
