"""Interface of tasks on the native MuJoCo backends: array functions over a batch of environments.

A task never steps physics and never loops over environments. The engine (`rollout`, `exact` or `warp`) owns the states
and calls `control` -> physics -> `outcome` -> `observe` once per control step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.errors import UserError, unknown_name
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.sim.contract import SimSpec, TensorSpec
from robopolicy.sim.point_cloud import Box

Array = NDArray[np.float64]
"""Also a float32 tensor on the device of the simulator, for tasks with `array_api` on the warp backend."""


@dataclass
class BatchState:
    """States of N environments at one time, as passed to a task. Do not keep references between calls."""

    model: mujoco.MjModel
    qpos: Array  # (N, nq) generalised positions [m, rad]
    qvel: Array  # (N, nv) generalised velocities [m/s, rad/s]
    time: Array  # (N,) [s]
    sensordata: Array  # (N, nsensordata); one physics step behind qpos, as MuJoCo senses before it integrates
    memory: dict[str, NDArray[np.generic]]  # (N, ...) goals, targets, ...; `control` and `outcome` may write them
    data: list[mujoco.MjData] | None = None  # one per row with the exact engine, else None
    derived: Mapping[str, Array] = field(default_factory=dict[str, Array])  # of the warp backend; see `derived_field`

    def __len__(self) -> int:
        return self.qpos.shape[0]

    def sensor(self, name: str) -> Array:
        """Readings `(N, dim)` of the named sensor."""
        sensor = self.model.sensor(name)
        start, dim = int(sensor.adr[0]), int(sensor.dim[0])
        return self.sensordata[:, start : start + dim]

    def derived_field(self, name: str) -> Array:
        """Field `name` `(N, ...)` of `MjData` that `MujocoTask.derived_fields` lists.

        MuJoCo computes these before it integrates, so they are one physics step behind qpos. They are not stored for
        earlier times: the states before and after a step have the same, so a task keeps what it compares in `memory`.
        """
        if name in self.derived:
            return self.derived[name]
        if self.data is None:
            raise UserError(f"List '{name}' in derived_fields of the task, and use engine 'exact' or backend 'warp'.")
        if not self.data:
            return np.zeros((0, *getattr(mujoco.MjData(self.model), name).shape))
        return np.stack([getattr(data, name) for data in self.data])

    def on_host(self) -> BatchState:
        """Convert to numpy arrays; return `self` if the state contains numpy arrays already."""
        if isinstance(self.qpos, np.ndarray):
            return self
        fields = {name: _downloaded(getattr(self, name)) for name in ("qpos", "qvel", "time", "sensordata")}
        memory, derived = (
            {key: _downloaded(value) for key, value in group.items()} for group in (self.memory, self.derived)
        )
        return replace(self, **fields, memory=memory, derived=derived)


@dataclass
class ResetState:
    """Initial state of one episode (one environment, no batch dimension)."""

    qpos: Array  # (nq,)
    qvel: Array  # (nv,)
    memory: dict[str, NDArray[np.generic] | float] = field(default_factory=dict)  # same keys in every episode
    model: dict[str, Array] = field(default_factory=dict)  # fields of `MjModel` changed in this episode


@dataclass
class StepResult:
    """Reward, termination and info of one control step."""

    reward: Array  # (N,)
    terminated: NDArray[np.bool_]  # (N,)
    info: dict[str, NDArray[np.generic]] = field(default_factory=dict)  # (N, ...); `success` (N,) bool where defined


class MujocoTask(ABC):
    """A task over one `MjModel`. All randomness comes from the generator passed to `initial`."""

    name: str  # registered id
    model: mujoco.MjModel
    frame_skip: int  # physics steps per control step
    max_episode_steps: int  # control steps
    action_low: Array  # (A,)
    action_high: Array  # (A,)
    observation: Mapping[str, TensorSpec]  # keys that `observe` returns; cameras are added by the backend
    action_names: tuple[str, ...] = ()
    cameras: tuple[str, ...] = ()  # cameras of the model that may be rendered as observations
    workspace: Box | None = None  # crop box of point clouds; None keeps all points
    mirror: MirrorSymmetry | None = None  # left-right symmetry
    derived_fields: tuple[str, ...] = ()  # fields of `MjData`, e.g. xpos, cfrc_ext; see `BatchState.derived_field`
    batched_initial: bool = (
        False  # `initial` also takes a `BatchGenerator` and returns arrays with its leading dimension
    )
    needs_exact_engine: bool = False  # contacts, model edits, or bit-exact agreement with another stepper
    has_velocity_command: bool = False  # an operator commands a velocity; see `velocity_command`
    array_api: bool = False  # the functions also take torch tensors, as the warp backend needs

    @abstractmethod
    def initial(self, rng: np.random.Generator) -> ResetState:
        """Sample the initial state of one episode."""

    def control(self, action: Array, state: BatchState) -> Array:
        """Map clipped actions `(N, A)` to actuator controls `(N, nu)`, held for `frame_skip` physics steps."""
        return action

    def resolve_camera(self, camera: str | None) -> str | None:
        """Check the name of a camera; None becomes the first of `cameras`, or the free camera if there are none."""
        if camera is None:
            return self.cameras[0] if self.cameras else None
        if mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_CAMERA, camera) < 0:
            raise unknown_name("camera", camera, self.cameras, f"of task {self.name}")
        return camera

    @abstractmethod
    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Reward, termination and success of the step from `before` to `after`."""

    @abstractmethod
    def observe(self, state: BatchState) -> dict[str, Array]:
        """Observation vectors `(N, dim)`, keys and sizes as in `observation`."""

    def initial_memory(self, state: BatchState) -> dict[str, NDArray[np.generic]]:
        """Initial `memory` of an episode that starts in a measured `state`, as on a real robot.

        Tasks that draw goals at random raise a `UserError`.
        """
        raise UserError(f"Task {self.name} cannot start from measurements; it runs only in simulation.")

    def velocity_command(self, state: BatchState) -> Array:
        """Commanded velocity `(N, 3)`: forward, left [m/s], yaw rate [rad/s]; needs `has_velocity_command`."""
        raise UserError(f"Task {self.name} takes no velocity commands.")

    def set_velocity_command(self, memory: dict[str, NDArray[np.generic]], velocity_command: Array) -> None:
        """Write a commanded velocity `(N, 3)` to `memory` for all later steps; needs `has_velocity_command`."""
        raise UserError(f"Task {self.name} takes no velocity commands.")


