"""Tests of quadratic-program layers: known optima, multipliers and sensitivities against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.contrib.known_dynamics.qp_layer import QuadraticProgram
from robopolicy.errors import UserError

pytest.importorskip("clarabel")

A = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, -1.0]])
P = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 3.0]])
Q = np.array([0.3, -1.0, 0.2])


def boxed(limit: float) -> QuadraticProgram:
    """A program of three variables with absolute values up to `limit`, and two equalities."""
    return QuadraticProgram(P, Q, A, np.vstack([np.eye(3), -np.eye(3)]), np.full(6, limit))


def test_without_binding_limits_the_solution_solves_the_kkt_equations() -> None:
    b = torch.tensor([[1.0, -2.0], [0.5, 0.25]], dtype=torch.float64)
    found = boxed(100.0).solve(b)
    conditions = np.block([[P, A.T], [A, np.zeros((2, 2))]])
    for row, right in enumerate(b.numpy()):
        exact = np.linalg.solve(conditions, np.concatenate([-Q, right]))
        np.testing.assert_allclose(found.z[row].numpy(), exact[:3], atol=1e-6)
        np.testing.assert_allclose(found.price[row].numpy(), -exact[3:], atol=1e-6)


def slopes(function, b: Tensor, step: float = 1e-4) -> Tensor:
    """Central differences of `function` `(1, m) -> scalar` at `b` `(1, m)`."""
    moves = step * torch.eye(b.shape[1], dtype=b.dtype)
    return torch.stack([(function(b + move) - function(b - move)) / (2 * step) for move in moves])[None]


@pytest.mark.parametrize(("limit", "binding"), [(10.0, 0), (0.85, 1)])
def test_multipliers_equal_the_value_gradient_with_and_without_binding_limits(limit: float, binding: int) -> None:
    program = boxed(limit)
    b = torch.tensor([[1.2, -0.4]], dtype=torch.float64, requires_grad=True)
    found = program.solve(b)
    assert int((found.z.abs() > limit - 1e-6).sum()) == binding
    found.value.sum().backward()
    torch.testing.assert_close(b.grad, found.price)
    measured = slopes(lambda moved: program.solve(moved).value[0], b.detach())
    torch.testing.assert_close(b.grad, measured, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [10.0, 0.85])
def test_solution_gradient_equals_finite_differences_with_and_without_binding_limits(limit: float) -> None:
    program, weight = boxed(limit), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    b = torch.tensor([[1.2, -0.4]], dtype=torch.float64, requires_grad=True)
    (program.solve(b).z @ weight).sum().backward()
    measured = slopes(lambda moved: (program.solve(moved).z @ weight)[0], b.detach())
    torch.testing.assert_close(b.grad, measured, atol=1e-3, rtol=1e-3)


def test_rows_do_not_depend_on_their_batch() -> None:
    b = torch.tensor([[1.2, -0.4], [0.1, 0.2], [-0.5, 0.6]])
    together, alone = boxed(0.9).solve(b), [boxed(0.9).solve(row[None]) for row in b]
    assert torch.equal(together.value, torch.cat([one.value for one in alone]))
    assert torch.equal(together.z, torch.cat([one.z for one in alone])) and together.z.dtype == b.dtype


def test_an_infeasible_program_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="no solution") as refused:
        boxed(0.9).solve(torch.tensor([[5.0, 0.0]]))
    assert len(str(refused.value).splitlines()) == 1
