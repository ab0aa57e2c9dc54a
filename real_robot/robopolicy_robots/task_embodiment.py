"""Embodiment of a MuJoCo task, with the observation and control functions of its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.task import BatchState, MujocoTask
from robopolicy.sim.physics_state import MujocoState
from robopolicy_robots.embodiment import decode_image
from robopolicy_robots.message import Message
from robopolicy_robots.messages import Image, TwistStamped
from robopolicy_robots.mujoco_topics import OPERATOR, MujocoTopics, from_twist
from robopolicy_robots.robot import CAMERA
from robopolicy_robots.transports.base import Received

Array = NDArray[np.float64]


class TaskEmbodiment:
    """Embodiment that converts messages to the state of a task and calls its `observe` and `control`.

    The state has one row. Quantities without a message keep their initial values: velocities of objects, and sensors
    (zeros), which no measurable observation uses.

    Args:
        task: The task whose policy is deployed.
        prefix: Prefix of joint names in messages, as in `panda_joint1`.
        images: Cameras of the policy and their sizes `{"front": (height, width)}`, raw or compressed.
    """

    def __init__(self, task: MujocoTask, prefix: str = "", images: Mapping[str, tuple[int, int]] | None = None) -> None:
        model = task.model
        self.task = task
        self.images = {CAMERA + name: size for name, size in (images or {}).items()}
        self.topics = MujocoTopics(model, prefix)
        self.sources: Mapping[str, type[Message]] = {
            **self.topics.sources,
            **({OPERATOR: TwistStamped} if task.has_velocity_command else {}),
            **dict.fromkeys(self.images, Image),
        }
        self.joints = self.topics.commanded
        self.control_dt = task.frame_skip * float(model.opt.timestep)
        self._initial = MujocoState.of(model, mujoco.MjData(model))
        self._memory: dict[str, NDArray[np.generic]] = {}
        self._steps = 0

    def start(self, state: Mapping[str, Received]) -> None:
        """Reset the memory of the task to the current pose; raises `UserError` if a source is missing."""
        self._steps, self._memory = 0, {}
        self._memory = self.task.initial_memory(self._state(state))

    def observe(self, state: Mapping[str, Received]) -> dict[str, NDArray[Any]]:
        """Observations `{key: (dim,)}` float32 and images `(3, h, w)` uint8; raises `UserError` without a source."""
        found = {key: value[0].astype(np.float32) for key, value in self.task.observe(self._state(state)).items()}
        missing = [key for key in self.images if key not in state]
        if missing:
            raise UserError(f"The robot does not report {', '.join(missing)}.")
        return found | {key: decode_image(state[key].message, size) for key, size in self.images.items()}

    def command(self, action: NDArray[np.floating], state: Mapping[str, Received]) -> Array:
        """Joint targets `(J,)` [rad, m] for `action` `(A,)`, for `control_dt` seconds; call it once per action.

        Raises:
            UserError: The action is not finite or has another length, or a source is missing.
        """
        task = self.task
        if np.shape(action) != task.action_low.shape or not np.isfinite(action).all():
            raise UserError(f"Expected {len(task.action_low)} finite numbers as an action, found {np.asarray(action)}.")
        clipped = np.clip(np.asarray(action, np.float64), task.action_low, task.action_high)[None]
        now = self._state(state)
        control = task.control(clipped, now)
        self._memory = now.memory
        self._steps += 1
        return control[0, self.topics.actuators]

    def __copy__(self) -> TaskEmbodiment:
        """Copy with a memory of its own."""
        made = object.__new__(TaskEmbodiment)
        vars(made).update(vars(self))
        made._memory = {key: value.copy() for key, value in self._memory.items()}
        return made

    def physics_state(self, state: Mapping[str, Received]) -> MujocoState | None:
        """State of the bodies in the model of the task; None before the robot has reported all of it."""
        try:
            qpos = self._state(state).qpos[0]
        except UserError:
            return None
        return replace(self._initial, qpos=qpos)

    def _state(self, state: Mapping[str, Received]) -> BatchState:
        model = self.task.model
        qpos, qvel = model.qpos0.copy(), np.zeros(model.nv)
        messages = {key: received.message for key, received in state.items()}
        self.topics.read(messages, qpos, qvel)
        if self.task.has_velocity_command and self._memory:
            if OPERATOR not in messages:
                raise UserError(f"No velocity command was received on the source '{OPERATOR}'.")
            self.task.set_velocity_command(self._memory, from_twist(messages[OPERATOR])[None])
        time, sensors = np.full(1, self._steps * self.control_dt), np.zeros((1, model.nsensordata))
        return BatchState(model, qpos[None], qvel[None], time, sensors, self._memory)
