"""Mapping between the state of a MuJoCo model and messages, for the simulated robot and the bridge.

Keys of sources: `joints` (JointState of the robot), `scene` (JointState of all other hinges and slides, such as a
drawer), `object.<name>` (PoseStamped of every free body), for a free base `imu` (Imu) and `odometry` (Odometry), and
for a velocity command `operator` (TwistStamped).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy_robots.message import Message
from robopolicy_robots.messages import (
    Header,
    Imu,
    JointState,
    Odometry,
    Point,
    Pose,
    PoseStamped,
    PoseWithCovariance,
    Quaternion,
    Time,
    Twist,
    TwistStamped,
    TwistWithCovariance,
    Vector3,
)
from robopolicy_robots.robot import JOINTS

Array = NDArray[np.float64]
SCENE, IMU, ODOMETRY, OPERATOR = "scene", "imu", "odometry", "operator"
OBJECT = "object."  # prefix of the keys of object poses
WORLD = "world"  # frame of every pose

_HINGE_OR_SLIDE = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)


class MujocoTopics:
    """Names and indices of all measured and commanded quantities of a model.

    Args:
        model: Model whose joints with actuators are the robot; all others are the scene.
        prefix: Prefix of joint names in messages, as in `panda_joint1`.
    """

    def __init__(self, model: mujoco.MjModel, prefix: str = "") -> None:
        driven = {i: joints for i in range(model.nu) if (joints := _moved_by(model, i))}
        robot = sorted({joint for joints in driven.values() for joint in joints})
        free = [i for i in range(model.njnt) if model.jnt_type[i] == mujoco.mjtJoint.mjJNT_FREE]
        roots = {int(model.body_rootid[model.jnt_bodyid[joint]]) for joint in robot}
        base = [joint for joint in free if int(model.jnt_bodyid[joint]) in roots]
        scene = [i for i in range(model.njnt) if model.jnt_type[i] in _HINGE_OR_SLIDE and i not in robot]
        first = [joints[0] for joints in driven.values()]
        self.actuators: NDArray[np.intp] = np.array(list(driven), np.intp)  # (J,) actuators that move joints
        self.commanded = tuple(prefix + model.joint(joint).name for joint in first)  # (J,) names
        self.targets: NDArray[np.intp] = model.jnt_qposadr[first].astype(np.intp)  # (J,) indices in qpos
        self.is_gripper: NDArray[np.bool_] = np.array([len(joints) > 1 for joints in driven.values()])  # (J,) fingers
        self.robot = _Scalars(model, robot, prefix)
        self.scene = _Scalars(model, scene)
        self.objects = {OBJECT + model.joint(i).name: _Free(model, i) for i in free if i not in base}
        self.base = _Free(model, base[0]) if base else None

    @property
    def sources(self) -> dict[str, type[Message]]:
        """Required sources and their message types."""
        found: dict[str, type[Message]] = {JOINTS: JointState}
        if self.scene.names:
            found[SCENE] = JointState
        if self.base is not None:
            found[IMU] = Imu
        return found | dict.fromkeys(self.objects, PoseStamped)

    def messages(self, qpos: Array, qvel: Array, stamp: Time) -> dict[str, Message]:
        """Messages by source for the state `qpos` `(nq,)`, `qvel` `(nv,)`."""
        header = Header(stamp, WORLD)
        found: dict[str, Message] = {JOINTS: self.robot.message(qpos, qvel, header)}
        if self.scene.names:
            found[SCENE] = self.scene.message(qpos, qvel, header)
        if self.base is not None:
            found |= {IMU: self.base.imu(qpos, qvel, header), ODOMETRY: self.base.odometry(qpos, qvel, header)}
        return found | {key: PoseStamped(header, body.pose(qpos)) for key, body in self.objects.items()}

    def read(self, messages: Mapping[str, Message], qpos: Array, qvel: Array) -> None:
        """Write `messages` to `qpos` `(nq,)` and `qvel` `(nv,)`; raises `UserError` if a source or joint is missing."""
        missing = [key for key in self.sources if key not in messages]
        if missing:
            raise UserError(f"The robot does not report {', '.join(missing)}; it reports {', '.join(messages) or '-'}.")
        self.robot.read(messages[JOINTS], qpos, qvel)
        if self.scene.names:
            self.scene.read(messages[SCENE], qpos, qvel)
        for key, body in self.objects.items():
            body.read_pose(messages[key].pose, qpos)  # type: ignore[attr-defined]
        if self.base is not None:
            self.base.read_motion(messages[IMU], messages.get(ODOMETRY), qpos, qvel)


def to_twist(command: Array, stamp: Time) -> TwistStamped:
    """Message of a velocity command `(3,)`: forward, left [m/s], yaw rate [rad/s]."""
    forward, left, yaw = command.tolist()
    return TwistStamped(Header(stamp, "base"), Twist(Vector3(forward, left, 0.0), Vector3(0.0, 0.0, yaw)))


def from_twist(message: Message) -> Array:
    """Velocity command `(3,)` of a message."""
    assert isinstance(message, TwistStamped)
    linear, angular = message.twist.linear, message.twist.angular
    return np.array([linear.x, linear.y, angular.z])


def prefix_of(model: mujoco.MjModel, joints: Sequence[str]) -> str:
    """Prefix of `joints` relative to the joint names of the model; raises `UserError` for other joints."""
    own = MujocoTopics(model).commanded
    prefix = joints[0].removesuffix(own[0]) if joints and own else ""
    if tuple(prefix + name for name in own) != tuple(joints):
        raise UserError(f"The task moves the joints {_join(own)}, but the robot has {_join(joints)}.")
    return prefix


class _Scalars:
    """Hinges and slides of one JointState."""

    def __init__(self, model: mujoco.MjModel, joints: Sequence[int], prefix: str = "") -> None:
        self.names = tuple(prefix + model.joint(joint).name for joint in joints)
        self.qpos: NDArray[np.intp] = model.jnt_qposadr[list(joints)].astype(np.intp)
        self.qvel: NDArray[np.intp] = model.jnt_dofadr[list(joints)].astype(np.intp)

    def message(self, qpos: Array, qvel: Array, header: Header) -> JointState:
        return JointState(header, self.names, qpos[self.qpos], qvel[self.qvel])

    def read(self, message: Message, qpos: Array, qvel: Array) -> None:
        assert isinstance(message, JointState)
        index = {name: i for i, name in enumerate(message.name)}
        missing = [name for name in self.names if name not in index]
        if missing or len(message.position) != len(message.name):
            lacking, found = ", ".join(missing) or "positions", _join(message.name)
            raise UserError(f"The joint state lacks {lacking}; it contains {found}.")
        order = [index[name] for name in self.names]
        qpos[self.qpos] = message.position[order]
        if len(message.velocity) == len(message.name):
            qvel[self.qvel] = message.velocity[order]


class _Free:
    """Free body: an object, or the base of a robot."""

    def __init__(self, model: mujoco.MjModel, joint: int) -> None:
        start, speed = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
        self.position, self.turn = slice(start, start + 3), slice(start + 3, start + 7)
        self.linear, self.angular = slice(speed, speed + 3), slice(speed + 3, speed + 6)

    def pose(self, qpos: Array) -> Pose:
        return Pose(Point(*qpos[self.position].tolist()), _quaternion(qpos[self.turn]))

    def read_pose(self, pose: Pose, qpos: Array) -> None:
        at = pose.position
        qpos[self.position] = at.x, at.y, at.z
        qpos[self.turn] = _turn(pose.orientation)

    def imu(self, qpos: Array, qvel: Array, header: Header) -> Imu:
        turning = Vector3(*qvel[self.angular].tolist())
        return Imu(header, _quaternion(qpos[self.turn]), angular_velocity=turning)

    def odometry(self, qpos: Array, qvel: Array, header: Header) -> Odometry:
        moving = Vector3(*(_matrix(qpos[self.turn]).T @ qvel[self.linear]).tolist())  # in the base's frame
        twist = TwistWithCovariance(Twist(moving, Vector3(*qvel[self.angular].tolist())))
        return Odometry(header, "base", PoseWithCovariance(self.pose(qpos)), twist)

    def read_motion(self, imu: Message, odometry: Message | None, qpos: Array, qvel: Array) -> None:
        assert isinstance(imu, Imu)
        qpos[self.turn] = _turn(imu.orientation)
        turning = imu.angular_velocity
        qvel[self.angular] = turning.x, turning.y, turning.z
        if isinstance(odometry, Odometry):
            at, moving = odometry.pose.pose.position, odometry.twist.twist.linear
            qpos[self.position] = at.x, at.y, at.z
            qvel[self.linear] = _matrix(qpos[self.turn]) @ np.array([moving.x, moving.y, moving.z])


def _moved_by(model: mujoco.MjModel, actuator: int) -> list[int]:
    """Hinges and slides moved by an actuator, directly or by a tendon; the first one is its target."""
    kind, target = model.actuator_trntype[actuator], int(model.actuator_trnid[actuator, 0])
    if kind == mujoco.mjtTrn.mjTRN_JOINT:
        return [target] if model.jnt_type[target] in _HINGE_OR_SLIDE else []
    if kind != mujoco.mjtTrn.mjTRN_TENDON:
        return []
    wraps = range(model.tendon_adr[target], model.tendon_adr[target] + model.tendon_num[target])
    return [int(model.wrap_objid[w]) for w in wraps if model.wrap_type[w] == mujoco.mjtWrap.mjWRAP_JOINT]


def _quaternion(turn: Array) -> Quaternion:
    w, x, y, z = turn.tolist()
    return Quaternion(x, y, z, w)


def _turn(quaternion: Quaternion) -> tuple[float, float, float, float]:
    return quaternion.w, quaternion.x, quaternion.y, quaternion.z


def _matrix(turn: Array) -> Array:
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, turn)
    return matrix.reshape(3, 3)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") or "none"
