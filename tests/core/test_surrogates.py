"""Value and gradient of each surrogate, tested apart, in float64."""

import pytest
import torch

from robopolicy.core.surrogates import SURROGATES, aspo, clip, dual_clip

LOW, HIGH = 0.8, 1.2
GRID = torch.tensor([-3.0, -0.5, -0.1, 0.05, 0.1, 0.5, 3.0], dtype=torch.float64)  # log-ratios away from the kinks
Z = GRID.repeat(2).unsqueeze(0)
A = torch.tensor([2.0, -1.5], dtype=torch.float64).repeat_interleave(len(GRID)).unsqueeze(0)


def closed_form(name: str, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    ratio = z.exp()
    clipped = -torch.minimum(a * ratio, a * ratio.clamp(LOW, HIGH))
    penalised = -(a * ratio - a.abs() / (2 * (1 - LOW)) * (ratio - 1) ** 2)
    return {
        "pg": -a * z,
        "is": -a * ratio,
        "clip": clipped,
        "dual_clip": torch.where(a < 0, torch.minimum(clipped, -3.0 * a), clipped),
        "aspo": torch.where(a < 0, penalised, clipped),
        "mirror": -a * ratio + ratio * z - ratio + 1,
    }[name]


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_value(name):
    torch.testing.assert_close(SURROGATES[name](Z, A, LOW, HIGH).loss, closed_form(name, Z, A))


@pytest.mark.parametrize("name", sorted(SURROGATES))
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
