"""GPU backend: a `MujocoTask` with torch functions on the physics of MuJoCo Warp.

Compared with `MujocoSim`, episodes run in single precision: equal initial states, then trajectories that diverge slowly
until the first contact and faster afterwards (see docs/guide/gpu_simulation.md for numbers).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.device import usable_device
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.backends.mujoco.task import BatchState, MujocoTask, constant, sim_spec
from robopolicy.sim.backends.warp_cameras import WarpCameras
from robopolicy.sim.backends.warp_graph import DelayedRead, RecordedFunction, Run, cuda_graph
from robopolicy.sim.backends.warp_physics import Columns, WarpPhysics, overflows
from robopolicy.sim.backends.warp_starts import StartRing
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.sim.physics_state import MujocoState
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import DIVERGED, SeedCounter, check_action, check_number_of_envs

CONTACTS = 64  # per environment, pooled; the Panda scenes reach 14
CONSTRAINTS = 128  # rows per environment; the Panda scenes reach 48
_ZERO = np.zeros(())
_MAX_VALUE = 1e10  # bound of MuJoCo for valid positions and velocities; also of observations and rewards


class WarpSim(VectorSim):
    """N environments of one task on one device (`cpu`, `cuda`, `cuda:0`, ...).

    The functions of the task must take torch tensors (`MujocoTask.array_api`) and never wait for the device. On a GPU,
    a control step is one recorded graph of control, physics, outcome, observation and restart. Initial states are
    prepared ahead on the host (`StartRing`). The host reads three numbers per step, on a GPU from the step before:
    how many episodes ended, whether the actions were finite, and whether a buffer overflowed.

    A state, reward or observation that is not finite or beyond 1e10 ends its episode: `terminated`, `info["diverged"]`,
    no success, and `final_obs` is the last valid observation. Contacts beyond the capacity are dropped; this sets
    `info["overflow"]` and warns once, with the name of the buffer to enlarge.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_envs: int,
        *,
        device: str = "cpu",
        contacts: int = CONTACTS,  # capacity for contacts per environment, in one pool
        constraints: int = CONSTRAINTS,  # capacity for constraint rows of each environment
        cameras: Sequence[str] = (),  # cameras of the model to render into observations `image.<camera>`
        image_size: int = 64,  # height and width of these images in pixels
        point_clouds: Sequence[str] = (),  # cameras whose depth becomes observations `point_cloud.<camera>`
        points: int = 256,  # points of each cloud
    ) -> None:
        if task.needs_exact_engine and not task.derived_fields:
            raise UserError(f"Task {task.name} reads contacts or forces and needs backend 'mujoco-exact', got 'warp'.")
        if not task.array_api:
            raise UserError(f"Task {task.name} supports numpy only, backend 'warp' needs torch; use 'mujoco'.")
        self.task = task
        self.spec = sim_spec(task, tuple(cameras), image_size, tuple(point_clouds), points)
        self.num_envs = num_envs
        where = torch.empty(0, device=usable_device(device)).device  # "cuda" becomes "cuda:0"
        example = task.initial(np.random.default_rng(0))
        self._memory = Columns({key: np.shape(value) for key, value in example.memory.items()})
        worlds = partial(
            WarpPhysics,
            task.model,
            device=where,
            contacts=contacts,
            constraints=constraints,
            frame_skip=task.frame_skip,
            derived=task.derived_fields,
            edited=tuple(example.model),
            memory=self._memory.width,
        )
        self._physics = worlds(num_envs)
        self.device = self._physics.rows.device
        self._low, self._high = self.spec.action_low.to(self.device), self.spec.action_high.to(self.device)
        self._observations = Columns({key: entry.shape for key, entry in task.observation.items()})
        seen = partial(
            WarpCameras,
            task,
            device=where,
            cameras=cameras,
            image_size=image_size,
            point_clouds=point_clouds,
            points=points,
        )
        renders = bool(cameras or point_clouds)
        self._cameras = seen(num_envs) if renders else None
        self._view_keys = tuple(self.spec.observation.keys() - task.observation.keys())
        self._starts = StartRing(
            *(task, self._physics, self._memory, lambda rows: self._flat(self._batch(rows)), worlds),
            seen if renders else None,
        )
        numbers = torch.zeros(2, num_envs, dtype=torch.int64, device=self.device)
        self._episodes: dict[str, Tensor] = {  # of the running episodes; see `_compute`
            "obs": torch.zeros(num_envs, self._observations.width, device=self.device),
            "seed": numbers[0],
            "steps": numbers[1],
            "last_seed": torch.zeros(1, dtype=torch.int64, device=self.device),
        }
        self._record: Callable[[Run], Run] | None = None
        if self.device.type == "cuda":
            self._record = partial(cuda_graph, self.device)
        self._recorded: RecordedFunction | None = None
        self._report = DelayedRead(self.device)
        self._started = self._warned = False
        self._renderers: dict[tuple[int, int], Renderer] = {}

    @property
    def episode_seed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, seed of the current episode."""
        return self._episodes["seed"].clone()

    @property
    def episode_step(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, control steps in the current episode."""
        return self._episodes["steps"].clone()

    def state(self) -> BatchState:
        """Current states of all environments, as passed to a task; the next step overwrites these views."""
        return self._batch(self._physics.rows)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        counter = SeedCounter(self.num_envs)
        counter.reset(seed)
        seeds = np.array(counter.take(np.arange(self.num_envs)), np.int64)
        rows, fields = self._starts.prepared(seeds)
        width = self._physics.rows.shape[1]
        start = {
            "rows": rows[:, :width],
            "fields": fields,
            "obs": rows[:, width:],
            "seed": torch.from_numpy(seeds).to(self.device),
            "steps": torch.zeros_like(self._episodes["steps"]),
            "last_seed": torch.full_like(self._episodes["last_seed"], seeds.max()),
        }
        self._starts.restart_at(int(seeds.max()) + 1)
        self._set(start)
        if self._record is not None and self._recorded is None:
            self._recorded = self._recording(self._record)
            self._set(start)
        return self._split(start["obs"]) | self._views(start["rows"])

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; rows where `active` `(N,)` is False do not move.

        A NaN action is applied as 0 and reported afterwards, on a GPU by the next step: an earlier check would wait for
        the device.
        """
        if not self._started:
            raise UserError("Call reset before the first step.")
        check_action(action, self.num_envs, self.spec)
        requested = action.detach().to(self.device, torch.float32)
        moves = None if active is None else active.to(self.device)
        self._starts.fill(self._report.delay)
        if self._recorded is None:
            found, self._episodes = self._compute(requested, moves)
        else:
            moves = torch.ones_like(self._episodes["steps"], dtype=torch.bool) if moves is None else moves
            found = self._recorded({"action": requested, "moves": moves})
        self._check(self._report(found.pop("report")))
        ends = found.pop("reward"), found.pop("terminated"), found.pop("truncated")
        obs, final = (
            self._split(found.pop(name)) | {key: found.pop(f"{name}.{key}") for key in self._view_keys}
            for name in ("obs", "final_obs")
        )
        return Step(obs, *ends, final, found)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames `(envs, 3, height, width)` uint8 of the first `envs` environments, drawn on the CPU."""
        camera = self.task.resolve_camera(camera)
        if (height, width) not in self._renderers:
            self._renderers[height, width] = Renderer(self.task.model, height, width)
        renderer, state = self._renderers[height, width], self.state().on_host()
        frames = np.empty((min(envs, self.num_envs), 3, height, width), np.uint8)
        for frame, qpos in zip(frames, state.qpos, strict=False):
            renderer.data.qpos[:] = qpos
            mujoco.mj_forward(self.task.model, renderer.data)
            frame[:] = renderer.frame(camera).transpose(2, 0, 1)
        return torch.from_numpy(frames)

    def physics_state(self, env: int = 0) -> MujocoState:
        """Return the positions of environment `env`, downloaded; fields of its model that differ are not shown."""
        state = MujocoState.of(self.task.model, mujoco.MjData(self.task.model))
        return replace(state, qpos=self.state().on_host().qpos[env].astype(np.float64))

    def state_dict(self) -> dict[str, Any]:
        """Complete state for exact resume."""
        state = {"rows": self._physics.rows, "fields": self._physics.fields, **self._episodes}
        return {key: value.to("cpu", copy=True) for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict` and return the observation to act on next."""
        check_number_of_envs(len(state["rows"]), self.num_envs)
        if not self._started:
            self.reset(0)  # records the graph
        values = {key: value.to(self.device, copy=True) for key, value in state.items()}
        self._starts.restart_at(int(state["last_seed"]) + 1)
        self._set(values)
        return self._split(values["obs"]) | self._views(values["rows"])

    def close(self) -> None:
        """Free rendering contexts; safe to call twice."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _set(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, as in `state_dict`."""
        self._physics.rows.copy_(state["rows"])
        self._physics.fields.copy_(state["fields"])
        self._update({key: state[key] for key in self._episodes})
        self._report.clear()
        self._started = True

    def _update(self, episodes: dict[str, Tensor]) -> None:
        """Replace the tensors of the running episodes, whose memory a recording keeps."""
        if self._record is None:
            self._episodes = episodes
        else:
            for key, value in episodes.items():
                self._episodes[key].copy_(value)

    def _recording(self, record: Callable[[Run], Run]) -> RecordedFunction | None:
        """Record the step; None, with a warning, if a function of the task waits for the device."""

        def step(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            found, episodes = self._compute(inputs["action"], inputs["moves"])
            self._update(episodes)
            return found

        example = {
            "action": torch.zeros(self.num_envs, self.spec.action_dim, device=self.device),
            "moves": torch.ones(self.num_envs, dtype=torch.bool, device=self.device),
        }
        try:
            return RecordedFunction(step, example, record)
        except RuntimeError as error:
            self._record = None
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"{self.spec.task}: steps run without a graph, more slowly: {reason}", stacklevel=4)
            return None

    def _compute(self, requested: Tensor, moves: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Step on the device: entries of `Step` and a report for `_check`, and the running episodes afterwards."""
        physics, episodes, width = self._physics, self._episodes, self._physics.state.width
        old = physics.rows.clone()
        before = self._batch(old)
        executed: Any = requested.nan_to_num(0.0).clamp(self._low, self._high)
        physics.advance(_tensor(self.task.control(executed, before)))
        after = self._batch(physics.rows, before.memory)
        outcome = self.task.outcome(before, executed, after)
        reward, observed = _tensor(outcome.reward).float(), self._flat(after)
        rows = physics.rows
        if self._memory.width:
            memory = {key: _tensor(value) for key, value in after.memory.items()}
            rows = torch.cat([rows[:, :width], *self._memory.flat(memory)], dim=1)
        values = torch.cat([*observed, reward[:, None], rows[:, : physics.positions]], dim=1)
        valid = torch.linalg.vector_norm(values, math.inf, dim=1) <= _MAX_VALUE
        diverged, counted = ~valid, valid
        terminated = _tensor(outcome.terminated) | diverged
        overflow, steps = physics.overflow != 0, episodes["steps"] + 1
        truncated = steps >= self.spec.max_episode_steps
        if moves is not None:
            rows = torch.where(moves[:, None], rows, torch.cat([old[:, :width], physics.rows[:, width:]], dim=1))
            steps = torch.where(moves, steps, episodes["steps"])
            diverged, counted, terminated = moves & diverged, moves & counted, moves & terminated
            overflow, truncated = moves & overflow, moves & truncated
        final = torch.where(counted[:, None], values[:, : self._observations.width], episodes["obs"])
        views = {} if self._cameras is None else self._views(torch.where(counted[:, None], rows, old))
        info = {key: _masked(_tensor(value), counted) for key, value in outcome.info.items()}

        done = terminated | truncated
        rank = done.cumsum(0, dtype=torch.int32)  # place of a row among those that end
        seed = episodes["last_seed"] + rank
        slot = seed % self._starts.capacity
        start = self._starts.rows.index_select(0, slot)
        torch.where(done[:, None], start[:, : rows.shape[1]], rows, out=physics.rows)
        if physics.model_fields.width:
            fields = self._starts.fields.index_select(0, slot)
            torch.where(done[:, None], fields, physics.fields, out=physics.fields)
        following = {
            "obs": torch.where(done[:, None], start[:, rows.shape[1] :], final),
            "seed": torch.where(done, seed, episodes["seed"]),
            "steps": torch.where(done, constant(_ZERO, steps), steps),
            "last_seed": seed[-1:],
        }
        largest = torch.linalg.vector_norm(requested, math.inf).view(torch.int32)  # the bits of a float
        found = {
            "obs": following["obs"],
            "final_obs": final,
            "reward": _masked(reward, counted),
            "terminated": terminated,
            "truncated": truncated,
            **{f"final_obs.{key}": view for key, view in views.items()},
            **{f"obs.{key}": _where(done, self._starts.views[key][slot], view) for key, view in views.items()},
            **info,
            "diverged": diverged,
            "overflow": overflow,
            "report": torch.stack([rank[-1], physics.overflow.amax(), largest]),
        }
        return found, following

    def _check(self, report: NDArray[np.int32] | None) -> None:
        """Read the report of a step: number of ended episodes, bits of overflowed buffers, the largest action."""
        if report is None:
            return
        self._starts.note_taken(int(report[0]))
        if not np.isfinite(report[2:].view(np.float32)).all():
            raise UserError(DIVERGED)
        if report[1] and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.spec.task}: environments exceeded the capacity for {overflows(int(report[1]))} and dropped "
                "some; raise `contacts` or `constraints` of WarpSim.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _views(self, rows: Tensor) -> Observation:
        """Images and point clouds of all rows `(N, R)`."""
        return {} if self._cameras is None else self._cameras.views(rows[:, : self.task.model.nq])

    def _batch(self, rows: Tensor, memory: dict[str, Any] | None = None) -> BatchState:
        """States `(K, R)` as passed to a task."""
        views: dict[str, Any] = self._physics.state.views(rows)
        derived = {name: views[name] for name in self.task.derived_fields}
        memory = self._memory.views(rows[:, self._physics.state.width :]) if memory is None else memory
        state = {name: views[name] for name in ("qpos", "qvel", "time", "sensordata")}
        return BatchState(self.task.model, **state, memory=memory, derived=derived)

    def _flat(self, state: BatchState) -> list[Tensor]:
        """All observations of `state`, `(K, size)` float32 each."""
        observation = self.task.observe(state)
        return self._observations.flat({key: _tensor(value).float() for key, value in observation.items()})

    def _split(self, packed: Tensor) -> Observation:
        """Observations by key."""
        return {key: value.contiguous() for key, value in self._observations.views(packed).items()}


def _tensor(value: Any) -> Tensor:
    """Cast for type checkers: tasks return tensors for tensor inputs."""
    return value


def _masked(values: Tensor, rows: Tensor) -> Tensor:
    """Copy of `values` `(N, ...)` with zeros outside `rows` `(N,)`."""
    return values & rows if values.dtype == torch.bool else _where(rows, values, constant(_ZERO, values))


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Select `yes` `(N, ...)` in `rows` `(N,)` and `no` elsewhere."""
    return torch.where(rows.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)


def make_warp(environment: MujocoTask, options: SimOptions, *, task: str = "") -> WarpSim:
    """Simulate a task on MuJoCo Warp."""
    return WarpSim(
        environment,
        options.num_envs,
        device=options.device,
        cameras=options.cameras,
        image_size=options.image_size,
        point_clouds=options.point_clouds,
        points=options.points,
    )
