"""GPU backend: a `MujocoTask` with torch functions on the physics of MuJoCo Warp.

Compared with `MujocoSim`, episodes run in single precision: equal initial states, then trajectories that diverge slowly
until the first contact and faster afterwards (see docs/guide/gpu_simulation.md for numbers).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.device import usable_device
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.backends.mujoco.task import BatchState, MujocoTask, sim_spec
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import SeedCounter, check_action, check_number_of_envs

CONTACTS = 64  # per environment, pooled; the Panda scenes reach 14
CONSTRAINTS = 128  # rows per environment; the Panda scenes reach 48
_MAX_STATE = 1e10  # bound of MuJoCo for valid positions and velocities
_OVERFLOWS = {  # bit of MuJoCo Warp's report: name of the buffer
    1 << 0: "constraints",
    1 << 1: "constraints (their non-zeros)",
    1 << 2: "contacts (broad phase)",
    1 << 3: "contacts",
    1 << 4: "contacts (convex collisions)",
}


class WarpPhysics:
    """N worlds of one model; its tensors are views of the memory of the simulation.

    Raises:
        UserError: The packages are missing, or MuJoCo Warp does not support the model.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num_envs: int,
        device: torch.device,
        contacts: int,  # capacity for contacts per environment, in one pool
        constraints: int,  # capacity for constraint rows of each environment
    ) -> None:
        self._warp, self._mjw = _import_packages()
        self._device = device
        if getattr(model, "nhistory", 0):
            raise UserError("The warp backend does not support delayed actuators and sensors; use backend 'mujoco'.")
        if device.type == "cuda" and not self._warp.is_mempool_enabled(str(device)):
            raise UserError(f"MuJoCo Warp needs memory pools, which the driver of {device} lacks; use device cpu.")
        with self._warp.ScopedDevice(str(device)):
            try:
                self._model = self._mjw.put_model(model)
                self._data = self._mjw.make_data(model, nworld=num_envs, nconmax=contacts, njmax=constraints)
            except (NotImplementedError, ValueError) as error:
                raise UserError(f"MuJoCo Warp cannot simulate this model: {error} Use backend 'mujoco'.") from error
            if device.type == "cuda":  # older drivers cannot loop in a graph until the solver converges
                self._model.opt.graph_conditional = self._warp.is_conditional_graph_supported()
            self._model.opt.warn_overflow = False  # the kernels print; use `overflow`
        view, data = self._warp.to_torch, self._data
        self.time: Tensor = view(data.time)  # (N,) [s]
        self.qpos: Tensor = view(data.qpos)  # (N, nq)
        self.qvel: Tensor = view(data.qvel)  # (N, nv)
        self.act: Tensor = view(data.act)  # (N, na)
        self.sensors: Tensor = view(data.sensordata)  # (N, nsensordata)
        self._warmstart: Tensor = view(data.qacc_warmstart)
        self._control: Tensor = view(data.ctrl)
        self._overflow: Tensor = view(data.overflow)
        self._step = self._capture(lambda: self._mjw.step(self._model, self._data))
        has_sensors = model.nsensordata > 0
        self._forward = self._capture(lambda: self._mjw.forward(self._model, self._data)) if has_sensors else None

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Views of the complete state and of the sensors: `(N, ...)` each."""
        return self.time, self.qpos, self.qvel, self.act, self.sensors

    @property
    def overflow(self) -> Tensor:
        """Mask `(N,)` of worlds whose contacts or constraints did not fit in the last `advance`."""
        return self._overflow != 0

    def advance(self, control: Tensor, steps: int) -> None:
        """Run `steps` physics steps of all worlds under `control` `(N, nu)`.

        As with `RolloutEngine`, the solver starts every control step from a zero warm start.
        """
        self._control.copy_(control)
        self._warmstart.zero_()
        self._overflow.zero_()
        self._step(steps)

    def update_sensors(self, rows: Tensor) -> None:
        """Compute the sensors of `rows` `(K,)` after a reset."""
        if self._forward is not None:
            before = self.sensors.clone()
            self._forward(1)
            self.sensors.copy_(before.index_copy_(0, rows, self.sensors[rows]))

    def valid_state(self) -> Tensor:
        """Mask `(N,)` of worlds with a finite state within the bounds of MuJoCo."""
        return torch.cat([self.qpos, self.qvel, self.act], dim=1).abs().le(_MAX_STATE).all(dim=1)

    def overflowed(self) -> str:
        """Names of the buffers that overflowed in the last `advance`; waits for the device."""
        bits = {int(value) for value in self._overflow.unique().tolist()}
        names = [name for bit, name in _OVERFLOWS.items() if any(value & bit for value in bits)]
        return ", ".join(names) or "buffers of the collision functions"

    def _capture(self, run: Callable[[], None]) -> Callable[[int], None]:
        """Capture `run` as a graph and return a function that launches it a number of times, on GPU or CPU."""
        wp, device = self._warp, self._device
        with wp.ScopedDevice(str(device)):
            run()  # compile and load the kernels before the capture
            with wp.ScopedCapture() as capture:
                run()
            wp.synchronize_device()

        def launch(times: int) -> None:
            # On torch's stream, physics and torch operations are ordered without a wait of the host.
            stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
            for _ in range(times):
                wp.capture_launch(capture.graph, stream)

        return launch


def _import_packages() -> tuple[Any, Any]:
    try:
        import warp

        warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)  # it prints every kernel to stdout
        import mujoco_warp
    except ImportError as error:
        raise UserError("MuJoCo Warp is not installed; run: pip install 'robopolicy[warp]'.") from error
    return warp, mujoco_warp


class WarpSim(VectorSim):
    """N environments of one task on one device (`cpu`, `cuda`, `cuda:0`, ...).

    The functions of the task must take torch tensors (`MujocoTask.array_api`). A step waits for the device once, to
    find the ended episodes; initial states are sampled on the host. A state that diverges (non-finite or beyond
    MuJoCo's bounds) ends its episode: `terminated`, `info["diverged"]`, no success, and `final_obs` is the last valid
    observation. Contacts beyond the capacity are dropped; this sets `info["overflow"]` and warns once, with the name of
    the buffer to enlarge.
    """

    def __init__(
        self,
        task: MujocoTask,
        num_envs: int,
        *,
        device: str = "cpu",
        contacts: int = CONTACTS,  # capacity for contacts per environment, in one pool
        constraints: int = CONSTRAINTS,  # capacity for constraint rows of each environment
    ) -> None:
        if task.needs_exact_engine:
            raise UserError(f"Task {task.name} reads contacts or forces and needs backend 'mujoco-exact', got 'warp'.")
        if not task.array_api:
            raise UserError(f"Task {task.name} supports numpy only, backend 'warp' needs torch; use 'mujoco'.")
        self.task = task
        self.spec = sim_spec(task)
        self.num_envs = num_envs
        self._physics = WarpPhysics(task.model, num_envs, usable_device(device), contacts, constraints)
        self.device = self._physics.qpos.device  # "cuda" becomes "cuda:0"
        self._low, self._high = self.spec.action_low.to(self.device), self.spec.action_high.to(self.device)
        self._seeds = SeedCounter(num_envs)
        self._steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._memory: dict[str, Tensor] = {}
        self._started = self._warned = False
        self._renderers: dict[tuple[int, int], Renderer] = {}

    @property
    def episode_seed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, seed of the current episode."""
        return torch.from_numpy(self._seeds.current.copy()).to(self.device)

    @property
    def episode_step(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, control steps in the current episode."""
        return self._steps.clone()

    def state(self) -> BatchState:
        """Current states of all environments, as passed to a task; the next step overwrites these views."""
        return self._batch(self._physics.state, self._memory)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        self._start(np.arange(self.num_envs))
        self._started = True
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step; rows where `active` `(N,)` is False do not move.

        A NaN action is applied as 0 and reported afterwards: an earlier check would wait for the device twice.
        """
        if not self._started:
            raise UserError("Call reset before the first step.")
        check_action(action, self.num_envs, self.spec)
        requested = action.detach().to(self.device, torch.float32)
        executed: Any = requested.nan_to_num(0.0).clamp(self._low, self._high)
        moves = torch.ones_like(self._steps, dtype=torch.bool) if active is None else active.to(self.device)
        physics = self._physics
        start = [view.clone() for view in physics.state]
        before = self._batch(start, {key: value.clone() for key, value in self._memory.items()})

        physics.advance(_tensor(self.task.control(executed, before)), self.task.frame_skip)
        valid_state = physics.valid_state()
        for view, old in zip(physics.state, start, strict=True):
            view.copy_(_where(moves & valid_state, view, old))
        written = {key: _tensor(value) for key, value in before.memory.items()}
        self._memory = {key: _where(moves, value, self._memory[key]) for key, value in written.items()}
        outcome = self.task.outcome(before, executed, self.state())
        final, raw_reward = self._observe(), _tensor(outcome.reward).float()
        for value in (raw_reward, *final.values()):
            valid_state = valid_state & value.isfinite().reshape(self.num_envs, -1).all(1)

        diverged = moves & ~valid_state
        final = {key: _where(valid_state, value, value.nan_to_num(0.0, 0.0, 0.0)) for key, value in final.items()}
        terminated = moves & (_tensor(outcome.terminated) | diverged)
        self._steps = self._steps + moves
        truncated = moves & (self._steps >= self.spec.max_episode_steps)
        info = {key: _masked(_tensor(value), moves) for key, value in outcome.info.items()}
        info |= {"diverged": diverged, "overflow": moves & physics.overflow}
        if "success" in info:
            info["success"] = info["success"] & ~diverged
        reward = _masked(raw_reward, moves & ~diverged)
        obs = self._restart(terminated | truncated, info["overflow"], requested)
        return Step(obs or dict(final), reward, terminated, truncated, final, info)

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

    def state_dict(self) -> dict[str, Any]:
        """Complete state for exact resume."""
        return {
            "physics": [view.cpu().clone() for view in self._physics.state],
            "memory": {key: value.cpu().clone() for key, value in self._memory.items()},
            "seeds": self._seeds.state_dict(),
            "steps": self._steps.cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict` and return the observation to act on next."""
        check_number_of_envs(len(state["steps"]), self.num_envs)
        for view, saved in zip(self._physics.state, state["physics"], strict=True):
            view.copy_(saved)
        self._memory = {key: value.to(self.device, copy=True) for key, value in state["memory"].items()}
        self._seeds.load_state_dict(state["seeds"])
        self._steps = state["steps"].to(self.device, copy=True)
        self._started = True
        return self._observe()

    def close(self) -> None:
        """Free rendering contexts; safe to call twice."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _restart(self, ended: Tensor, overflow: Tensor, requested: Tensor) -> Observation | None:
        """Start the next episodes of the rows in `ended` and return the observations; None if no row ended."""
        unusable = ~requested.isfinite().all(dim=1)
        ends, overflows, bad = torch.stack([ended, overflow, unusable]).cpu().numpy()  # the only wait for the device
        if bad.any():
            raise UserError("An action is NaN or infinite; the policy has diverged.")
        if overflows.any() and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.spec.task}: {int(overflows.sum())} of {self.num_envs} environments exceeded the capacity for "
                f"{self._physics.overflowed()} and dropped some; raise `contacts` or `constraints` of WarpSim.",
                RuntimeWarning,
                stacklevel=3,
            )
        if not ends.any():
            return None
        self._start(np.flatnonzero(ends))
        return self._observe()

    def _start(self, rows: NDArray[np.intp]) -> None:
        """Start the next episode of each of `rows`; the only Python loop over environments."""
        starts = [self.task.initial(np.random.default_rng(seed)) for seed in self._seeds.take(rows)]
        if any(start.model for start in starts):
            raise UserError(
                f"Task {self.spec.task} changes its model between episodes, which backend 'warp' does not support; "
                "choose backend 'mujoco'."
            )
        index, physics = torch.from_numpy(rows).to(self.device), self._physics
        for view in physics.state:
            view.index_fill_(0, index, 0.0)
        physics.qpos.index_copy_(0, index, self._uploaded([start.qpos for start in starts]))
        physics.qvel.index_copy_(0, index, self._uploaded([start.qvel for start in starts]))
        physics.update_sensors(index)
        for key in starts[0].memory:
            values = self._uploaded([start.memory[key] for start in starts])
            if key not in self._memory:
                self._memory[key] = values.new_zeros((self.num_envs, *values.shape[1:]))
            self._memory[key] = self._memory[key].index_copy(0, index, values)
        self._steps = self._steps.index_fill(0, index, 0)

    def _batch(self, state: Sequence[Tensor], memory: dict[str, Tensor]) -> BatchState:
        time, qpos, qvel, _, sensors = state
        fields: Any = (qpos, qvel, time, sensors, memory)  # tensors, unlike in the CPU engines
        return BatchState(self.task.model, *fields)

    def _observe(self) -> Observation:
        observation = self.task.observe(self.state())
        return {key: _tensor(value).to(torch.float32, copy=True) for key, value in observation.items()}

    def _uploaded(self, values: Sequence[Any]) -> Tensor:
        """Stack values to a tensor `(K, ...)` on the device; floats become float32."""
        rows = torch.from_numpy(np.stack([np.asarray(value) for value in values]))
        return rows.to(torch.float32 if rows.is_floating_point() else rows.dtype).to(self.device)


def _tensor(value: Any) -> Tensor:
    """Cast for type checkers: tasks return tensors for tensor inputs."""
    return value


def _where(rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Select `yes` in `rows` `(N,)` and `no` elsewhere `(N, ...)`."""
    return torch.where(rows.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)


def _masked(values: Tensor, rows: Tensor) -> Tensor:
    """Copy of `values` with zeros outside `rows`."""
    return _where(rows, values, torch.zeros_like(values))


def make_warp(environment: MujocoTask, options: SimOptions, *, task: str = "") -> WarpSim:
    """Simulate a task on MuJoCo Warp; camera observations are not supported and raise a `UserError`."""
    if options.cameras or options.point_clouds:
        raise UserError("Backend 'warp' renders no camera observations; use backend 'mujoco'.")
    return WarpSim(environment, options.num_envs, device=options.device)
