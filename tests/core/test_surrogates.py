"""Value and gradient of each surrogate, tested apart, in float64."""

import pytest
import torch

from robopolicy.contrib.control.surrogates import discovered_drift, drift, target_ratio
from robopolicy.contrib.text_catalogue.surrogates import preserve
from robopolicy.contrib.text_diffusion.parts import linear_bound
from robopolicy.core.surrogates import (
    SURROGATES,
    aspo,
    best_ratio,
    clip,
    dual_clip,
    importance,
    nft,
    nft_scaled,
    soft_gate,
    stopgrad,
)

LOW, HIGH = 0.8, 1.2
STRAIGHT_THROUGH = {"preserve", "stopgrad", "nft", "nft_scaled"}
SMOOTH = sorted(set(SURROGATES) - STRAIGHT_THROUGH)
GRID = torch.tensor([-3.0, -0.5, -0.1, 0.05, 0.1, 0.5, 3.0], dtype=torch.float64)  # log-ratios away from the kinks
Z = GRID.repeat(2).unsqueeze(0)
A = torch.tensor([2.0, -1.5], dtype=torch.float64).repeat_interleave(len(GRID)).unsqueeze(0)


def closed_form(name: str, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratio = z.exp()
    clipped = -torch.minimum(a * ratio, a * ratio.clamp(LOW, HIGH))
    penalised = -(a * ratio - a.abs() / (2 * (1 - LOW)) * (ratio - 1) ** 2)
    tau = torch.where(a < 0, 1.05, 1.0)
    dual = torch.where(a < 0, torch.minimum(clipped, -3.0 * a), clipped)

    gain = torch.where(a < 0, a * z, a * (ratio - 1))
    width = torch.where(a < 0, 0.6, 2.0)
    away = (gain - width * (gain / width).tanh()).clamp(min=0)

    def negative_aware(success: torch.Tensor) -> torch.Tensor:
        q = success.clamp(0.02, 0.98)
        left = ((1 - q * ratio) / (1 - q)).clamp(min=1.0)
        return torch.where(a < 0, a * (1 - q) / q * left.log(), -a * z)

    return {
        "pg": -a * z,
        "is": -a * ratio,
        "clip": clipped,
        "dual_clip": dual,
        "aspo": torch.where(a < 0, penalised, clipped),
        "mirror": -a * ratio + ratio * z - ratio + 1,
        "drift": -a * ratio + away,
        "preserve": dual,
        "stopgrad": -a * ratio.clamp(LOW, HIGH) * z,
        "soft_gate": -a * 4 / tau * torch.sigmoid(tau * (ratio - 1)),
        "target_ratio": a.abs() * (ratio - torch.where(a > 0, HIGH, LOW)).abs(),
        "nft": negative_aware(-a),
        "nft_scaled": negative_aware(a**2 / (1 + a**2)),
        "linear_bound": torch.where(a < 0, -a * ratio, -a * (1 + z)),
    }[name]


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_value(name):
    torch.testing.assert_close(SURROGATES[name](Z, A, LOW, HIGH).loss, closed_form(name, Z, A))


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_equals_finite_differences(name):
    z = Z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(SURROGATES[name](z, A, LOW, HIGH).loss.sum(), z)
    step = 1e-6
    forward, backward = (SURROGATES[name](Z + s, A, LOW, HIGH).loss for s in (step, -step))
    torch.testing.assert_close(gradient, (forward - backward) / (2 * step), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda z: SURROGATES[name](z, A, LOW, HIGH).loss, z)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_gradient_at_ratio_one_is_minus_the_advantage(name):
    z = torch.zeros_like(Z, requires_grad=True)
    (gradient,) = torch.autograd.grad(SURROGATES[name](z, A, LOW, HIGH).loss.sum(), z)
    torch.testing.assert_close(gradient, -A)


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
    assert gradient[0, 2].item() == pytest.approx(0.0, abs=1e-12)  # the minimum lies at the lower bound
    assert bool((gradient[0, :2] < 0).all()) and bool((gradient[0, 3:] > 0).all())
    assert torch.equal(aspo(z, torch.full_like(z, -1.5), LOW, HIGH).clipped[0, :2], torch.tensor([True, True]))


def test_bounds_may_differ_per_decision():
    low, high = torch.full_like(Z, LOW), torch.full_like(Z, HIGH)
    torch.testing.assert_close(clip(Z, A, low, high).loss, clip(Z, A, LOW, HIGH).loss)
    torch.testing.assert_close(clip(Z, A, LOW, high).loss, clip(Z, A, LOW, HIGH).loss)
    torch.testing.assert_close(aspo(Z, A, low, high).loss, aspo(Z, A, LOW, HIGH).loss)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_both_layouts_and_row_advantages_broadcast(decisions, shift, name):
    row = torch.randn(len(decisions), 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    spread = SURROGATES[name](shift, row.expand(decisions.shape), LOW, HIGH)
    torch.testing.assert_close(SURROGATES[name](shift, row, LOW, HIGH).loss, spread.loss)
    assert spread.loss.shape == spread.clipped.shape == decisions.shape


def slope(surrogate, z: torch.Tensor, a: torch.Tensor, **options: float) -> torch.Tensor:
    """Gradient of each loss in its own log-ratio."""
    leaf = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(leaf, a, LOW, HIGH, **options).loss.sum(), leaf)
    return gradient


def test_a_drift_is_never_negative_and_flat_where_nothing_is_gained():
    cost = discovered_drift(Z, A)
    gained = A * Z > 0
    assert bool((cost[gained] > 0).all()) and bool((cost[~gained] == 0).all())
    z = torch.zeros_like(Z, requires_grad=True)
    cost = discovered_drift(z, A)
    assert bool((cost == 0).all()) and bool((torch.autograd.grad(cost.sum(), z)[0] == 0).all())


def test_the_gradient_of_a_drift_is_the_one_written_out():
    z = Z.clone().requires_grad_()
    (actual,) = torch.autograd.grad(discovered_drift(z, A, 1.5, 0.4).sum(), z)
    up = A * Z.exp() * (A * (Z.exp() - 1) / 1.5).tanh().square()  # d relu(u - w tanh(u / w)) = tanh(u / w)^2 du
    down = A * (A * Z / 0.4).tanh().square()
    torch.testing.assert_close(actual, torch.where(A * Z > 0, torch.where(A > 0, up, down), 0.0))


def test_narrow_widths_take_back_all_gain_and_wide_ones_none():
    free = importance(Z, A, LOW, HIGH).loss
    torch.testing.assert_close(drift(Z, A, LOW, HIGH, alpha=1e6, beta=1e6).loss, free)
    gain = torch.where(A > 0, A * torch.expm1(Z), A * Z).clamp(min=0)
    torch.testing.assert_close(drift(Z, A, LOW, HIGH, alpha=1e-9, beta=1e-9).loss, free + gain)


def test_widths_of_a_drift_are_units_of_the_advantage():
    scaled = discovered_drift(Z, A, 0.3 * 2.0, 0.3 * 0.6)
    torch.testing.assert_close(scaled, 0.3 * discovered_drift(Z, A / 0.3))


def test_a_drift_turns_a_decision_back_where_it_says_so():
    turned = drift(Z, A, LOW, HIGH, beta=0.1).clipped
    back = A * slope(drift, Z, A, beta=0.1) > 0  # the loss falls against the advantage
    assert torch.equal(turned, back) and bool(turned.any()) and not bool(turned[A > 0].any())


def test_the_clip_is_a_drift_too():
    cost = clip(Z, A, LOW, HIGH).loss - importance(Z, A, LOW, HIGH).loss
    outside = clip(Z, A, LOW, HIGH).clipped
    assert bool((cost[outside] > 0).all()) and bool((cost[~outside] == 0).all())


def test_straight_through_surrogates_really_differ_from_their_values():
    step = 1e-6
    for name in STRAIGHT_THROUGH:
        forward, backward = (SURROGATES[name](Z + s, A, LOW, HIGH).loss for s in (step, -step))
        assert not torch.allclose(slope(SURROGATES[name], Z, A), (forward - backward) / (2 * step), atol=1e-4), name


def test_preserve_keeps_the_gradient_of_the_bound_beyond_it_and_that_of_ppo_within():
    gradient, plain = slope(preserve, Z, A), slope(dual_clip, Z, A)
    beyond = clip(Z, A, LOW, HIGH).clipped
    assert torch.equal(gradient[~beyond], plain[~beyond])
    bound = torch.where(A > 0, HIGH, LOW).to(A)
    torch.testing.assert_close(gradient[beyond], (-A * bound)[beyond])
    assert torch.equal(slope(preserve, Z, A, low_gain=0.0, high_gain=0.0), plain)
    torch.testing.assert_close(slope(preserve, Z, A, low_gain=0.5)[beyond & (A < 0)], 0.5 * gradient[beyond & (A < 0)])


def test_stopgrad_pushes_every_decision_with_its_clamped_ratio():
    torch.testing.assert_close(slope(stopgrad, Z, A), -A * Z.exp().clamp(LOW, HIGH))


def test_soft_gate_fades_smoothly_on_both_sides():
    force = slope(soft_gate, Z, A) / (-A * Z.exp())  # derivative by the ratio
    assert bool((force <= 1.0).all()) and bool((force > 0.0).all())
    sharp = slope(soft_gate, Z, A, up=50.0, down=50.0) / (-A * Z.exp())
    assert sharp[Z.abs() >= 0.5].max().item() < 1e-3


def test_target_ratio_in_the_limit_is_ppo_within_the_bounds_and_pulls_back_beyond():
    gradient, plain = slope(target_ratio, Z, A, temperature=1e-9), slope(clip, Z, A)
    beyond = clip(Z, A, LOW, HIGH).clipped
    torch.testing.assert_close(gradient[~beyond], plain[~beyond])
    torch.testing.assert_close(gradient[beyond], (A * Z.exp())[beyond])  # the opposite of the push
    assert bool((plain[beyond] == 0).all())


def test_best_ratio_is_the_middle_of_the_bounds_where_nothing_is_better():
    assert best_ratio(torch.zeros(1), 0.7, 1.5, 1e-4).item() == pytest.approx(1.1)


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_nft_is_the_negative_aware_loss_of_the_paper_in_both_scalings(p):
    """-log ratio on successes, -log of what is left of the old policy on failures; times 1 - p or sqrt((1 - p) / p)."""
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


def test_nft_leaves_tied_groups_alone():
    zero = torch.zeros_like(Z)
    assert bool((slope(nft, Z, zero) == 0).all()) and bool((slope(nft_scaled, Z, zero) == 0).all())


def test_linear_bound_lies_below_the_objective_of_an_averaged_log_likelihood():
    """Rows are decisions, columns samples of their log-likelihood; equality and equal gradients where nothing moved."""
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
