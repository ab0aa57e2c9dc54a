"""Initial states of episodes on the device, prepared in blocks before the episodes that need them end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.task import MujocoTask, ResetState
from robopolicy.sim.backends.warp_cameras import WarpCameras
from robopolicy.sim.backends.warp_physics import Columns, WarpPhysics
from robopolicy.sim.batch_generator import BatchGenerator
from robopolicy.sim.contract import Observation

_BLOCK = 1024  # starts that are prepared together at most
_MIN_BLOCK = 16
_EXACT = 1 << 24  # largest range of integers that float32 holds exactly


class StartRing:
    """Starts of the next seeds in order, in a ring of at least twice the number of environments.

    A start is a row of `physics` and its first observation, and a row of model fields. As seeds are consecutive, the
    start of seed s lies in slot s modulo the capacity. An episode that ends on the device takes the next start there;
    the host learns afterwards how many were taken, and fills up.
    """

    def __init__(
        self,
        task: MujocoTask,
        physics: WarpPhysics,
        memory: Columns,
        observe: Callable[[Tensor], list[Tensor]],  # flat observations `(K, size)` of rows `(K, R)`
        scratch: Callable[[int], WarpPhysics],  # makes further worlds, if states need computing
        cameras: Callable[[int], WarpCameras] | None = None,  # of a number of states, if cameras are observed
    ) -> None:
        self._task, self._physics, self._memory, self._observe = task, physics, memory, observe
        self._device, self._num_envs = physics.rows.device, len(physics.rows)
        self._block = min(max(self._num_envs, _MIN_BLOCK), _BLOCK)
        computed = physics.state.width > physics.positions + 1 or physics.model_fields.width > 0
        self._scratch = scratch(self._block) if computed else None
        self.capacity = 2 * self._num_envs + self._block
        self._filled = self._taken = 0  # next seed to prepare, next seed to take as far as the host knows
        width = physics.rows.shape[1] + sum(part.shape[1] for part in observe(physics.rows[:1]))
        self.rows = torch.zeros(self.capacity, width, device=self._device)  # (C, R + O)
        self.fields = torch.zeros(self.capacity, physics.model_fields.width, device=self._device)  # (C, F)
        self._cameras = cameras(self._block) if cameras is not None else None
        self.views: Observation = {}  # (C, ...) first images and point clouds
        if self._cameras is not None:
            views = self._cameras.views(physics.rows.new_zeros(self._block, task.model.nq))
            self.views = {key: value.new_zeros(self.capacity, *value.shape[1:]) for key, value in views.items()}

    def restart_at(self, seed: int) -> None:
        """Prepare no more than needed from `seed` on."""
        self._filled = self._taken = seed

    def fill(self, unknown_steps: int) -> None:
        """Prepare as many starts as the next step and `unknown_steps`, whose number is not known yet, may take."""
        while self._filled < self._taken + (unknown_steps + 1) * self._num_envs:
            seeds = np.arange(self._filled, self._filled + self._block)
            rows, fields = self._prepared(seeds)
            first = self._filled % self.capacity
            split = min(self._block, self.capacity - first)
            pairs = [(self.rows, rows), (self.fields, fields)]
            if self._cameras is not None:
                views = self._cameras.views(rows[:, : self._task.model.nq])
                pairs += [(self.views[key], value) for key, value in views.items()]
            for ring, values in pairs:
                ring[first : first + split] = values[:split]
                ring[: self._block - split] = values[split:]
            self._filled += self._block

    def note_taken(self, count: int) -> None:
        """Record that a step took `count` starts."""
        self._taken += count

    def prepared(self, seeds: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Starts `(K, R + O)` and model fields `(K, F)` of any seeds `(K,)`."""
        parts = [self._prepared(seeds[i : i + self._block]) for i in range(0, len(seeds), self._block)]
        return torch.cat([rows for rows, _ in parts]), torch.cat([fields for _, fields in parts])

    def _prepared(self, seeds: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        physics, start = self._physics, initial_batch(self._task, seeds)
        rows = np.zeros((len(seeds), physics.rows.shape[1]), np.float32)
        fields = np.zeros((len(seeds), physics.model_fields.width), np.float32)
        physics.state.write(rows, {"qpos": start.qpos, "qvel": start.qvel})
        self._memory.write(rows[:, physics.state.width :], _numbers(start.memory))
        physics.model_fields.write(fields, start.model)
        values, model = self._uploaded(rows), self._uploaded(fields)
        if self._scratch is not None:
            self._scratch.prepare(values, model)
            values, model = self._scratch.rows[: len(seeds)], self._scratch.fields[: len(seeds)].clone()
        return torch.cat([values, *self._observe(values)], dim=1), model

    def _uploaded(self, values: NDArray[np.float32]) -> Tensor:
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)


def initial_batch(task: MujocoTask, seeds: NDArray[np.int64]) -> ResetState:
    """Initial states of the episodes `seeds` `(K,)`; an array without leading dimension K holds for all of them."""
    if task.batched_initial:
        rng: Any = BatchGenerator(seeds)
        return task.initial(rng)
    starts = [task.initial(np.random.default_rng(seed)) for seed in seeds.tolist()]
    first = starts[0]
    return ResetState(
        np.stack([start.qpos for start in starts]),
        np.stack([start.qvel for start in starts]),
        {key: np.stack([np.asarray(start.memory[key]) for start in starts]) for key in first.memory},
        {key: np.stack([start.model[key] for start in starts]) for key in first.model},
    )


def _numbers(memory: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Memory as arrays that float32 can hold."""
    values = {key: np.asarray(value) for key, value in memory.items()}
    for key, value in values.items():
        if value.dtype.kind in "iu" and value.size and np.abs(value).max() > _EXACT:
            raise UserError(f"The warp backend stores memory as float32, but '{key}' has integers above 2**24.")
    return values
