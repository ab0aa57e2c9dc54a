"""Base class of the Panda tasks: scene, controller, observation of the arm, and reward.

A task adds a scene file, initial positions, scene observations and success; see `lift.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple, cast

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
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
from robopolicy_tasks.manipulation import kinematics
from robopolicy_tasks.manipulation.kinematics import Pose
from robopolicy_tasks.manipulation.scene import ARM_JOINTS, FINGER_JOINTS, build_model

POSITION_STEP = 0.03  # [m] for an action of 1; at most 0.6 m/s along each axis
YAW_STEP = 0.12  # [rad] for an action of 1; at most 2.4 rad/s
FINGER_STEP = 0.012  # [m] maximum lead of the finger targets; sets closing speed (0.2 m/s) and grip force (18 N)
MAX_LEAD = 0.04  # [m] maximum lead of the commanded position over the tool along each axis
WORKSPACE_LOW: Array = np.array([0.30, -0.35, 0.012])  # [m] of the tool; fingertips stay 2 mm above the table
WORKSPACE_HIGH: Array = np.array([0.70, 0.35, 0.35])  # [m]
YAW_LIMIT = 1.3  # [rad] in both directions, within the range of the last joint

ARM_NAMES = (
    *(f"panda_joint{i} [rad]" for i in range(1, 8)),
    *(f"panda_joint{i} [rad/s]" for i in range(1, 8)),
    *(f"tool_{axis} [m]" for axis in "xyz"),
    *(f"tool_rotation_{column}{row}" for column in "xy" for row in "xyz"),
    "gripper_width [m]",
    *(f"commanded_minus_tool_{axis} [m]" for axis in "xyz"),
)


class Arm(NamedTuple):
    """Configuration of the robot, from positions without sensor lag."""

    joints: Array  # (N, 7) [rad]
    velocities: Array  # (N, 7) [rad/s]
    tool: Pose
    width: Array  # (N,) [m] between the finger pads


def commanded(state: BatchState) -> dict[str, Array]:
    """Memory of the controller: `position` `(N, 3)` [m], `yaw` `(N,)` [rad], `joints` `(N, 7)` [rad], `held` `(N,)`."""
    return cast(dict[str, Array], state.memory)


class PandaTask(MujocoTask):
    """Base class of the Panda tasks. The action is dx, dy, dz, yaw and gripper (-1 open, 1 closed), all in [-1, 1].

    The tool points straight down. Actions move a commanded tool position and heading in memory, which inverse
    kinematics converts to joint position targets within joint and velocity limits. The `sparse` reward is 1 on the step
    that solves the task. `shaped` adds the change of `shaping_potential`, a potential difference (Ng et al. 1999),
    which does not reward a delay of success.
    """

    scene: ClassVar[str]  # file in `sim_assets`
    scene_names: ClassVar[tuple[str, ...]]  # names of the values of `scene_obs`
    posture: ClassVar[Array] = np.array([0.0, -0.13, 0.0, -2.526, 0.0, 2.396, np.pi / 4])  # [rad] tool at 0.45, 0, 0.22
    hold_steps: ClassVar[int] = 3  # consecutive control steps that must satisfy `is_success`

    array_api = batched_initial = True
    frame_skip = 10  # at 5 ms: 20 Hz
    max_episode_steps = 60
    action_low: Array = -np.ones(5)
    action_high: Array = np.ones(5)
    action_names = ("tool_dx [0.03 m]", "tool_dy [0.03 m]", "tool_dz [0.03 m]", "tool_dyaw [0.12 rad]", "gripper")
    cameras = ("front", "wrist")
    workspace = (np.array([0.2, -0.4, 0.004]), np.array([0.85, 0.4, 0.35]))  # without the table

    def __init__(self, reward: Literal["sparse", "shaped"] = "sparse") -> None:
        self.model = build_model(self.scene)
        self.shaped = reward == "shaped"
        names = (*ARM_NAMES, *self.scene_names)
        self.observation = {"state": TensorSpec((len(names),), names=names)}
        self._joint_step = kinematics.JOINT_VELOCITY * self.frame_skip * self.model.opt.timestep  # [rad]
        self._arm_qpos = self.qpos_range(*ARM_JOINTS)
        self._arm_qvel = _consecutive([self.model.joint(name).dofadr[0] for name in ARM_JOINTS])
        self._finger_qpos = self.qpos_range(*FINGER_JOINTS)
        self._arm_actuators = _consecutive([self.model.actuator(f"actuator{i}").id for i in range(1, 8)])
        self._gripper = int(self.model.actuator("actuator8").id)

    @abstractmethod
    def reset_scene(self, rng: np.random.Generator) -> dict[str, Array]:
        """Sample initial positions of the scene joints: `{joint name: (..., nq of that joint)}`.

        A `BatchGenerator` adds a leading dimension.
        """

    @abstractmethod
    def scene_obs(self, arm: Arm, state: BatchState) -> Array:
        """Observation of the scene `(N, len(scene_names))`."""

    @abstractmethod
    def is_success(self, arm: Arm, state: BatchState) -> NDArray[np.bool_]:
        """Whether the goal is currently met `(N,)`; success needs `hold_steps` consecutive control steps."""

    @abstractmethod
    def shaping_potential(self, arm: Arm, state: BatchState) -> Array:
        """Progress of the task `(N,)` from 0 to 1, the potential of the shaped reward."""

    def qpos_range(self, *joints: str) -> slice:
        """Slice of the coordinates of adjacent `joints` in qpos."""
        width = {mujoco.mjtJoint.mjJNT_FREE: 7, mujoco.mjtJoint.mjJNT_BALL: 4}
        handles = [self.model.joint(name) for name in joints]
        addresses = [h.qposadr[0] + np.arange(width.get(mujoco.mjtJoint(h.type[0]), 1)) for h in handles]
        return _consecutive(np.concatenate(addresses).tolist())

    def arm(self, state: BatchState) -> Arm:
        """Configuration of the robot."""
        joints = state.qpos[:, self._arm_qpos]
        width = state.qpos[:, self._finger_qpos].sum(axis=1)
        return Arm(joints, state.qvel[:, self._arm_qvel], kinematics.forward(joints), width)

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Sample the arm around `posture` and the scene, with open gripper."""
        joints = self.posture + rng.uniform(-0.06, 0.06, 7)  # (7,), or (B, 7) of a `BatchGenerator`
        qpos = self.model.qpos0.copy()
        if joints.ndim > 1:
            qpos = np.tile(qpos, (len(joints), 1))
        qpos[..., self._arm_qpos] = joints
        qpos[..., self._finger_qpos] = kinematics.FINGER_TRAVEL
        for name, value in self.reset_scene(rng).items():
            qpos[..., self.qpos_range(name)] = value
        rows = np.atleast_2d(qpos)
        qvel, sensors = (np.zeros((len(rows), size)) for size in (self.model.nv, self.model.nsensordata))
        memory = self.initial_memory(BatchState(self.model, rows, qvel, np.zeros(len(rows)), sensors, {}))
        if joints.ndim > 1:
            return ResetState(qpos, qvel, {**memory})
        return ResetState(qpos, qvel[0], {key: value[0] for key, value in memory.items()})

    def initial_memory(self, state: BatchState) -> dict[str, NDArray[np.generic]]:
        """Controller memory that commands the current pose of the arm."""
        arm = self.arm(state)
        memory = {"joints": arm.joints.copy(), "position": arm.tool.position, "yaw": arm.tool.yaw}
        return {**memory, "held": np.zeros(len(state))}

    def control(self, action: Array, state: BatchState) -> Array:
        """Move the commanded tool pose by `action` `(N, 5)` and return actuator controls `(N, nu)`."""
        memory, arm = commanded(state), self.arm(state)
        xp, tool = namespace(state.qpos), arm.tool.position
        low, high = constant(WORKSPACE_LOW, tool), constant(WORKSPACE_HIGH, tool)
        memory["held"] = xp.where(self.is_success(arm, state), memory["held"] + 1.0, 0.0)
        position = xp.clip(memory["position"] + POSITION_STEP * action[:, :3], low, high)
        position = tool + xp.clip(position - tool, -MAX_LEAD, MAX_LEAD)
        yaw = xp.clip(memory["yaw"] + YAW_STEP * action[:, 3], -YAW_LIMIT, YAW_LIMIT)
        joints = kinematics.inverse_downward(memory["joints"], position, yaw, self.posture)
        step = constant(self._joint_step, joints)
        joints = xp.clip(joints, memory["joints"] - step, memory["joints"] + step)
        memory["position"], memory["yaw"], memory["joints"] = position, yaw, joints
        control = xp.zeros((len(state), self.model.nu), dtype=joints.dtype, device=joints.device)
        control[:, self._arm_actuators] = joints
        finger = 0.5 * arm.width
        target = 0.5 * (1.0 - action[:, 4]) * kinematics.FINGER_TRAVEL
        control[:, self._gripper] = xp.clip(target, finger - FINGER_STEP, finger + FINGER_STEP)
        return control

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Reward 1 and termination on success."""
        arm = self.arm(after)
        success = self.is_success(arm, after) & (commanded(after)["held"] >= self.hold_steps - 1)
        reward = namespace(success).where(success, 1.0, 0.0)
        if self.shaped:
            reward += self.shaping_potential(arm, after) - self.shaping_potential(self.arm(before), before)
        return StepResult(reward, success, {"success": success})

    def observe(self, state: BatchState) -> dict[str, Array]:
        """Observation `state`: the arm, then the scene."""
        arm = self.arm(state)
        rotation = arm.tool.rotation.mT[:, :2].reshape(len(state), 6)
        lead = commanded(state)["position"] - arm.tool.position
        parts = (arm.joints, arm.velocities, arm.tool.position, rotation, arm.width[:, None], lead)
        return {"state": namespace(lead).concat([*parts, self.scene_obs(arm, state)], axis=1)}


def _consecutive(numbers: list[int]) -> slice:
    """Convert `numbers` to a slice, as indexing by slices returns views for every library and device."""
    first = int(numbers[0])
    if [int(number) for number in numbers] != list(range(first, first + len(numbers))):
        raise UserError(f"The joints and actuators of the robot must be numbered consecutively, got {numbers}.")
    return slice(first, first + len(numbers))
