"""Base classes of CPU simulators in numpy and torch: seeds, step counts, action checks."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.device import usable_device
from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step, VectorSim


def legacy_numpy_seed(seed: int) -> int | list[int]:
    """Seed for `RandomState` and `numpy.random.seed`: a list of 32-bit words for larger seeds."""
    return seed if seed < 2**32 else [seed % 2**32, seed >> 32]


class SeedCounter:
    """Episode seeds: `seed + i` at a reset, then the next unused integer in order of environment index."""

    def __init__(self, num_envs: int) -> None:
        self.current: NDArray[np.int64] = np.zeros(num_envs, np.int64)  # (N,) seed of the current episode
        self._first: list[int] | None = None  # seeds of a pending reset
        self._next = 0

    def reset(self, seed: int | Sequence[int]) -> None:
        """Set the seeds that the next `take` of all rows returns."""
        count = len(self.current)
        seeds = [int(seed) + i for i in range(count)] if isinstance(seed, int | np.integer) else [int(s) for s in seed]
        if len(seeds) != count:
            raise UserError(f"Expected one seed or {count} seeds, one per environment, got {len(seeds)}.")
        if min(seeds) < 0:
            raise UserError(f"Seeds must be 0 or larger, got {min(seeds)}.")
        self._first = seeds
        self._next = max(seeds) + 1

    def take(self, rows: NDArray[np.intp]) -> list[int]:
        """Return the seeds of the episodes that start now in `rows` (ascending)."""
        seeds = self._first
        if seeds is None:
            seeds = list(range(self._next, self._next + len(rows)))
            self._next += len(rows)
        self._first = None
        self.current[rows] = seeds
        return seeds

    def state_dict(self) -> dict[str, Any]:
        """Current seeds and the next unused seed."""
        return {"current": torch.from_numpy(self.current.copy()), "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        current = state["current"].numpy()
        if current.shape != self.current.shape:
            raise UserError(f"Expected the state of {len(self.current)} environments, got the state of {len(current)}.")
        self.current[:] = current
        self._next = int(state["next"])


Arrays = dict[str, NDArray[Any]]
Flags = NDArray[np.bool_]
DIVERGED = "An action is NaN or infinite; the policy has diverged."


class NumpyVectorEnv(VectorSim):
    """Base of the CPU backends. `_obs` is empty until the first reset; its arrays are replaced, never modified."""

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
        """(N,) int64, seed of the current episode."""
        return torch.from_numpy(self._seeds.current.copy())

    @property
    def episode_step(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, control steps in the current episode."""
        return torch.from_numpy(self._steps.copy())

    def _end_diverged(
        self, moved: Flags, final: Arrays, reward: NDArray[np.float32], terminated: Flags, success: Flags
    ) -> Flags:
        """Terminate the episodes of moved rows with non-finite values in place; return their mask `(N,)`."""
        diverged = moved & ~(finite_rows(final, self.num_envs) & np.isfinite(reward))
        if diverged.any():
            fill(final, np.flatnonzero(diverged), {key: value[diverged] for key, value in self._obs.items()})
            reward[diverged], terminated[diverged], success[diverged] = 0.0, True, False
        return diverged

    def _clipped(self, action: Tensor) -> NDArray[np.float64]:
        """Check actions `(N, A)` and clip them to the bounds."""
        if not self._obs:
            raise UserError("Call reset before the first step.")
        check_action(action, self.num_envs, self.spec)
        clipped = action.detach().cpu().numpy().astype(np.float64, order="C")  # sums must not depend on strides
        if not np.isfinite(clipped).all():
            raise UserError(DIVERGED)
        return np.clip(clipped, self._low, self._high, out=clipped)

    def _result(
        self, reward: NDArray[np.float32], terminated: Flags, truncated: Flags, final: Arrays, info: dict[str, Tensor]
    ) -> Step:
        """Convert the results of a step to tensors; `_obs` must contain the observation to act on next."""
        flags = torch.from_numpy(terminated), torch.from_numpy(truncated)
        return Step(tensors(self._obs), torch.from_numpy(reward), *flags, tensors(final), info)


def check_action(action: Tensor, num_envs: int, spec: SimSpec) -> None:
    """Raise a `UserError` if `action` is not `(N, A)`."""
    expected = (num_envs, spec.action_dim)
    if tuple(action.shape) != expected:
        raise UserError(f"Expected actions of shape {expected}, got {tuple(action.shape)}.")


