"""What a task on the native MuJoCo backend provides: plain numpy functions over a batch of environments.

A task never steps physics and never loops over environments. The engine (`rollout` or `exact`) owns the states and
calls `control` -> physics -> `outcome` -> `observe` once per control step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.mirror import Mirror
from robopolicy.sim.contract import TensorSpec
from robopolicy.sim.point_cloud import Box

Array = NDArray[np.float64]


@dataclass
class BatchState:
    """States of N environments at one instant, as seen by a task. Do not keep references between calls."""

    model: mujoco.MjModel
    qpos: Array  # (N, nq) generalised positions [m, rad]
    qvel: Array  # (N, nv) generalised velocities [m/s, rad/s]
    time: Array  # (N,) [s]
    sensordata: Array  # (N, nsensordata); lags qpos by one physics step, because MuJoCo senses before it integrates
    memory: dict[str, NDArray[np.generic]]  # (N, ...) the task's own numbers (goals, targets); `control` may write them
    data: list[mujoco.MjData] | None = None  # one per row with the exact engine, else None

    def __len__(self) -> int:
        return self.qpos.shape[0]

    def sensor(self, name: str) -> Array:
        """Readings `(N, dim)` of the named sensor."""
        sensor = self.model.sensor(name)
        start, dim = int(sensor.adr[0]), int(sensor.dim[0])
        return self.sensordata[:, start : start + dim]


@dataclass
class Initial:
    """Start of one episode (one environment, no batch dimension)."""

    qpos: Array  # (nq,)
    qvel: Array  # (nv,)
    memory: dict[str, NDArray[np.generic] | float] = field(default_factory=dict)  # same keys in every episode


@dataclass
class Outcome:
    """Judgement of one control step."""

    reward: Array  # (N,)
    terminated: NDArray[np.bool_]  # (N,)
    info: dict[str, NDArray[np.generic]] = field(default_factory=dict)  # (N, ...); `success` (N,) bool where defined


class MujocoTask(ABC):
    """A task over one `MjModel`. Everything random comes from the generator handed to `initial`."""

    name: str  # registered id
    model: mujoco.MjModel
    frame_skip: int  # physics steps per control step
    max_episode_steps: int  # control steps
    action_low: Array  # (A,)
    action_high: Array  # (A,)
    observation: Mapping[str, TensorSpec]  # keys that `observe` returns; cameras are added by the backend
    action_names: tuple[str, ...] = ()
    cameras: tuple[str, ...] = ()  # cameras of the model that may be rendered as observations
    workspace: Box | None = None  # what point clouds keep of the scene; None is everything that a camera sees
    mirror: Mirror | None = None  # left-right symmetry
    needs_exact_engine: bool = False  # contacts, model edits, or bit-exact agreement with another stepper

    @abstractmethod
    def initial(self, rng: np.random.Generator) -> Initial:
        """Draw the start of one episode."""

    def control(self, action: Array, state: BatchState) -> Array:
        """Map clipped actions `(N, A)` to actuator controls `(N, nu)`, held for `frame_skip` physics steps."""
        return action

    @abstractmethod
    def outcome(self, before: BatchState, action: Array, after: BatchState) -> Outcome:
        """Reward, termination and success of the step from `before` to `after`."""

    @abstractmethod
    def observe(self, state: BatchState) -> dict[str, Array]:
        """Observation vectors `(N, dim)`, keys and sizes as in `observation`."""
