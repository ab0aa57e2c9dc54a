"""Physics engines, which own the states of N environments and step them.

`RolloutEngine` steps all environments through `mujoco.rollout`. It stores only states and sensors, and the constraint
solver starts every control step from a zero warm start, so the state determines the future. `ThreadsEngine` keeps one
`MjData` per environment and equals a plain `mj_step` loop (and gymnasium) bit for bit; contacts, forces, mocap bodies
and equality constraints can be read and written.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import mujoco
import numpy as np
from mujoco import rollout
from numpy.typing import NDArray

from robopolicy.sim.backends.mujoco.task import Array
from robopolicy.sim.physics_state import MujocoState
from robopolicy.sim.vector_env import core_count

Job = Callable[[int, int, int], None]
"""`job(worker, start, stop)` processes rows `start` to `stop` with the private data of `worker`."""
_CHUNKS_PER_WORKER = 2
_MIN_CHUNK = 4  # rows; the overhead of smaller chunks exceeds the gain in balance


class ThreadPool:
    """The calling thread and `size - 1` worker threads, which sleep between jobs and stop with `close`."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self._calls: list[SimpleQueue[tuple[Job, int, Iterator[int]] | None]] = []
        self._done: SimpleQueue[Exception | None] = SimpleQueue()
        for worker in range(1, self.size):
            calls: SimpleQueue[tuple[Job, int, Iterator[int]] | None] = SimpleQueue()
            threading.Thread(target=self._serve, args=(worker, calls), daemon=True, name=f"sim-{worker}").start()
            self._calls.append(calls)

    def run(self, job: Job, count: int) -> None:
        """Process rows 0 to `count` and wait for all; re-raise an exception of any worker."""
        if not self._calls or count <= _MIN_CHUNK:
            job(0, 0, count)
            return
        chunks = itertools.count()  # `next` is atomic, so every chunk is taken once
        for calls in self._calls:
            calls.put((job, count, chunks))
        try:
            self._work(0, job, count, chunks)
        finally:
            errors = [self._done.get() for _ in self._calls]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Stop the workers; safe to call twice."""
        for calls in self._calls:
            calls.put(None)
        self._calls = []

    def _serve(self, worker: int, calls: SimpleQueue[tuple[Job, int, Iterator[int]] | None]) -> None:
        while (call := calls.get()) is not None:
            try:
                self._work(worker, *call)
                self._done.put(None)
            except Exception as error:
                self._done.put(error)

    def _work(self, worker: int, job: Job, count: int, chunks: Iterator[int]) -> None:
        size = max(_MIN_CHUNK, -(-count // (_CHUNKS_PER_WORKER * self.size)))
        for start in map(size.__mul__, chunks):
            if start >= count:
                return
            job(worker, start, min(start + size, count))


Rows = NDArray[np.intp] | None
"""Environments to work on, ascending; None means all of them."""

_FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS
_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION
_EDIT = "model."  # prefix of edited fields in a state dict
_SERIAL_BELOW = 4  # environments; a pool costs more than it gains


class PhysicsEngine(ABC):
    """States of N environments of one model.

    `states` `(N, S)` holds `mjSTATE_FULLPHYSICS` (time, qpos, qvel, act, ...) and `sensors` `(N, M)` the matching
    readings. `models` holds the model of each environment: the shared model, or an edited copy.
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, frame_skip: int) -> None:
        self.model = model
        self._base_model = model
        self.models = [model] * num_envs
        self.edits: dict[str, NDArray[Any]] = {}  # fields of the model that differ between environments `(N, ...)`
        self.num_envs = num_envs
        self.frame_skip = frame_skip
        self.states: Array = np.zeros((num_envs, mujoco.mj_stateSize(model, _FULL)))
        self.sensors: Array = np.zeros((num_envs, model.nsensordata))
        self.data: list[mujoco.MjData] | None = None

    @abstractmethod
    def reset_row(self, row: int, qpos: Array, qvel: Array) -> None:
        """Reset environment `row` to `qpos` `(nq,)`, `qvel` `(nv,)`."""

    def edit(self, row: int, fields: Mapping[str, Array]) -> None:
        """Set fields of the `MjModel` of environment `row` from now on; call before `reset_row`.

        A task edits the same fields in every episode, or none.
        """
        if not fields:
            return
        for name, value in fields.items():
            if name not in self.edits:
                self.edits[name] = np.repeat(np.asarray(getattr(self.model, name))[None], self.num_envs, 0)
            self.edits[name][row] = value
        self._rebuild(row)

    def _rebuild(self, row: int) -> None:
        model = copy(self._base_model)
        for name, values in self.edits.items():
            getattr(model, name)[:] = values[row]
        mujoco.mj_setConst(model, mujoco.MjData(model))
        self.models[row] = model

    @abstractmethod
    def advance(self, control: Array, rows: Rows) -> tuple[Array, Array]:
        """Step `rows` by one control step under `control` `(K, nu)`; return states `(K, S)` and sensors `(K, M)`.

        The results are valid until the next call. `self.states` and `self.sensors` keep the previous values, so that a
        task can compare, until `commit` stores the new ones.
        """

    def commit(self, states: Array, sensors: Array, rows: Rows) -> None:
        """Store the results of `advance`."""
        select = slice(None) if rows is None else rows
        self.states[select] = states
        self.sensors[select] = sensors

    @abstractmethod
    def pose(self, row: int, data: mujoco.MjData) -> None:
        """Copy the state of environment `row` into `data` and compute its positions, for rendering."""

    @abstractmethod
    def positions(self, row: int) -> MujocoState:
        """Copy the positions of environment `row`."""

    def state_dict(self) -> dict[str, Array]:
        """Complete state as arrays."""
        edits = {_EDIT + name: values.copy() for name, values in self.edits.items()}
        return {"states": self.states.copy(), "sensors": self.sensors.copy(), **edits}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore `state_dict`."""
        self.states[:] = state["states"]
        self.sensors[:] = state["sensors"]
        self.edits = {name.removeprefix(_EDIT): state[name].copy() for name in state if name.startswith(_EDIT)}
        for row in range(self.num_envs if self.edits else 0):
            self._rebuild(row)

    @abstractmethod
    def close(self) -> None:
        """Stop the threads; safe to call twice."""


class RolloutEngine(PhysicsEngine):
    """All environments through `mujoco.rollout`, with buffers allocated once and one `MjData` per thread."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, frame_skip: int, threads: int = 0) -> None:
        super().__init__(model, num_envs, frame_skip)
        self._pool = ThreadPool(_pool_size(num_envs, threads))
        # The calling thread would idle in MuJoCo's own pool; each thread calls its serial rollout instead.
        self._rollouts = [rollout.Rollout(nthread=0) for _ in range(self._pool.size)]
        self._workers = [[mujoco.MjData(model)] for _ in range(self._pool.size)]
        self._base_model = _without_islands(model)
        self.models = [self._base_model] * num_envs
        self._scratch = mujoco.MjData(model)
        self._control: Array = np.zeros((num_envs, frame_skip, model.nu))
        self._states: Array = np.zeros((num_envs, frame_skip, self.states.shape[1]))
        self._sensors: Array = np.zeros((num_envs, frame_skip, model.nsensordata))

    def reset_row(self, row: int, qpos: Array, qvel: Array) -> None:
        """Reset environment `row` to `qpos` `(nq,)`, `qvel` `(nv,)`."""
        model, data = self.models[row], self._scratch
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        mujoco.mj_getState(model, data, self.states[row], _FULL)
        self.sensors[row] = data.sensordata

    def advance(self, control: Array, rows: Rows) -> tuple[Array, Array]:
        """Step `rows` by one control step under `control` `(K, nu)`."""
        count = len(control)
        states = self.states if rows is None else self.states[rows]
        models = self.models if rows is None else [self.models[row] for row in rows.tolist()]
        self._control[:count] = control[:, None]

        def step_rows(worker: int, start: int, stop: int) -> None:
            self._rollouts[worker].rollout(
                models[start:stop],
                self._workers[worker],
                states[start:stop],
                self._control[start:stop],
                nstep=self.frame_skip,
                skip_checks=True,
                state=self._states[start:stop],
                sensordata=self._sensors[start:stop] if self.model.nsensordata else None,
            )

        self._pool.run(step_rows, count)
        return self._states[:count, -1], self._sensors[:count, -1]

    def positions(self, row: int) -> MujocoState:
        """Copy the positions of environment `row`; mocap bodies stay where the model has them."""
        state = MujocoState.of(self.models[row], self._scratch)
        return replace(state, qpos=self.states[row, 1 : 1 + self.model.nq].copy())

    def pose(self, row: int, data: mujoco.MjData) -> None:
        """Copy the state of environment `row` into `data` and compute its positions, for rendering its model."""
        mujoco.mj_setState(self.models[row], data, self.states[row], _FULL)
        mujoco.mj_forward(self.models[row], data)

    def close(self) -> None:
        """Stop the threads; safe to call twice."""
        self._pool.close()