def check_number_of_envs(saved: int, here: int) -> None:
    """Raise a `UserError` if a saved state has another number of environments."""
    if saved != here:
        raise UserError(
            f"The saved simulator has {saved} environments and this one {here}; resume with the same number."
        )


def core_count() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Tensors that share the memory of `arrays`."""
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def copied(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """Copy of every array."""
    return {key: value.copy() for key, value in arrays.items()}


def finite_rows(arrays: Mapping[str, NDArray[Any]], n: int) -> Flags:
    """Mask `(N,)` of rows whose numbers are all finite."""
    finite = np.ones(n, bool)
    for value in arrays.values():
        if value.dtype.kind == "f":
            finite &= np.isfinite(value).reshape(n, -1).all(1)
    return finite


def fill(arrays: Arrays, rows: int | NDArray[np.intp], values: Mapping[str, NDArray[Any]]) -> None:
    """Write `values` into `rows` of `arrays`."""
    for key, value in values.items():
        arrays[key][rows] = value


class TorchVectorEnv(VectorSim):
    """Base of simulators in torch on one device; subclasses define `start_episodes`, `observe` and `step`.

    A step of a subclass that calls `restart` once, and uploads by `replaced` alone, waits for the device once.
    """

    def __init__(self, spec: SimSpec, num_envs: int, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.episode_step = torch.zeros(num_envs, dtype=torch.int64, device=usable_device(device))
        self.device = self.episode_step.device  # "cuda" becomes "cuda:0"
        self._low, self._high = spec.action_low.to(self.device), spec.action_high.to(self.device)
        self._finite = torch.ones(1, dtype=torch.bool, device=self.device)  # (1,) of the last actions
        self._seeds = SeedCounter(num_envs)

    @abstractmethod
    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Start the episodes `seeds` in `rows` `(R,)`, ascending, on the CPU, without modifying returned tensors."""

    @abstractmethod
    def observe(self) -> Observation:
        """Current observations of all environments."""

    @property
    def episode_seed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, seed of the current episode."""
        return self._uploaded(torch.from_numpy(self._seeds.current.copy()))

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        self._finite = torch.ones_like(self._finite)
        self.restart(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        return self.observe()

    def restart(self, ended: Tensor) -> bool:
        """Start the next episodes where `ended` `(N,)` bool is True; return whether there are any."""
        flags = torch.cat([ended, self._finite]).cpu().numpy()  # the only wait for the device
        if not flags[-1]:
            raise UserError(DIVERGED)
        rows = np.flatnonzero(flags[:-1])
        if len(rows):
            self.start_episodes(torch.from_numpy(rows), self._seeds.take(rows))
            self.episode_step = self.episode_step.masked_fill(ended, 0)
        return len(rows) > 0

    def replaced(self, values: Tensor, rows: Tensor, by: Tensor | NDArray[Any]) -> Tensor:
        """Copy of `values` `(N, ...)` with `by` `(R, ...)` in `rows` `(R,)` of `start_episodes`."""
        return values.index_copy(0, self._uploaded(rows), self._uploaded(torch.as_tensor(by, dtype=values.dtype)))

    def active_rows(self, active: Tensor | None) -> Tensor:
        """Mask `active` as `(N,)` bool on the device; all rows if it is None."""
        return torch.ones_like(self.episode_step, dtype=torch.bool) if active is None else active.to(self.device)

    def clipped_action(self, action: Tensor) -> Tensor:
        """Check actions `(N, A)`, which must be finite, and clip them to the bounds.

        On a device `restart` reports actions that are not finite, because an earlier check would wait for it twice.
        """
        check_action(action, self.num_envs, self.spec)
        action = action.detach().to(self.device, torch.float32)
        self._finite = action.isfinite().all()[None]
        if self.device.type == "cpu" and not bool(self._finite):
            raise UserError(DIVERGED)
        return action.clamp(self._low, self._high)

    def state_dict(self) -> dict[str, Any]:
        """Step counts and seeds; a subclass adds its state."""
        return {"step": self.episode_step.cpu(), "seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`; a subclass restores its state first."""
        self.episode_step = state["step"].to(self.device, copy=True)
        self._seeds.load_state_dict(state["seeds"])
        return self.observe()

    def _uploaded(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)
