"""Base of the volleyball drills: drones, rotors, observations and contacts with the ball.

A drill defines start positions, rewards and ends of episodes; see `drills.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from robopolicy.contrib.drone_volleyball.flight import DroneState
from robopolicy.contrib.drone_volleyball.scene import (
    BALL_RADIUS,
    COURT,
    GRAVITY,
    PADDLE_RADIUS,
    UP,
    Airframe,
    build_model,
)
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

SPREAD: Array = np.array([0.5, 0.5, 0.2])  # [m] maximum distance of a drone's start to its anchor along each axis
TILT = 0.1 * np.pi  # [rad] maximum initial roll and pitch; the heading is uniform
THROTTLE_STEP = 0.43  # fraction of the way to the commanded throttle per control step
LOWEST = 0.4  # [m] height of a drone's centre below which it has crashed
LANDED = 0.15  # [m] height of the ball's centre below which it has landed
GROUND = 0.35  # [m] height below which a contact is with the ground
JOLT = 0.05  # [m/s] change of the ball's velocity per step, without gravity, that indicates a contact
CARRY = 4  # maximum contact duration in control steps is one less
DOUBLE = 0.4  # [s] minimum time between two contacts; less is a fault
HIGH = 3.5  # [m] height of the ball's centre that a good bump exceeds
FAULT = 1.0  # penalty of a fault

DRONE_NAMES = (
    *(f"{axis} minus anchor [m]" for axis in "xyz"),
    *(f"rotation_{column}{row}" for column in "xy" for row in "xyz"),
    *(f"velocity_{axis} [m/s]" for axis in "xyz"),
    *(f"turning_{axis} [rad/s]" for axis in "xyz"),
    *(f"throttle_{rotor}" for rotor in range(4)),
    *(f"ball minus drone_{axis} [m]" for axis in "xyz"),
)
BALL_NAMES = (*(f"ball_velocity_{axis} [m/s]" for axis in "xyz"), "since touch [s]", "flight top [m]")


@dataclass(frozen=True)
class ContactEvent:
    """Events of the ball in a control step; all `(N,)`."""

    bump: NDArray[np.bool_]  # the drone with the turn hit it with its paddle
    fault: NDArray[np.bool_]  # hit otherwise, by another drone, too soon after the last contact, or carried
    high: NDArray[np.bool_]  # the flight that ended here began with a bump and exceeded `HIGH`
    landed: NDArray[np.bool_]
    crashed: NDArray[np.bool_]  # a drone, into ground or net, or above `highest`
    outside: NDArray[np.bool_]  # the ball, outside the court or too high


class VolleyTask(MujocoTask):
    """Base class of the drills. Actions are throttles of all rotors at 50 Hz, for 10 s.

    An action of -1 stops a rotor and 1 is full thrust, linear in between (throttle squared); rotors follow it with a
    first-order lag. Contacts are detected by a change of the ball's velocity that gravity does not explain, so that
    none is missed between two steps.

    Args:
        reward: `sparse` rewards bumps or success and penalises faults; `shaped` adds hints.
    """

    anchors: ClassVar[Array]  # (D, 3) [m] home positions of the drones
    drop: ClassVar[float] = 2.0  # [m] initial height of the ball above the first drone
    highest: ClassVar[float] = np.inf  # [m] height above which a drone has crashed
    ball_highest: ClassVar[float] = 16.0  # [m]
    has_target: ClassVar[bool] = False

    frame_skip = 10  # at 2 ms, i.e. 50 Hz
    max_episode_steps = 500
    cameras = ("close", "court")
    array_api = True

    def __init__(self, reward: str = "sparse") -> None:
        self.drones = len(self.anchors)
        self.model = build_model(self.drones, target=self.has_target)
        self.frame = Airframe.of(self.model)
        self.shaped = reward == "shaped"
        self.dt = self.frame_skip * float(self.model.opt.timestep)
        self.action_low, self.action_high = -np.ones(4 * self.drones), np.ones(4 * self.drones)
        self.action_names = tuple(f"{who}rotor{i} thrust" for who in self._prefixes() for i in range(4))
        names = (
            *(f"{who}{name}" for who in self._prefixes() for name in DRONE_NAMES),
            *(f"{who}turn" for who in self._prefixes() if who),
            *BALL_NAMES,
            *self.extra_names(),
        )
        self.observation = {"state": TensorSpec((len(names),), names=names)}
        self.mirror = self._mirror()
        joints = [self.model.joint(f"drone{i}_drone") for i in range(self.drones)]
        self._poses = [slice(j.qposadr[0], j.qposadr[0] + 7) for j in joints]
        self._motions = [slice(j.dofadr[0], j.dofadr[0] + 6) for j in joints]
        ball = self.model.joint("ball")
        self._ball_pose, self._ball_motion = int(ball.qposadr[0]), int(ball.dofadr[0])
        level = self.frame.hover() / self.frame.max_thrust
        self._hover = np.tile(np.sqrt(level), (self.drones, 1))  # (D, 4) throttles

    @abstractmethod
    def evaluate_step(self, event: ContactEvent, action: Array, before: BatchState, after: BatchState) -> StepResult:
        """Reward, end and success of a step; `memory` of `after` already includes the contact."""

    @abstractmethod
    def goal(self, state: BatchState) -> Array:
        """Target `(N, D, 3)` [m] of each drone's bump; used by experts."""

    def turn(self, state: BatchState) -> NDArray[np.bool_]:
        """Whether it is a drone's turn to hit the ball `(N, D)`."""
        turn = memory_of(state)["turn"][:, None]
        return turn == constant(np.arange(float(self.drones)), turn)

    def extra_names(self) -> tuple[str, ...]:
        """Names of the values of `extra`."""
        return ()

    def extra(self, state: BatchState) -> list[Array]:
        """Additional observations of a drill, `(N, ...)` each."""
        return []

    def extra_sign(self) -> list[float]:
        """Signs of `extra` under the mirror symmetry."""
        return []

    def draw(self, rng: np.random.Generator) -> dict[str, float]:
        """Initial positions of the scene's other joints."""
        return {}

    def pose(self, state: BatchState) -> DroneState:
        """Motion of the drones `(N, D, ...)`."""
        xp = namespace(state.qpos)
        poses = xp.stack([state.qpos[:, part] for part in self._poses], 1)
        motions = xp.stack([state.qvel[:, part] for part in self._motions], 1)
        return DroneState(poses[..., :3], matrix(poses[..., 3:]), motions[..., :3], motions[..., 3:])

    def ball(self, state: BatchState) -> tuple[Array, Array]:
        """Position [m] and velocity [m/s] of the ball `(N, 3)`."""
        at, going = self._ball_pose, self._ball_motion
        return state.qpos[:, at : at + 3], state.qvel[:, going : going + 3]

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Draw the drones around their anchors, with the ball falling above the first one."""
        qpos, qvel = self.model.qpos0.copy(), np.zeros(self.model.nv)
        for part, anchor in zip(self._poses, self.anchors, strict=True):
            roll, pitch, yaw = rng.uniform([-TILT, -TILT, 0.0], [TILT, TILT, 2 * np.pi]) / 2
            qpos[part.start : part.start + 3] = anchor + rng.uniform(-SPREAD, SPREAD)
            qpos[part.start + 3 : part.stop] = _quaternion(roll, pitch, yaw)
        first, ball = self._poses[0].start, self._ball_pose
        qpos[ball : ball + 3] = qpos[first : first + 3] + self.drop * UP
        for joint, value in self.draw(rng).items():
            qpos[self.model.joint(joint).qposadr[0]] = value
        memory: dict[str, NDArray[np.generic] | float] = {
            "throttle": self._hover.copy(),
            "action": (2 * np.square(self._hover) - 1).ravel(),
            "turn": 0.0,
            "touching": 0.0,  # control steps of the current contact
            "since": 10.0,  # [s] since the start of the last contact
            "bumps": 0.0,
            "top": 0.0,  # [m] maximum height since the last bump; 0 before the first
        }
        return ResetState(qpos, qvel, memory)

    def control(self, action: Array, state: BatchState) -> Array:
        """Rotor thrusts `(N, 4 D)` [N], with throttles that follow `action` `(N, 4 D)`."""
        memory, xp = memory_of(state), namespace(action)
        target = xp.sqrt((action + 1) / 2).reshape(memory["throttle"].shape)
        memory["throttle"] = memory["throttle"] + THROTTLE_STEP * (target - memory["throttle"])
        return self.frame.max_thrust * xp.square(memory["throttle"]).reshape(len(state), -1)

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Evaluate the step, and add the change of the action to the info."""
        outcome = self.evaluate_step(self._detect_contact(before, after), action, before, after)
        memory = memory_of(after)
        change = namespace(action).abs(action - memory["action"]).mean(1)
        memory["action"] = action
        outcome.info.update({"bumps": 1.0 * memory["bumps"], "action_change": change})  # a copy
        return outcome

    def observe(self, state: BatchState) -> dict[str, Array]:
        """The observation `state`: drones, turns and ball."""
        memory, pose, (ball, velocity) = memory_of(state), self.pose(state), self.ball(state)
        xp, anchors = namespace(ball), constant(self.anchors, ball)
        columns = pose.rotation.swapaxes(-1, -2)[:, :, :2].reshape(len(state), self.drones, 6)
        near = (pose.position - anchors, columns, pose.velocity, pose.turning, memory["throttle"])
        drones = xp.concat([*near, ball[:, None] - pose.position], axis=-1).reshape(len(state), -1)
        turn = [self.turn(state)] if self.drones > 1 else []
        since = xp.clip(memory["since"], None, 1.0)
        parts = [drones, *turn, velocity, since[:, None], memory["top"][:, None], *self.extra(state)]
        return {"state": xp.concat(parts, axis=1)}

    def _detect_contact(self, before: BatchState, after: BatchState) -> ContactEvent:
        """Detect contacts with the ball, and update the counts in the memory."""
        memory, pose = memory_of(after), self.pose(after)
        old, slow = self.ball(before)
        ball, fast = self.ball(after)
        xp = namespace(ball)
        jolt = length(fast - slow + constant(GRAVITY * self.dt * UP, fast)) > JOLT
        landed = (ball[:, 2] < LANDED) | (jolt & (ball[:, 2] < GROUND))
        jolt &= ~landed
        new = jolt & (memory["touching"] == 0)
        soon = new & (memory["since"] < DOUBLE)
        memory["touching"] = xp.where(jolt, memory["touching"] + 1, 0.0)
        paddles = _on_paddle(self.pose(before), old) | _on_paddle(pose, ball)  # (N, D)
        legal = (paddles & self.turn(after)).any(1)
        bump = new & legal & ~soon
        fault = (new & ~bump) | (memory["touching"] > CARRY)
        high = bump & (memory["top"] > HIGH)
        memory["since"] = xp.where(new, 0.0, memory["since"] + self.dt)
        memory["bumps"] = memory["bumps"] + bump
        top = xp.where(bump, 0.0, memory["top"])
        memory["top"] = xp.where(memory["bumps"] > 0, xp.maximum(top, ball[:, 2]), 0.0)
        memory["turn"] = xp.where(bump, (memory["turn"] + 1) % self.drones, memory["turn"])
        place = pose.position
        off = (place[..., 2] < LOWEST) | (place[..., 2] > self.highest) | (place[..., 0] < PADDLE_RADIUS)
        crashed: NDArray[np.bool_] = off.any(1)  # type: ignore[assignment]
        outside = (ball[:, 2] > self.ball_highest) | (xp.abs(ball[:, :2]) > constant(COURT / 2, ball)).any(1)
        return ContactEvent(bump, fault, high, landed, crashed, outside)

    def _prefixes(self) -> tuple[str, ...]:
        return ("",) if len(self.anchors) == 1 else tuple(f"drone{i} " for i in range(len(self.anchors)))

    def _mirror(self) -> MirrorSymmetry:
        """Left-right symmetry, which exchanges a drone's rotors, and two drones."""
        vector, turning = [1, -1, 1], [-1, 1, -1]
        drone = [*vector, *vector, *turning, *vector, *turning, 1, 1, 1, 1, *vector]  # as in DRONE_NAMES
        signs = [*drone * self.drones, *[1] * (self.drones if self.drones > 1 else 0), *vector, 1, 1]
        exchanged = [(17, 15), (18, 16)]  # throttles of rotors on the right, on the left
        rotors = [(2, 0), (3, 1)]
        if self.drones == 2:
            size, partner = len(drone), {i: i for i in range(len(drone))} | {15: 17, 16: 18, 17: 15, 18: 16}
            exchanged = [(i, size + partner[i]) for i in range(size)] + [(2 * size, 2 * size + 1)]
            rotors = [(0, 6), (1, 7), (2, 4), (3, 5)]
        state = SignedPermutation.of([*signs, *self.extra_sign()], exchanged)
        return MirrorSymmetry({"state": state}, SignedPermutation.of([1] * 4 * self.drones, rotors))


