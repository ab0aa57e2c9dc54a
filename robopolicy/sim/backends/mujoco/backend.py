"""Native backend: vector simulator of any `MujocoTask`, without subprocesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.sim.backends import BACKENDS
from robopolicy.sim.backends.mujoco.engines import PhysicsEngine, RolloutEngine, Rows, ThreadsEngine
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.backends.mujoco.task import Array, BatchState, MujocoTask, sim_spec
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.sim.physics_state import MujocoState
from robopolicy.sim.point_cloud import DEPTH_SIZE, crop, subsample, unproject
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import Arrays, NumpyVectorEnv, check_number_of_envs, copied, finite_rows, tensors


class MujocoSim(NumpyVectorEnv):
    """N environments of one task, stepped by MuJoCo on all cores.

    A state that diverges (non-finite, or reset by MuJoCo itself) ends its episode: `terminated`, `info["diverged"]`,
    no success, and `final_obs` is the last finite observation.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_envs: int,
        *,
        # `rollout` (fastest) or `exact` (one persistent `MjData` per environment); `auto`: `exact` if the task needs it
        engine: Literal["rollout", "exact", "auto"] = "auto",
        threads: int = 0,  # physics threads; 0 is one per core
        cameras: Sequence[str] = (),  # cameras of the model to render into observations `image.<camera>`
        image_size: int = 64,  # height and width of these images in pixels
        point_clouds: Sequence[str] = (),  # cameras whose depth becomes observations `point_cloud.<camera>`
        points: int = 256,  # points of each cloud
        ends_on_success: bool = True,  # False: episodes go on, and `info["ended"]` tells where they would have ended
    ) -> None:
        for camera in (*cameras, *point_clouds):
            if camera not in task.cameras:
                raise unknown_name("camera", camera, task.cameras, f"of task {task.name}")
        if engine == "rollout" and task.needs_exact_engine:
            raise UserError(f"Task {task.name} reads contacts or forces and needs engine 'exact', got 'rollout'.")
        exact = engine == "exact" or task.needs_exact_engine
        if point_clouds and points < 1:
            raise UserError(f"A point cloud needs at least 1 point, got {points}.")
        self.task = task
        self.cameras = tuple(cameras)
        self.point_clouds = tuple(point_clouds)
        spec = sim_spec(task, self.cameras, image_size, self.point_clouds, points)
        super().__init__(spec, num_envs)
        self.engine: PhysicsEngine = (ThreadsEngine if exact else RolloutEngine)(
            task.model, num_envs, task.frame_skip, threads
        )
        self._dt = task.frame_skip * float(task.model.opt.timestep)
        self._image_size = image_size
        self._points = points
        self._ends_on_success = ends_on_success
        self._renderers: dict[tuple[int, int], Renderer] = {}
        self._memory: Arrays = {}
        self.measurements: dict[str, Callable[[BatchState], Array]] = {}
        """Further entries `(N, ...)` of `Step.info`: functions of the state at the end of a step, before any reset."""

    def state(self, rows: Rows = None) -> BatchState:
        """Current states of `rows`, as passed to a task; valid until the next call."""
        select = slice(None) if rows is None else rows
        return self._batch(self.engine.states[select], self.engine.sensors[select], self._memory_of(rows), rows)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        self._start(np.arange(self.num_envs))
        self._obs = self._observe(self.state()) | self._views(np.arange(self.num_envs))
        return tensors(self._obs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; rows where `active` `(N,)` is False do not move."""
        executed, rows = self._clipped(action), _rows(active)
        if rows is not None:
            if not rows.size:
                return self._noop_step()
            executed = executed[rows]
        before = self.state(rows)
        control = self.task.control(executed, before)
        states, sensors = self.engine.advance(control, rows)
        diverged = self._diverged(states, sensors, rows)
        after = self._batch(states, sensors, before.memory, rows)
        outcome = self.task.outcome(before, executed, after)
        final = self._observe(after)
        self.engine.commit(states, sensors, rows)
        self._store_memory(before.memory, rows)

        select = slice(None) if rows is None else rows
        invalid = ~(finite_rows(final, len(diverged)) & np.isfinite(outcome.reward))
        if invalid.any():
            previous = {key: self._obs[key][select][invalid] for key in final}
            final = {key: _replaced(value, np.flatnonzero(invalid), previous[key]) for key, value in final.items()}
        diverged = diverged | invalid
        terminated = outcome.terminated | diverged
        info: Arrays = {**outcome.info, "diverged": diverged}
        info |= {key: measure(after) for key, measure in self.measurements.items()}
        if "success" in info and diverged.any():
            info["success"] = info["success"] & ~diverged
        if not self._ends_on_success and "success" in info:
            info["ended"] = terminated & info["success"]
            terminated = terminated & ~info["ended"]
        self._steps[select] += 1
        truncated = self._steps[select] >= self.spec.max_episode_steps
        reward = np.where(diverged, 0.0, outcome.reward)
        return self._finish(rows, final, reward, terminated, truncated, info)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames `(envs, 3, height, width)` uint8 of the first `envs` environments (default: first camera)."""
        rows = np.arange(min(envs, self.num_envs))
        return torch.from_numpy(self._frames(rows, self.task.resolve_camera(camera), height, width))

    def physics_state(self, env: int = 0) -> MujocoState:
        """Return the positions of environment `env`, with its model."""
        return self.engine.positions(env)

    def state_dict(self) -> dict[str, Any]:
        """Complete state for exact resume."""
        return {
            "engine": tensors(self.engine.state_dict()),
            "memory": tensors(copied(self._memory)),
            "obs": tensors(copied(self._obs)),
            "seeds": self._seeds.state_dict(),
            "steps": self.episode_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict` and return the observation to act on next."""
        check_number_of_envs(len(state["steps"]), self.num_envs)
        self.engine.load_state_dict({key: value.numpy() for key, value in state["engine"].items()})
        self._memory = {key: value.numpy().copy() for key, value in state["memory"].items()}
        self._obs = {key: value.numpy().copy() for key, value in state["obs"].items()}
        self._seeds.load_state_dict(state["seeds"])
        self._steps[:] = state["steps"].numpy()
        return tensors(self._obs)

    def close(self) -> None:
        """Free threads and rendering contexts; safe to call twice."""
        self.engine.close()
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _finish(
        self,
        rows: Rows,
        final: Arrays,
        reward: Array,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        info: Arrays,
    ) -> Step:
        """Reset the rows that ended and expand all results to the full batch size."""
        ended = np.flatnonzero(terminated | truncated)  # positions among the rows that moved
        obs = final
        if ended.size or self.cameras or self.point_clouds:
            moved = np.arange(self.num_envs) if rows is None else rows
            last_views = self._views(moved[ended])
            self._start(moved[ended])
            if ended.size:
                first = self._observe(self.state(moved[ended]))
                obs = {key: _replaced(value, ended, first[key]) for key, value in final.items()}
            views = self._views(moved)
            obs = obs | views
            final = final | {key: _replaced(value, ended, last_views[key]) for key, value in views.items()}
        rewards: NDArray[np.float32] = reward.astype(np.float32)
        if rows is not None:
            final = {key: _replaced(self._obs[key], rows, value) for key, value in final.items()}
            obs = {key: _replaced(self._obs[key], rows, value) for key, value in obs.items()}
            rewards, terminated, truncated = (self._scatter(x, rows) for x in (rewards, terminated, truncated))
            info = {key: self._scatter(value, rows) for key, value in info.items()}
        self._obs = obs
        return self._result(
            rewards, terminated, truncated, final, {key: _info_tensor(value) for key, value in info.items()}
        )

    def _noop_step(self) -> Step:
        idle = torch.zeros(self.num_envs, dtype=torch.bool)
        return Step(tensors(self._obs), torch.zeros(self.num_envs), idle, idle, tensors(self._obs), {})

    def _start(self, rows: NDArray[np.intp]) -> None:
        """Start the next episode of each of `rows`; the only Python loop over environments."""
        for row, seed in zip(rows.tolist(), self._seeds.take(rows), strict=True):
            initial = self.task.initial(np.random.default_rng(seed))
            self.engine.edit(row, initial.model)
            self.engine.reset_row(row, initial.qpos, initial.qvel)
            for key, value in initial.memory.items():
                if key not in self._memory:
                    value = np.asarray(value)
                    self._memory[key] = np.zeros((self.num_envs, *value.shape), value.dtype)
                self._memory[key][row] = value
        self._steps[rows] = 0

    def _diverged(self, states: Array, sensors: Array, rows: Rows) -> NDArray[np.bool_]:
        """Find rows that diverged or that MuJoCo reset (wrong clock) and restore their last valid state."""
        select = slice(None) if rows is None else rows
        start = self.engine.states[select]
        on_time = np.abs(states[:, 0] - start[:, 0] - self._dt) < 0.5 * self.task.model.opt.timestep
        good = on_time & np.isfinite(states.sum(1))
        if not good.all():
            states[~good] = start[~good]
            sensors[~good] = self.engine.sensors[select][~good]
        return ~good

    def _batch(self, states: Array, sensors: Array, memory: Arrays, rows: Rows) -> BatchState:
        nq, nv = self.task.model.nq, self.task.model.nv
        data = self.engine.data
        if data is not None and rows is not None:
            data = [data[row] for row in rows.tolist()]
        qpos, qvel = states[:, 1 : 1 + nq], states[:, 1 + nq : 1 + nq + nv]
        return BatchState(self.task.model, qpos, qvel, states[:, 0], sensors, memory, data)

    def _memory_of(self, rows: Rows) -> Arrays:
        return self._memory if rows is None else {key: value[rows] for key, value in self._memory.items()}

    def _store_memory(self, memory: Arrays, rows: Rows) -> None:
        if rows is not None:
            for key, value in memory.items():
                self._memory[key][rows] = value

    def _observe(self, state: BatchState) -> Arrays:
        return {key: value.astype(np.float32) for key, value in self.task.observe(state).items()}

    def _views(self, rows: NDArray[np.intp]) -> Arrays:
        """Images and point clouds of `rows`."""
        size = self._image_size
        images = {IMAGE_PREFIX + camera: self._frames(rows, camera, size, size) for camera in self.cameras}
        return images | {CLOUD_PREFIX + camera: self._clouds(rows, camera) for camera in self.point_clouds}

    def _frames(self, rows: NDArray[np.intp], camera: str | None, height: int, width: int) -> NDArray[np.uint8]:
        """Render `rows` from `camera`: `(K, 3, height, width)`."""
        renderer = self._renderer(height, width)
        frames = np.empty((len(rows), 3, height, width), np.uint8)
        for frame, row in zip(frames, rows.tolist(), strict=True):
            self.engine.pose(row, renderer.data)
            frame[:] = renderer.frame(camera, self.engine.models[row]).transpose(2, 0, 1)
        return frames

    def _clouds(self, rows: NDArray[np.intp], camera: str) -> NDArray[np.float32]:
        """Point clouds of `rows` from depth images of `camera`: `(K, points, 3)` [m] in world coordinates."""
        renderer = self._renderer(DEPTH_SIZE, DEPTH_SIZE)
        clouds = np.empty((len(rows), self._points, 3), np.float32)
        for cloud, row in zip(clouds, rows.tolist(), strict=True):
            self.engine.pose(row, renderer.data)
            model, pose = self.engine.models[row], renderer.data.camera(camera)
            angle = float(model.camera(camera).fovy[0])
            visible = unproject(renderer.depth(camera, model), angle, pose.xpos, pose.xmat.reshape(3, 3))
            if self.task.workspace is not None:
                visible = crop(visible, self.task.workspace)
            cloud[:] = subsample(visible, self._points)
        return clouds

    def _renderer(self, height: int, width: int) -> Renderer:
        if (height, width) not in self._renderers:
            self._renderers[height, width] = Renderer(self.task.model, height, width)
        return self._renderers[height, width]

    def _scatter(self, values: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
        """Scatter the values of `rows` into zeros for all environments."""
        full = np.zeros((self.num_envs, *values.shape[1:]), values.dtype)
        full[rows] = values
        return full


def _rows(active: Tensor | None) -> Rows:
    if active is None:
        return None
    moving = active.detach().cpu().numpy()
    return None if moving.all() else np.flatnonzero(moving)


def _replaced(values: NDArray[Any], rows: NDArray[np.intp], by: NDArray[Any]) -> NDArray[Any]:
    """Copy of `values` with `rows` replaced."""
    copy = values.copy()
    copy[rows] = by
    return copy


def _info_tensor(value: NDArray[Any]) -> Tensor:
    """Copy to a tensor, so that a task may reuse its arrays; floats become float32."""
    return torch.from_numpy(value.astype(np.float32 if value.dtype == np.float64 else value.dtype))


def make_mujoco(task: MujocoTask, options: SimOptions) -> VectorSim:
    """Simulate `task` on the backend of `options`; `auto` is `mujoco`."""
    backend = "mujoco" if options.backend == "auto" else options.backend
    return BACKENDS[backend].maker()(task, options, task=task.name)


def make_native(environment: MujocoTask, options: SimOptions, *, task: str = "") -> MujocoSim:
    """Simulate a task on native MuJoCo (backends `mujoco` and `mujoco-exact`)."""
    return MujocoSim(
        environment,
        options.num_envs,
        engine="exact" if options.backend == "mujoco-exact" else "auto",
        threads=options.threads,
        cameras=options.cameras,
        image_size=options.image_size,
        point_clouds=options.point_clouds,
        points=options.points,
        ends_on_success=options.ends_on_success,
    )
