"""Checks for every surrogate on a grid of log-ratios in float64."""

import torch

from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.surrogates import SURROGATES

LOW, HIGH = 0.8, 1.2
GRID = torch.tensor([-3.0, -0.5, -0.1, 0.05, 0.1, 0.5, 3.0], dtype=torch.float64)  # log-ratios away from the kinks
Z = GRID.repeat(2).unsqueeze(0)
A = torch.tensor([2.0, -1.5], dtype=torch.float64).repeat_interleave(len(GRID)).unsqueeze(0)


def slope(surrogate, z: torch.Tensor, a: torch.Tensor, **options: float) -> torch.Tensor:
    """Gradient of each loss with respect to its log-ratio."""
    leaf = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(leaf, a, LOW, HIGH, **options).loss.sum(), leaf)
    return gradient


def check_finite_differences(name: str) -> None:
    """The gradient equals the finite difference of the value; not for straight-through surrogates."""
    step = 1e-6
    forward, backward = (SURROGATES[name](Z + s, A, LOW, HIGH).loss for s in (step, -step))
    torch.testing.assert_close(slope(SURROGATES[name], Z, A), (forward - backward) / (2 * step), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda z: SURROGATES[name](z, A, LOW, HIGH).loss, Z.clone().requires_grad_())


def check_straight_through(name: str) -> None:
    """The gradient of a straight-through surrogate differs from the finite difference of the value."""
    step = 1e-6
    forward, backward = (SURROGATES[name](Z + s, A, LOW, HIGH).loss for s in (step, -step))
    assert not torch.allclose(slope(SURROGATES[name], Z, A), (forward - backward) / (2 * step), atol=1e-4)


def check_ratio_one(name: str) -> None:
    """At ratio one the gradient is minus the advantage."""
    torch.testing.assert_close(slope(SURROGATES[name], torch.zeros_like(Z), A), -A)


def check_broadcast(name: str, decisions, shift) -> None:
    """Advantages per row broadcast to decisions, in both layouts."""
    row = torch.randn(len(decisions), 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    spread = SURROGATES[name](shift, row.expand(decisions.shape), LOW, HIGH)
    torch.testing.assert_close(SURROGATES[name](shift, row, LOW, HIGH).loss, spread.loss)
    assert spread.loss.shape == spread.clipped.shape == decisions.shape


def gradient_of(estimator: Estimator, decisions, advantage: torch.Tensor, logp: torch.Tensor):
    """Gradient of the loss with respect to the log-probabilities, and the diagnostics."""
    leaf = logp.clone().requires_grad_()
    loss, info = estimator(decisions, advantage, leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient, info


def check_fresh_data(name: str, decisions) -> None:
    """At ratio 1 the gradient is -mean(A grad logp), and KL and clip fraction are 0."""
    advantage, valid = decisions.require("reward"), decisions.valid()
    gradient, info = gradient_of(Estimator(EstimatorConfig(surrogate=name)), decisions, advantage, decisions.logp_old)
    torch.testing.assert_close(gradient, -(advantage * valid) / valid.sum())
    assert info["approx_kl"] == info["clip_fraction"] == info["ratio_max"] == 0
    assert info["ratio_mean"] == 1


def check_extreme_ratios(name: str, decisions) -> None:
    """Gradient and diagnostics are finite at extreme ratios."""
    for change in (-1e4, 1e4):
        estimator = Estimator(EstimatorConfig(surrogate=name))
        gradient, info = gradient_of(estimator, decisions, decisions.require("reward"), decisions.logp_old + change)
        assert bool(gradient.isfinite().all())
        assert all(bool(value.isfinite()) for value in info.values())
