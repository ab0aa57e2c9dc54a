"""What all volley drills share: the drones, their rotors, the observation, and who touched the ball.

A drill says where things start, what a touch is worth and when it is over; see `drills.py`.
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
from robopolicy.sim.backends.mujoco.task import Array, BatchState, MujocoTask, ResetState, StepResult
from robopolicy.sim.contract import TensorSpec

SPREAD: Array = np.array([0.5, 0.5, 0.2])  # [m] a drone starts this far from its anchor along each axis at most
TILT = 0.1 * np.pi  # [rad] roll and pitch it starts with at most; its heading is any
THROTTLE_STEP = 0.43  # share of the way to the commanded throttle that rotors go in one control step
LOWEST = 0.4  # [m] height of a drone's centre, below which it counts as crashed
LANDED = 0.15  # [m] height of the ball's centre, below which it counts as landed
GROUND = 0.35  # [m] height below which a touch is one of the ground
JOLT = 0.05  # [m/s] change of the ball's velocity in one step, gravity aside, that tells a touch
CARRY = 4  # control steps in touch that are too many
DOUBLE = 0.4  # [s] between two touches, below which the second is a fault
HIGH = 3.5  # [m] a good bump sends the ball higher than that; its centre
FAULT = 1.0  # reward taken off for a fault

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
class Touch:
    """What happened to the ball in a control step; all `(N,)`."""

    bump: NDArray[np.bool_]  # the drone whose turn it is struck it with its paddle
    fault: NDArray[np.bool_]  # struck otherwise, by another, too soon after the last touch, or carried
    high: NDArray[np.bool_]  # the flight that ended here began with a bump and went above `HIGH`
    landed: NDArray[np.bool_]
    crashed: NDArray[np.bool_]  # a drone, into the ground, the net or the air above `highest`
    outside: NDArray[np.bool_]  # the ball, of the court or of the height allowed


class VolleyTask(MujocoTask):
    """Base class. Actions are throttles of all rotors, 50 Hz, 10 s.

    An action of -1 stops a rotor and 1 is full thrust, which is linear between (throttle squared); rotors approach
    it by a first-order lag. A touch is seen by what it does to the
    ball's velocity, which gravity does not explain, so that none falls between two steps.

    Args:
        reward: `sparse` pays for bumps or for success and takes off for faults; `shaped` adds hints.
    """

    anchors: ClassVar[Array]  # (D, 3) [m] where the drones stay
    drop: ClassVar[float] = 2.0  # [m] height of the ball above the first drone when the episode starts
    highest: ClassVar[float] = np.inf  # [m] above which a drone counts as crashed
    ball_highest: ClassVar[float] = 16.0  # [m]
    has_target: ClassVar[bool] = False

    frame_skip = 10  # at 2 ms, so 50 Hz
    max_episode_steps = 500
    cameras = ("close", "court")

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
    def judge(self, touch: Touch, action: Array, before: BatchState, after: BatchState) -> StepResult:
        """Reward, end and success of a step; `memory` of `after` already counts the touch."""

    @abstractmethod
    def goal(self, state: BatchState) -> Array:
        """Where each drone should send the ball `(N, D, 3)` [m]; experts read it."""

    def turn(self, state: BatchState) -> NDArray[np.bool_]:
        """Whether the ball is a drone's to strike `(N, D)`."""
        return recall(state)["turn"][:, None] == np.arange(self.drones)

    def extra_names(self) -> tuple[str, ...]:
        """Names of what `extra` adds to the observation."""
        return ()

    def extra(self, state: BatchState) -> list[Array]:
        """What a drill adds to the observation, `(N, ...)` each."""
        return []

    def extra_sign(self) -> list[float]:
        """Signs of `extra` in the mirror."""
        return []

    def draw(self, rng: np.random.Generator) -> dict[str, float]:
        """Positions of the scene's other joints."""
        return {}

    def pose(self, state: BatchState) -> DroneState:
        """Motion of the drones `(N, D, ...)`."""
        poses = np.stack([state.qpos[:, part] for part in self._poses], 1)
        motions = np.stack([state.qvel[:, part] for part in self._motions], 1)
        rotation = np.stack([matrix(poses[:, i, 3:]) for i in range(self.drones)], 1)
        return DroneState(poses[..., :3], rotation, motions[..., :3], motions[..., 3:])

    def ball(self, state: BatchState) -> tuple[Array, Array]:
        """Position [m] and velocity [m/s] of the ball `(N, 3)`."""
        at, going = self._ball_pose, self._ball_motion
        return state.qpos[:, at : at + 3], state.qvel[:, going : going + 3]

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Draw the drones about their anchors; the ball hangs above the first one and falls."""
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
            "touching": 0.0,  # control steps for which the touch lasts by now
            "since": 10.0,  # [s] since the last touch began
            "bumps": 0.0,
            "top": 0.0,  # [m] of the flight since the last bump; 0 before the first
        }
        return ResetState(qpos, qvel, memory)

    def control(self, action: Array, state: BatchState) -> Array:
        """Thrusts of the rotors `(N, 4 D)` [N] of throttles that follow `action` `(N, 4 D)`."""
        memory = recall(state)
        target = np.sqrt((action + 1) / 2).reshape(memory["throttle"].shape)
        memory["throttle"] = memory["throttle"] + THROTTLE_STEP * (target - memory["throttle"])
        return self.frame.max_thrust * np.square(memory["throttle"]).reshape(len(state), -1)

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Judge the step, and say how restless the rotors were."""
        outcome = self.judge(self._touch(before, after), action, before, after)
        memory = recall(after)
        change = np.abs(action - memory["action"]).mean(1)
        memory["action"] = action
        outcome.info.update({"bumps": memory["bumps"].copy(), "action_change": change})
        return outcome

    def observe(self, state: BatchState) -> dict[str, Array]:
        """The observation `state`: every drone, whose turn it is, the ball."""
        memory, pose, (ball, velocity) = recall(state), self.pose(state), self.ball(state)
        columns = pose.rotation.swapaxes(-1, -2)[:, :, :2].reshape(len(state), self.drones, 6)
        near = (pose.position - self.anchors, columns, pose.velocity, pose.turning, memory["throttle"])
        drones = np.concatenate([*near, ball[:, None] - pose.position], -1).reshape(len(state), -1)
        turn = [self.turn(state)] if self.drones > 1 else []
        since = np.minimum(memory["since"], 1.0)
        parts = [drones, *turn, velocity, since[:, None], memory["top"][:, None], *self.extra(state)]
        return {"state": np.concatenate(parts, 1)}

    def _touch(self, before: BatchState, after: BatchState) -> Touch:
        """Find out who touched the ball, and keep count in the memory."""
        memory = recall(after)
        old, slow = self.ball(before)
        ball, fast = self.ball(after)
        jolt = np.linalg.norm(fast - slow + GRAVITY * self.dt * UP, axis=1) > JOLT
        landed = (ball[:, 2] < LANDED) | (jolt & (ball[:, 2] < GROUND))
        jolt &= ~landed
        new = jolt & (memory["touching"] == 0)
        soon = new & (memory["since"] < DOUBLE)
        memory["touching"] = np.where(jolt, memory["touching"] + 1, 0.0)
        paddles = _on_paddle(self.pose(before), old) | _on_paddle(self.pose(after), ball)  # (N, D)
        legal = (paddles & self.turn(after)).any(1)
        bump = new & legal & ~soon
        fault = (new & ~bump) | (memory["touching"] > CARRY)
        high = bump & (memory["top"] > HIGH)
        memory["since"] = np.where(new, 0.0, memory["since"] + self.dt)
        memory["bumps"] = memory["bumps"] + bump
        top = np.where(bump, 0.0, memory["top"])
        memory["top"] = np.where(memory["bumps"] > 0, np.maximum(top, ball[:, 2]), 0.0)
        memory["turn"] = np.where(bump, (memory["turn"] + 1) % self.drones, memory["turn"])
        place = self.pose(after).position
        off = (place[..., 2] < LOWEST) | (place[..., 2] > self.highest) | (place[..., 0] < PADDLE_RADIUS)
        outside = (ball[:, 2] > self.ball_highest) | np.any(np.abs(ball[:, :2]) > COURT / 2, axis=1)
        return Touch(bump, fault, high, landed, np.asarray(off.any(1)), np.asarray(outside))

    def _prefixes(self) -> tuple[str, ...]:
        return ("",) if len(self.anchors) == 1 else tuple(f"drone{i} " for i in range(len(self.anchors)))

    def _mirror(self) -> MirrorSymmetry:
        """Left and right exchanged: a drone's rotors with each other, and two drones as well."""
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


def recall(state: BatchState) -> dict[str, Array]:
    """The task's memory: `throttle` `(N, D, 4)`, `action` `(N, 4 D)`, and counts `(N,)`, see `VolleyTask.initial`."""
    return cast(dict[str, Array], state.memory)


def _on_paddle(pose: DroneState, ball: Array) -> NDArray[np.bool_]:
    """(N, D) whether the ball is over the paddle, and near it."""
    local = (pose.rotation.swapaxes(-1, -2) @ (ball[:, None] - pose.position)[..., None])[..., 0]
    above = (local[..., 2] > 0.0) & (local[..., 2] < 5 * BALL_RADIUS)
    return above & (np.linalg.norm(local[..., :2], axis=-1) < PADDLE_RADIUS)


def _quaternion(roll: float, pitch: float, yaw: float) -> Array:
    """Of half angles, turned about z, then y, then x."""
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
    """Rotation matrices `(N, 3, 3)` of unit quaternions `(N, 4)`, w first."""
    w, x, y, z = quaternion.T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return np.stack([np.stack(row, -1) for row in rows], 1)
