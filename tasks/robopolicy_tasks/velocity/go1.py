"""Velocity tracking with a Unitree Go1 on level ground."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry, SignedPermutation
from robopolicy.sim.backends.mujoco.task import (
    Array,
    BatchState,
    MujocoTask,
    ResetState,
    StepResult,
    constant,
    namespace,
)
from robopolicy.sim.contract import TensorSpec
from robopolicy_tasks.poses import upright
from robopolicy_tasks.velocity import rewards
from robopolicy_tasks.velocity.motion import BaseMotion, feet_on_ground, read
from robopolicy_tasks.velocity.randomization import NOMINAL, Randomization, edited_fields
from robopolicy_tasks.velocity.rewards import ControlStep
from robopolicy_tasks.velocity.scene import FEET, JOINTS, PUSHES, TRUNK, build_model

HOME: Array = np.array([-0.1, 0.9, -1.8, 0.1, 0.9, -1.8] * 2)  # [rad] joints of a standing robot
HEIGHT = 0.29  # [m] of the trunk of a standing robot
ACTION_SCALE = 0.5  # [rad] offset from home for an action of 1
COMMAND_LOW: Array = np.array([-1.0, -0.5, -1.0])  # [m/s, m/s, rad/s] backwards, to the right, clockwise
COMMAND_HIGH: Array = np.array([1.0, 0.5, 1.0])
SEGMENTS, SEGMENT = 4, 5.0  # commands per episode, [s] each
STANDING_FRACTION = 0.1  # fraction of commands without motion
PUSH_TIME = 0.1  # [s] duration of a push, one per segment
MAX_MEAN_ERROR = 0.25  # [m/s] maximum mean velocity error of a successful episode
SPEED_SCALE = 0.05  # of joint speeds in the observation

# Maximum sensor error of each element of the observation, as for the IMU and encoders of the robot.
NOISE: Array = np.concatenate([np.full(3, 0.2), np.full(3, 0.05), np.full(12, 0.02), np.full(12, 1.5 * SPEED_SCALE)])
# Sensor errors, used from a random offset in each episode.
_BANK = np.random.default_rng(0).uniform(-1, 1, (8192, NOISE.size))

STATE_NAMES = (
    *(f"turning_{axis} [rad/s]" for axis in "xyz"),
    *(f"gravity_{axis}" for axis in "xyz"),
    *(f"{joint} minus home [rad]" for joint in JOINTS),
    *(f"{joint} [20 rad/s]" for joint in JOINTS),
    *(f"last_action_{joint}" for joint in JOINTS),
    *("command_x [m/s]", "command_y [m/s]", "command_turning [rad/s]"),
)
PRIVILEGED_NAMES = (*(f"velocity_{axis} [m/s]" for axis in "xyz"), "height [m]", *(f"{foot}_contact" for foot in FEET))


def _mirror() -> MirrorSymmetry:
    """Left-right symmetry; approximate, since the centre of mass is 2 mm to the left."""
    swapped = [(3 * right + joint, 3 * (right + 1) + joint) for right in (0, 2) for joint in range(3)]
    legs = SignedPermutation.of([-1, 1, 1] * 4, swapped)  # hip angles change sign
    body = SignedPermutation.of([-1, 1, -1, 1, -1, 1])  # turning, gravity
    feet = SignedPermutation.of([1] * 4, [(0, 1), (2, 3)])
    state = SignedPermutation.concat(body, legs, legs, legs, SignedPermutation.of([1, -1, -1]))
    privileged = SignedPermutation.concat(SignedPermutation.of([1, -1, 1, 1]), feet)  # velocity and height, contacts
    return MirrorSymmetry({"state": state, "privileged": privileged}, legs)


class Go1(MujocoTask):
    """Actions are position targets of the 12 motors around the standing posture; 50 Hz, 20 s, four commands.

    `state` contains measurements of the real robot, the last action and the command; `privileged` contains values of
    the simulator, for critics. A fall ends the episode. Success is tracking until the end with a mean error below 0.25
    m/s.

    Args:
        name: Registered id.
        reward: `sparse` rewards only tracking of the command, up to 1.5 per second. `shaped` adds `rewards.STYLE`, with
            a sum of at least 0, and a penalty for falling.
        ranges: Randomization per episode, in addition to initial state and commands.
        commands: Replaces the random commands by these `(4, 3)`.
    """

    array_api = batched_initial = True
    frame_skip = 4  # at 5 ms: 50 Hz
    max_episode_steps = 1000
    action_low: Array = -np.ones(12)
    action_high: Array = np.ones(12)
    action_names = tuple(f"{joint} target [{ACTION_SCALE} rad]" for joint in JOINTS)
    cameras = ("side", "front")
    has_velocity_command = True
    mirror = _mirror()

    def __init__(
        self, name: str, reward: str = "sparse", ranges: Randomization = NOMINAL, commands: Array | None = None
    ) -> None:
        self.name = name
        self.model = build_model()
        self.shaped = reward == "shaped"
        self.ranges = ranges
        self.commands = commands
        self.dt = self.frame_skip * float(self.model.opt.timestep)
        self.observation = {
            "state": TensorSpec((len(STATE_NAMES),), names=STATE_NAMES),
            "privileged": TensorSpec((len(PRIVILEGED_NAMES),), names=PRIVILEGED_NAMES),
        }
        names = (*(name.removesuffix("_joint") for name in JOINTS), *PUSHES)
        if [self.model.actuator(i).name for i in range(self.model.nu)] != [*names]:
            raise UserError(f"The actuators of the robot must be {', '.join(names)}, in this order.")
        self._gain = self.model.actuator_gainprm[: len(JOINTS), 0].copy()
        self._limit = self.model.actuator_forcerange[: len(JOINTS), 1].copy()
        self._mass = float(self.model.body(TRUNK).subtreemass[0])  # [kg]

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Sample posture, heading and velocity, the commands, and the randomization `ranges`."""
        heading = rng.uniform(-np.pi, np.pi)
        joints = HOME + rng.uniform(-0.1, 0.1, 12)  # (12,), or (B, 12) of a `BatchGenerator`
        base = rng.uniform(-0.2, 0.2, 6)
        commands = rng.uniform(COMMAND_LOW, COMMAND_HIGH, (SEGMENTS, 3)) * (
            rng.random((SEGMENTS, 1)) >= STANDING_FRACTION
        )
        angle = rng.uniform(-np.pi, np.pi, SEGMENTS)
        force = rng.uniform(0, self.ranges.push, SEGMENTS) * self._mass / PUSH_TIME  # [N]
        memory = {
            "commands": commands if self.commands is None else self.commands,
            "push": force[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1),
            "push_start": rng.uniform(1.0, SEGMENT - PUSH_TIME, SEGMENTS),  # [s] after the start of the segment
            "noise": rng.integers(len(_BANK)),
            "action": np.zeros(12),
            "last_action": np.zeros(12),
            "air_time": np.zeros(len(FEET)),
            "error": 0.0,
        }
        edits = edited_fields(self.ranges, self.model, rng)
        qpos = np.concatenate([upright(0 * heading, 0 * heading, HEIGHT, heading), joints], axis=-1)
        return ResetState(qpos, np.concatenate([base, np.zeros_like(joints)], axis=-1), memory, edits)

    def control(self, action: Array, state: BatchState) -> Array:
        """Targets of the motors and forces of pushes `(N, 14)`."""
        memory = _memory(state)
        memory["last_action"], memory["action"] = memory["action"], action
        xp, segment = namespace(action), _segment(state)
        memory["air_time"] = xp.where(feet_on_ground(state), 0.0, memory["air_time"] + self.dt)
        since = state.time - segment * SEGMENT - _of_segment(memory["push_start"], segment)
        pushing = (since >= 0) & (since < PUSH_TIME)
        force = _of_segment(memory["push"], segment) * pushing[:, None]
        return xp.concat([constant(HOME, action) + ACTION_SCALE * action, force], axis=1)

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Reward for tracking the observed command; a fall terminates."""
        memory, motion, command = _memory(after), read(after), _command(before)
        step = ControlStep(
            motion, command, action, memory["last_action"], self._torque(action, motion), memory["air_time"],
            motion.joints - constant(HOME, action),
        )  # fmt: skip
        xp = namespace(action)
        reward = tracking = rewards.total(rewards.TRACKING, step)
        fallen = (motion.gravity[:, 2] > -0.5) | (motion.height < 0.14)
        if self.shaped:
            reward = (reward + rewards.total(rewards.STYLE, step)).clip(min=0.0)
            reward = xp.where(fallen, reward + rewards.TERMINATION_PENALTY / self.dt, reward)
        error = xp.sqrt(xp.square(command[:, :2] - motion.velocity[:, :2]).sum(1))
        memory["error"] = memory["error"] + error
        last = xp.round(after.time / self.dt) >= self.max_episode_steps
        success = last & ~fallen & (memory["error"] < MAX_MEAN_ERROR * self.max_episode_steps)
        turning_error = xp.abs(command[:, 2] - motion.turning[:, 2])
        info = {
            "success": success,
            "velocity_error": error,
            "turning_error": turning_error,
            "power": rewards.power(step),
            "reward.tracking": tracking * self.dt,
        }
        return StepResult(reward * self.dt, fallen, info)

    def observe(self, state: BatchState) -> dict[str, Array]:
        """Measurements of the robot, and privileged observations of the simulator."""
        motion, memory = read(state), _memory(state)
        xp = namespace(state.qpos)
        offset = motion.joints - constant(HOME, motion.joints)
        measured = xp.concat([motion.turning, motion.gravity, offset, SPEED_SCALE * motion.speeds], axis=1)
        if self.ranges.noise:
            index = memory["noise"] + xp.round(state.time / self.dt)
            errors = _bank(measured)[xp.asarray(index, dtype=xp.int64) % len(_BANK)]
            measured = measured + constant(self.ranges.noise * NOISE, measured) * errors
        privileged = xp.concat([motion.velocity, motion.height[:, None], motion.contact], axis=1)
        state_vector = xp.concat([measured, memory["action"], _command(state)], axis=1)
        return {"state": state_vector, "privileged": privileged}

    def initial_memory(self, state: BatchState) -> dict[str, NDArray[np.generic]]:
        """Memory of a standing robot without simulated pushes or noise; `set_velocity_command` sets the command."""
        rows = len(state)
        return {
            "commands": np.zeros((rows, SEGMENTS, 3)),
            "push": np.zeros((rows, SEGMENTS, 2)),
            "push_start": np.zeros((rows, SEGMENTS)),
            "noise": np.zeros(rows, np.int64),
            "action": np.zeros((rows, 12)),
            "last_action": np.zeros((rows, 12)),
            "air_time": np.zeros((rows, len(FEET))),
            "error": np.zeros(rows),
        }

    def velocity_command(self, state: BatchState) -> Array:
        """Current command."""
        return _command(state)

    def set_velocity_command(self, memory: dict[str, NDArray[np.generic]], velocity_command: Array) -> None:
        """Write one command for all segments."""
        memory["commands"] = np.repeat(velocity_command[:, None], SEGMENTS, axis=1)

    def _torque(self, action: Array, motion: BaseMotion) -> Array:
        """Torques of the nominal motors at the end of the step `(N, 12)` [N m]."""
        gain, limit, home = (constant(value, action) for value in (self._gain, self._limit, HOME))
        return namespace(action).clip(gain * (home + ACTION_SCALE * action - motion.joints), -limit, limit)


def _memory(state: BatchState) -> dict[str, Array]:
    return cast(dict[str, Array], state.memory)


def _segment(state: BatchState) -> Any:
    """Index `(N,)` of the current command."""
    xp = namespace(state.time)
    return xp.asarray(xp.clip((state.time + 1e-6) // SEGMENT, None, SEGMENTS - 1), dtype=xp.int64)


def _of_segment(values: Any, segment: Any) -> Any:
    """Values `(N, ...)` of the current segment, of values `(N, SEGMENTS, ...)`."""
    if isinstance(values, np.ndarray):
        return values[np.arange(len(values)), segment]
    return torch.take_along_dim(values, segment.reshape(-1, *[1] * (values.dim() - 1)), dim=1)[:, 0]


def _command(state: BatchState) -> Array:
    """Current command `(N, 3)`."""
    return _of_segment(_memory(state)["commands"], _segment(state))


def _bank(like: Any) -> Any:
    """Sensor errors `(8192, 30)` in the library, type and device of `like`."""
    return _BANK if isinstance(like, np.ndarray) else _uploaded_bank(like.dtype, like.device)


@cache
def _uploaded_bank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_BANK).to(device, dtype)