def memory_of(state: BatchState) -> dict[str, Array]:
    """The task's memory: `throttle` `(N, D, 4)`, `action` `(N, 4 D)`, and counts `(N,)`, see `VolleyTask.initial`."""
    return cast(dict[str, Array], state.memory)


def _on_paddle(pose: DroneState, ball: Array) -> NDArray[np.bool_]:
    """Whether the ball is closely above the paddle, (N, D)."""
    local = (pose.rotation.swapaxes(-1, -2) @ (ball[:, None] - pose.position)[..., None])[..., 0]
    above = (local[..., 2] > 0.0) & (local[..., 2] < 5 * BALL_RADIUS)
    return above & (length(local[..., :2]) < PADDLE_RADIUS)


def length(vectors: Array) -> Array:
    """Euclidean norm `(...)` of `vectors` `(..., D)`."""
    xp = namespace(vectors)
    return xp.sqrt(xp.square(vectors).sum(-1))


def _quaternion(roll: float, pitch: float, yaw: float) -> Array:
    """Quaternion of half angles, with rotations about z, then y, then x."""
    cr, sr, cp, sp, cy, sy = np.cos(roll), np.sin(roll), np.cos(pitch), np.sin(pitch), np.cos(yaw), np.sin(yaw)
    return np.array(
        [
            cr * cp * cy + sr * sp * sy,
            sr * cp * cy - cr * sp * sy,
            cr * sp * cy + sr * cp * sy,
            cr * cp * sy - sr * sp * cy,
        ]
    )


def matrix(quaternion: Array) -> Array:
    """Rotation matrices `(..., 3, 3)` of unit quaternions `(..., 4)`, w first."""
    xp = namespace(quaternion)
    w, x, y, z = (quaternion[..., i] for i in range(4))
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return xp.stack([xp.stack(row, -1) for row in rows], -2)
