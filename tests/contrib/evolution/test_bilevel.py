"""Tests of implicit gradients against closed forms."""

from __future__ import annotations

import torch

from robopolicy.contrib.evolution.bilevel import conjugate_gradients, implicit_gradient


def test_conjugate_gradients_solve_a_linear_system() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(6), torch.randn(6, generator=generator, dtype=torch.float64)
    found = conjugate_gradients(lambda v: matrix @ v, right, 12)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-4, atol=1e-5)


def test_the_gradient_scales_with_a_small_upper_loss() -> None:
    """For lower loss `|p - v|^2 / 2` the policy equals v, so upper loss `c |p|^2 / 2` has gradient `c v`."""
    v = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    policy = v.detach().clone().requires_grad_()
    lower = (policy - v).square().sum() / 2
    (found,) = implicit_gradient(1e-6 * policy.square().sum() / 2, lower, [policy], [v], damping=0.0)
    torch.testing.assert_close(found, 1e-6 * v.detach(), rtol=1e-6, atol=0)
    nothing = conjugate_gradients(lambda x: x, torch.zeros(2), 5)
    assert nothing.tolist() == [0.0, 0.0]


def test_implicit_gradient_of_a_bandit_reward_equals_the_closed_form() -> None:
    """Lower: softmax policy with entropy bonus and optimum softmax(v / tau); upper: a preference loss."""
    tau, target = 0.5, torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    v = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64, requires_grad=True)
    logits = (v / tau).detach().requires_grad_()
    log = logits.log_softmax(0)
    lower = (log.exp() * (tau * log - v)).sum()
    upper = -(target * log).sum() + 0.1 * v.square().sum()
    (found,) = implicit_gradient(upper, lower, [logits], [v], damping=1e-9, steps=50)
    upper_at_optimum = -(target * (v / tau).log_softmax(0)).sum() + 0.1 * v.square().sum()
    (expected,) = torch.autograd.grad(upper_at_optimum, v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, 0.2 * v.detach(), atol=1e-2)  # the direct term alone differs