class ThreadsEngine(PhysicsEngine):
    """One persistent `MjData` per environment, stepped in slices on our own threads (`mj_step` releases the GIL)."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, frame_skip: int, threads: int = 0) -> None:
        super().__init__(model, num_envs, frame_skip)
        self.data = self._data = [mujoco.MjData(model) for _ in range(num_envs)]
        self._pool = ThreadPool(_pool_size(num_envs, threads))
        self._states = self.states.copy()
        self._sensors = self.sensors.copy()
        # State from which the derived quantities of an MjData (positions, contacts, forces) were computed: repeating
        # the step restores them exactly, unlike a copy of named arrays.
        self._origin: Array = np.zeros((num_envs, mujoco.mj_stateSize(model, _INTEGRATION)))
        self._fresh: NDArray[np.bool_] = np.ones(num_envs, bool)

    def reset_row(self, row: int, qpos: Array, qvel: Array) -> None:
        """Reset environment `row` to `qpos` `(nq,)`, `qvel` `(nv,)`."""
        model, data = self.models[row], self._data[row]
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_getState(model, data, self._origin[row], _INTEGRATION)
        self._fresh[row] = True
        mujoco.mj_forward(model, data)
        mujoco.mj_getState(model, data, self.states[row], _FULL)
        self.sensors[row] = data.sensordata

    def advance(self, control: Array, rows: Rows) -> tuple[Array, Array]:
        """Step `rows` by one control step under `control` `(K, nu)`."""
        index = range(self.num_envs) if rows is None else rows.tolist()
        skip = self.frame_skip

        def step_rows(worker: int, start: int, stop: int) -> None:
            for k in range(start, stop):
                row = index[k]
                model, data = self.models[row], self._data[row]
                data.ctrl = control[k]
                mujoco.mj_getState(model, data, self._origin[row], _INTEGRATION)
                mujoco.mj_step(model, data, nstep=skip)
                # mj_step skips contact forces on bodies unless a sensor needs them; the dynamics do not change.
                mujoco.mj_rnePostConstraint(model, data)
                mujoco.mj_getState(model, data, self._states[k], _FULL)
                if model.nsensordata:
                    self._sensors[k] = data.sensordata

        self._pool.run(step_rows, len(index))
        self._fresh[slice(None) if rows is None else rows] = False
        return self._states[: len(index)], self._sensors[: len(index)]

    def positions(self, row: int) -> MujocoState:
        """Copy the positions of environment `row`."""
        return MujocoState.of(self.models[row], self._data[row])

    def pose(self, row: int, data: mujoco.MjData) -> None:
        """Copy the state of environment `row` into `data` and compute its positions, for rendering its model."""
        model, full = self.models[row], np.empty(self._origin.shape[1])
        mujoco.mj_getState(model, self._data[row], full, _INTEGRATION)
        mujoco.mj_setState(model, data, full, _INTEGRATION)
        mujoco.mj_forward(model, data)

    def state_dict(self) -> dict[str, Array]:
        """Complete state as arrays."""
        return {**super().state_dict(), "origin": self._origin.copy(), "fresh": self._fresh.astype(np.float64)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self._origin[:] = state["origin"]
        self._fresh[:] = state["fresh"] > 0
        for row, (model, data) in enumerate(zip(self.models, self._data, strict=True)):
            mujoco.mj_resetData(model, data)
            mujoco.mj_setState(model, data, self._origin[row], _INTEGRATION)
            if self._fresh[row]:
                mujoco.mj_forward(model, data)
            else:
                mujoco.mj_step(model, data, nstep=self.frame_skip)
                mujoco.mj_rnePostConstraint(model, data)

    def close(self) -> None:
        """Stop the threads; safe to call twice."""
        self._pool.close()


def _pool_size(num_envs: int, threads: int) -> int:
    return 1 if num_envs < _SERIAL_BELOW else min(threads or core_count(), num_envs)


def _without_islands(model: mujoco.MjModel) -> mujoco.MjModel:
    """Disable the island search for models with a single kinematic tree, which have no islands."""
    if model.ntree > 1:
        return model
    model = copy(model)
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_ISLAND)
    return model
