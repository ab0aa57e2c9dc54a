"""A MuJoCo task as an embodiment: the functions that observe and control in simulation do so on the robot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.task import BatchState, MujocoTask
from robopolicy_robots.embodiment import picture
from robopolicy_robots.message import Message
from robopolicy_robots.messages import Image, TwistStamped
from robopolicy_robots.robot import CAMERA
from robopolicy_robots.transports.base import Received
from robopolicy_robots.wiring import OPERATOR, Wiring, wanted_of

Array = NDArray[np.float64]


class TaskEmbodiment:
    """Builds the task's state from messages, keeps the controller's memory and calls `observe` and `control`.

    The state has one row. What no message reports stays where the model has it at the start: speeds of objects, and
    sensors (zeros), which none of the observations that a robot can measure is made of.

    Args:
        task: The task whose policy is deployed.
        prefix: What the robot puts before the model's names of its joints, as in `panda_joint1`.
        images: Cameras that the policy sees and their sizes `{"front": (height, width)}`, raw or compressed.
    """

    def __init__(self, task: MujocoTask, prefix: str = "", images: Mapping[str, tuple[int, int]] | None = None) -> None:
        model = task.model
        self.task = task
        self.images = {CAMERA + name: size for name, size in (images or {}).items()}
        self.wiring = Wiring(model, prefix)
        self.sources: Mapping[str, type[Message]] = {
            **self.wiring.sources,
            **({OPERATOR: TwistStamped} if task.steered else {}),
            **dict.fromkeys(self.images, Image),
        }
        self.joints = self.wiring.commanded
        self.control_dt = task.frame_skip * float(model.opt.timestep)
        self._memory: dict[str, NDArray[np.generic]] = {}
        self._steps = 0

    def start(self, state: Mapping[str, Received]) -> None:
        """Forget everything and command the pose in which the robot is; before an episode and after a stop.

        Raises:
            UserError: Something is missing, or the task cannot start from measurements.
        """
        self._steps, self._memory = 0, {}
        self._memory = self.task.started(self._state(state))

    def observe(self, state: Mapping[str, Received]) -> dict[str, NDArray[Any]]:
        """The task's observations `{key: (dim,)}` float32 and the pictures `(3, height, width)` uint8 now.

        Raises:
            UserError: Something is missing.
        """
        found = {key: value[0].astype(np.float32) for key, value in self.task.observe(self._state(state)).items()}
        absent = [key for key in self.images if key not in state]
        if absent:
            raise UserError(f"The robot does not report {', '.join(absent)}.")
        return found | {key: picture(state[key].message, size) for key, size in self.images.items()}

    def command(self, action: NDArray[np.floating], state: Mapping[str, Received]) -> Array:
        """Joint targets `(J,)` [rad, m] of the next `control_dt` seconds for `action` `(A,)`; call it once an action.

        Raises:
            UserError: The action is not finite or has another length, or something is missing.
        """
        task = self.task
        if np.shape(action) != task.action_low.shape or not np.isfinite(action).all():
            raise UserError(f"Expected {len(task.action_low)} finite numbers as an action, found {np.asarray(action)}.")
        played = np.clip(np.asarray(action, np.float64), task.action_low, task.action_high)[None]
        now = self._state(state)
        control = task.control(played, now)
        self._memory = now.memory
        self._steps += 1
        return control[0, self.wiring.actuators]

    def _state(self, state: Mapping[str, Received]) -> BatchState:
        model = self.task.model
        qpos, qvel = model.qpos0.copy(), np.zeros(model.nv)
        messages = {key: received.message for key, received in state.items()}
        self.wiring.read(messages, qpos, qvel)
        if self.task.steered and self._memory:
            if OPERATOR not in messages:
                raise UserError(f"Nobody says where to go: there is no '{OPERATOR}'.")
            self.task.want(self._memory, wanted_of(messages[OPERATOR])[None])
        time, sensors = np.full(1, self._steps * self.control_dt), np.zeros((1, model.nsensordata))
        return BatchState(model, qpos[None], qvel[None], time, sensors, self._memory)
