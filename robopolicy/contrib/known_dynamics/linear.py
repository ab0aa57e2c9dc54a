"""Linear dynamics with limits and convex costs, controlled by target states through a quadratic program.

The action is the target of the next state. A convex program finds the cheapest feasible controls near it, so the limits
hold for any action. Deviation from the target costs `penalty` per unit, and the multiplier of the target's constraint
is the derivative of the cost with respect to the target: TS-DDR (Rosemberg et al. 2024) trains on it
(`robopolicy.contrib.known_dynamics.ts_ddr`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics, Outcome
from robopolicy.contrib.known_dynamics.qp_layer import QuadraticProgram
from robopolicy.sim.contract import Observation

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """`x' = A x + B u + w` with n states x, m controls u and the disturbance w of the step.

    A step costs `u' R u / 2 + r' u + (x' - g)' Q (x' - g) / 2 + fixed`.
    """

    a: Array  # (n, n)
    b: Array  # (n, m)
    low: Array  # (n,) of the state
    high: Array  # (n,)
    control_low: Array  # (m,)
    control_high: Array  # (m,)
    control_cost: Array  # R (m, m), positive semidefinite
    control_price: Array  # r (m,)
    state_cost: Array  # Q (n, n), positive semidefinite
    goal: Array  # g (n,)
    fixed: float  # cost of a step that does not depend on the controls
    penalty: float  # cost per unit of distance between a state and its target

    def program(self, stages: int) -> QuadraticProgram:
        """Build the program of `stages` steps.

        Its variables are, for each step, the controls, the state reached, and the distances below and above its target:
        `(stages * (m + 3 n),)`. Its right-hand side `(stages * 2 n,)` contains, for each step, the change of the state
        that does not depend on the variables, and the target.
        """
        n, m = self.b.shape
        block, size = m + 3 * n, stages * (m + 3 * n)
        quadratic, linear = np.zeros((size, size)), np.zeros(size)
        equal = np.zeros((stages * 2 * n, size))
        below, bound = [], []
        for t in range(stages):
            u, x = slice(t * block, t * block + m), slice(t * block + m, t * block + m + n)
            short, over = slice(x.stop, x.stop + n), slice(x.stop + n, x.stop + 2 * n)
            moved, aimed = slice(2 * n * t, 2 * n * t + n), slice(2 * n * t + n, 2 * n * (t + 1))
            quadratic[u, u], quadratic[x, x] = self.control_cost, self.state_cost
            linear[u], linear[x] = self.control_price, -self.state_cost @ self.goal
            linear[short] = linear[over] = self.penalty
            equal[moved, x], equal[moved, u] = np.eye(n), -self.b
            if t:
                equal[moved, slice(x.start - block, x.stop - block)] = -self.a
            equal[aimed, x], equal[aimed, short], equal[aimed, over] = np.eye(n), np.eye(n), -np.eye(n)
            for part, low, high in ((u, self.control_low, self.control_high), (x, self.low, self.high)):
                rows = np.eye(size)[part]
                below += [rows, -rows]
                bound += [high, -low]
            below.append(-np.eye(size)[short.start : over.stop])
            bound.append(np.zeros(2 * n))
        return QuadraticProgram(quadratic, linear, equal, np.concatenate(below), np.concatenate(bound))


class LinearDynamics(DifferentiableDynamics):
    """A linear system as a task: the action is the target, the state is `(x, w of the next step, elapsed fraction)`.

    A subclass sets `spec`, whose action bounds lie within the limits of the state, and draws scenarios. The initial
    state contains the disturbance of the first step, row t of the noise the disturbance of step t + 1. The reward is
    the negative cost of the step, including the deviation from the target.
    """

    def __init__(self, system: LinearSystem) -> None:
        self.set_system(system)

    def set_system(self, system: LinearSystem) -> None:
        """Replace the system by another one of the same sizes, e.g. with another penalty."""
        self.system = system
        self._n = len(system.a)
        self._program = lru_cache(system.program)
        self._program(1)  # raises early if the solver is missing

    @abstractmethod
    def inflow(self, seed: int) -> tuple[Array, Array]:
        """Initial x `(n,)` and disturbances w `(T + 1, n)` of the episode `seed`; the last one is only observed."""

    def scenario(self, seed: int) -> tuple[Tensor, Tensor]:
        """Initial state `(2 n + 1,)` and the later disturbances `(T, n)`."""
        x, w = self.inflow(seed)
        first = np.concatenate([x, w[0], [0.0]])
        return torch.tensor(first, dtype=torch.float32), torch.tensor(w[1:], dtype=torch.float32)

    def observe(self, state: Tensor) -> Observation:
        """State x, the disturbance of the next step, and the elapsed fraction of the episode."""
        x, w, clock = state.split([self._n, self._n, 1], 1)
        return {"state": x, "disturbance": w, "clock": clock}

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> Outcome:
        """Solve for the controls closest to the target `action` `(B, n)`, and step."""
        x, w, _ = state.split([self._n, self._n, 1], 1)
        moved = x @ self._a(x).T + w
        optimum = self._program(1).solve(torch.cat([moved, action], 1))
        controls = self.system.b.shape[1]
        reached, missed = optimum.z[:, controls : controls + self._n], optimum.z[:, controls + self._n :].sum(1)
        cost, penalty = optimum.value + self._constant(), self.system.penalty * missed
        parts = {"reward.operation": penalty - cost, "reward.missed": -penalty}
        return Outcome(self._next(state, reached, noise), -cost, parts)

    def step_to_target(self, state: Tensor, action: Tensor, noise: Tensor) -> Outcome:
        """Next state if the target `action` `(B, n)` is met exactly, at no cost."""
        return Outcome(self._next(state, action, noise), torch.zeros_like(action[:, 0]))

    def plan(self, state: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        """Least cost `(B,)` of whole episodes near `targets` `(B, T, n)`; its gradient follows from duality.

        The controls may depend on all disturbances of the episode; only the targets may not.
        """
        stages = targets.shape[1]
        x, w, _ = state.split([self._n, self._n, 1], 1)
        moved = torch.cat([w[:, None], noise[:, : stages - 1]], 1)
        moved = torch.cat([moved[:, :1] + (x @ self._a(x).T)[:, None], moved[:, 1:]], 1)
        optimum = self._program(stages).solve(torch.cat([moved, targets], 2).flatten(1))
        return optimum.value + stages * self._constant()

    def _next(self, state: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([x, w, state[:, -1:] + 1 / self.spec.max_episode_steps], 1)

    def _a(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.system.a, dtype=like.dtype, device=like.device)

    def _constant(self) -> float:
        """Cost of a step outside the program."""
        return self.system.fixed + float(self.system.goal @ self.system.state_cost @ self.system.goal) / 2
