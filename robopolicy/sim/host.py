"""Bookkeeping shared by the backends that live in numpy arrays of this process: seeds, step counts, action checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.seeds import SeedCounter

Arrays = dict[str, NDArray[Any]]
Flags = NDArray[np.bool_]
DIVERGED = "An action is NaN or infinite; the policy has diverged."


class HostSim(VectorSim):
    """Base of the CPU backends. `_obs` is empty until the first reset; its arrays are replaced, never written to."""

    def __init__(self, spec: SimSpec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self._low: NDArray[np.float64] = spec.action_low.double().numpy()
        self._high: NDArray[np.float64] = spec.action_high.double().numpy()
        self._seeds = SeedCounter(num_envs)
        self._steps: NDArray[np.int64] = np.zeros(num_envs, np.int64)
        self._obs: Arrays = {}

    @property
    def episode_seed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, seed of the episode now running."""
        return torch.from_numpy(self._seeds.current.copy())

    @property
    def episode_step(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, control steps taken in that episode."""
        return torch.from_numpy(self._steps.copy())

    def _end_diverged(
        self, moved: Flags, final: Arrays, reward: NDArray[np.float32], terminated: Flags, success: Flags
    ) -> Flags:
        """End the episodes `(N,)` of the rows that moved to something not finite, as `Step.info` tells; in place."""
        diverged = moved & ~(finite_rows(final, self.num_envs) & np.isfinite(reward))
        if diverged.any():
            fill(final, np.flatnonzero(diverged), {key: value[diverged] for key, value in self._obs.items()})
            reward[diverged], terminated[diverged], success[diverged] = 0.0, True, False
        return diverged

    def _played(self, action: Tensor) -> NDArray[np.float64]:
        """Check actions `(N, A)` and clip them to the bounds."""
        if not self._obs:
            raise UserError("Call reset before the first step.")
        check_action(action, self.num_envs, self.spec)
        played = action.detach().cpu().numpy().astype(np.float64, order="C")  # sums must not depend on strides
        if not np.isfinite(played).all():
            raise UserError(DIVERGED)
        return np.clip(played, self._low, self._high, out=played)


def check_action(action: Tensor, num_envs: int, spec: SimSpec) -> None:
    """Refuse actions that are not `(N, A)`."""
    expected = (num_envs, spec.action_dim)
    if tuple(action.shape) != expected:
        raise UserError(f"Expected actions of shape {expected}, got {tuple(action.shape)}.")


def check_number_of_envs(saved: int, here: int) -> None:
    """Refuse the state of a simulator with another number of environments."""
    if saved != here:
        raise UserError(
            f"The saved simulator has {saved} environments and this one {here}; resume with the same number."
        )


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Tensors that share the memory of `arrays`."""
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def copied(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Copy of every array."""
    return {key: value.copy() for key, value in arrays.items()}


def finite_rows(arrays: Mapping[str, NDArray[Any]], n: int) -> Flags:
    """Whether all numbers of a row are finite `(N,)`."""
    finite = np.ones(n, bool)
    for value in arrays.values():
        if value.dtype.kind == "f":
            finite &= np.isfinite(value).reshape(n, -1).all(1)
    return finite


def fill(arrays: Arrays, rows: int | NDArray[np.intp], values: Mapping[str, NDArray[Any]]) -> None:
    """Write `values` into `rows` of `arrays`."""
    for key, value in values.items():
        arrays[key][rows] = value
