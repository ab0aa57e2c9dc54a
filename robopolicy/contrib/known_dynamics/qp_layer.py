"""Convex quadratic program as a layer, differentiable in its right-hand side.

The gradient of the value is the multiplier of the constraint (envelope theorem), which the solver returns. The gradient
of the solution follows from the optimality conditions of the active constraints. The solver is Clarabel (interior
point), row by row, in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require

_SOLVED = ("Solved", "AlmostSolved")


@dataclass(frozen=True)
class Optimum:
    """Solutions of B programs."""

    z: Tensor  # (B, n) the minimiser
    value: Tensor  # (B,) the minimum
    price: Tensor  # (B, m) gradient of `value` in the right-hand side: the negative multipliers of the equalities


class QuadraticProgram:
    """min `z' P z / 2 + q' z` subject to `A z = b` and `G z <= h`, to be solved for many `b`.

    Args:
        quadratic: P `(n, n)`, positive semidefinite.
        linear: q `(n,)`.
        equal: A `(m, n)`.
        below: G `(k, n)`.
        bound: h `(k,)`, finite.
    """

    def __init__(
        self, quadratic: ArrayLike, linear: ArrayLike, equal: ArrayLike, below: ArrayLike, bound: ArrayLike
    ) -> None:
        clarabel, sparse = require("clarabel", "known-dynamics"), require("scipy.sparse", "known-dynamics")
        self._p, self._q, self._a, self._g, self._h = (
            np.asarray(value, np.float64) for value in (quadratic, linear, equal, below, bound)
        )
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.presolve_enable = False  # presolve could drop rows, after which the right-hand side cannot be replaced
        cones = [clarabel.ZeroConeT(len(self._a)), clarabel.NonnegativeConeT(len(self._g))]
        rows = sparse.csc_matrix(np.vstack([self._a, self._g]))
        start = np.concatenate([np.zeros(len(self._a)), self._h])
        upper = sparse.csc_matrix(np.triu(self._p))
        self._solver: Any = clarabel.DefaultSolver(upper, self._q, rows, start, cones, settings)

    def solve(self, b: Tensor) -> Optimum:
        """Solve for every row of `b` `(B, m)`; `z` and `value` are differentiable in `b`.

        Raises:
            UserError: A row has no solution.
        """
        z, value, price = _Solve.apply(b, self)  # type: ignore[misc]
        return Optimum(z, value, price)

    def solve_row(self, b: NDArray[np.float64]) -> tuple[NDArray[np.float64], float, NDArray[np.float64]]:
        """Solution `(n,)`, value and multipliers `(m + k,)` for one `b` `(m,)`."""
        self._solver.update(b=np.concatenate([b, self._h]))
        found = self._solver.solve()
        if str(found.status) not in _SOLVED:
            raise UserError(f"A quadratic program has no solution ({found.status}); check the limits of the task.")
        return np.asarray(found.x), float(found.obj_val), np.asarray(found.z)

    def sensitivity(
        self, z: NDArray[np.float64], multipliers: NDArray[np.float64], weight: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Gradient `(m,)` of `weight' z` in `b`, for a solution `z` `(n,)` and `weight` `(n,)`.

        Inequalities are active where their multiplier exceeds their slack. For a degenerate solution this is the
        least-squares choice among its one-sided derivatives.
        """
        equal = len(self._a)
        active = multipliers[equal:] > self._h - self._g @ z
        rows = np.vstack([self._a, self._g[active]])
        corner = np.zeros((len(rows), len(rows)))
        conditions = np.block([[self._p, rows.T], [rows, corner]])  # symmetric
        right = np.concatenate([weight, np.zeros(len(rows))])
        found = np.linalg.lstsq(conditions, right, rcond=1e-10)[0]
        return np.asarray(found[len(z) : len(z) + equal], np.float64)


class _Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor, program: QuadraticProgram) -> tuple[Tensor, Tensor, Tensor]:
        found = [program.solve_row(row) for row in b.detach().cpu().double().numpy()]
        points, values, multipliers = (np.stack(part) for part in zip(*found, strict=True))
        ctx.program, ctx.points, ctx.multipliers = program, points, multipliers
        ctx.set_materialize_grads(False)
        price = torch.from_numpy(-multipliers[:, : b.shape[1]]).to(b)
        ctx.save_for_backward(price)
        ctx.mark_non_differentiable(price)
        return torch.from_numpy(points).to(b), torch.from_numpy(values).to(b), price

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        to_z, to_value = grads[:2]
        (price,) = ctx.saved_tensors
        total = torch.zeros_like(price)
        if to_value is not None:
            total = total + to_value[:, None] * price
        if to_z is not None:
            weights = to_z.cpu().double().numpy()
            rows = zip(ctx.points, ctx.multipliers, weights, strict=True)
            total = total + torch.from_numpy(np.stack([ctx.program.sensitivity(*row) for row in rows])).to(total)
        return total, None