def sim_spec(
    task: MujocoTask,
    cameras: tuple[str, ...] = (),
    image_size: int = 0,
    point_clouds: tuple[str, ...] = (),
    points: int = 0,
) -> SimSpec:
    """Spec of a simulator: the observations of the task, then images and point clouds."""
    clouds = {CLOUD_PREFIX + camera: TensorSpec((points, 3)) for camera in point_clouds}
    images = {IMAGE_PREFIX + camera: TensorSpec((3, image_size, image_size), torch.uint8) for camera in cameras}
    return SimSpec(
        task=task.name,
        observation={**task.observation, **images, **clouds},
        action_low=torch.tensor(task.action_low, dtype=torch.float32),
        action_high=torch.tensor(task.action_high, dtype=torch.float32),
        control_dt=task.frame_skip * float(task.model.opt.timestep),
        max_episode_steps=task.max_episode_steps,
        action_names=task.action_names,
        mirror=task.mirror,
    )


def _downloaded(value: Any) -> NDArray[Any]:
    array = value.cpu().numpy()
    return array.astype(np.float64 if array.dtype == np.float32 else array.dtype)  # a copy: tensors may change


def namespace(array: Any) -> Any:
    """Library of `array`: numpy or torch."""
    return np if isinstance(array, np.ndarray) else torch


def constant(value: NDArray[Any], like: Any) -> Any:
    """Convert `value` to the library, type and device of `like`; the upload is cached, so do not write to it.

    Integers stay integers, to index with.
    """
    if isinstance(like, np.ndarray):
        return value
    dtype = torch.int64 if value.dtype.kind == "i" else like.dtype
    return _uploaded(value.tobytes(), value.dtype.str, value.shape, dtype, like.device)


@lru_cache(maxsize=256)
def _uploaded(data: bytes, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, kind).reshape(shape).copy()).to(device, dtype)
