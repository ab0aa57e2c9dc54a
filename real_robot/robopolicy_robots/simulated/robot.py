"""Physics of a simulated robot: one environment of a task, controlled by joint targets.

An episode has the initial state of an evaluation episode with the same seed (`task.initial`), the same engine and the
same `outcome`, so successes over messages and in process are paired.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.engines import RolloutEngine
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.backends.mujoco.task import BatchState, MujocoTask
from robopolicy_robots.message import Message
from robopolicy_robots.messages import Time
from robopolicy_robots.mujoco_topics import OPERATOR, MujocoTopics, to_twist

Array = NDArray[np.float64]
_ROUNDING = 1e-9  # [s]


@dataclass(frozen=True)
class SensorNoise:
    """Delay and sensor noise of a simulated robot; zero by default."""

    delay: float = 0.0  # [s] from a command to the motors
    encoder_step: float = 0.0  # [rad, m] resolution of joint positions
    position_noise: float = 0.0  # [rad, m] standard deviation of joint positions, before the encoder
    velocity_noise: float = 0.0  # [rad/s, m/s] standard deviation of joint velocities
    pose_noise: float = 0.0  # [m] standard deviation of object positions

    def __post_init__(self) -> None:
        wrong = [name for name, value in vars(self).items() if not 0 <= value < np.inf]
        if wrong:
            raise UserError(f"Expected {', '.join(wrong)} to be 0 or more.")


@dataclass(frozen=True)
class EpisodeState:
    """State of the current episode."""

    seed: int
    steps: int = 0  # control steps since the first command
    success: bool = False
    done: bool = False  # success, failure or time limit; the robot still accepts commands


class SimulatedRobot:
    """Simulated robot with joint targets as inputs and measurements as outputs; only `advance` advances time.

    Args:
        task: Task to simulate.
        prefix: Prefix of joint names in messages.
        period: Duration of one `advance` [s], a multiple of the physics step.
        timeout: Time without a command [s] after which the robot holds, as protection against a failed controller:
            joints stay at their measured positions, and a gripper keeps its target.
        sensor_noise: Delay and sensor noise.
        seed: Seed of the noise.
    """

    def __init__(
        self,
        task: MujocoTask,
        prefix: str = "",
        *,
        period: float = 0.01,
        timeout: float = 0.25,
        sensor_noise: SensorNoise | None = None,
        seed: int = 0,
    ) -> None:
        physics = float(task.model.opt.timestep)
        steps = round(period / physics)
        if steps < 1 or abs(steps * physics - period) > _ROUNDING:
            raise UserError(f"A period of {period:g} s is not a multiple of the physics step of {physics:g} s.")
        # Control steps end between parts; a control step of one part is simulated as in an evaluation.
        part = math.gcd(steps, task.frame_skip)
        self._parts, self._parts_per_step, self._part = steps // part, task.frame_skip // part, part * physics
        self.task = task
        self.topics = MujocoTopics(task.model, prefix)
        self.period, self.timeout = period, timeout
        self.sensor_noise = sensor_noise or SensorNoise()
        self.time = -period  # [s] simulated time since creation
        self.holding = False  # after the command timeout
        self._engine = RolloutEngine(task.model, 1, part)
        self._rng = np.random.default_rng(seed)
        self._renderers: dict[tuple[int, int], Renderer] = {}
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Start episode `seed`; advances time by one period, so that old and new states have different times."""
        if seed < 0:
            raise UserError(f"Seeds must be 0 or larger, got {seed}.")
        initial = self.task.initial(np.random.default_rng(seed))
        self._engine.edit(0, initial.model)
        self._engine.reset_row(0, initial.qpos, initial.qvel)
        self._count = 0  # parts simulated since the first command
        self.episode = EpisodeState(seed)
        self._before = self._state({key: np.asarray(value)[None] for key, value in initial.memory.items()})
        self._control = self._hold_targets(np.zeros(self.task.model.nu), np.ones_like(self.topics.is_gripper))
        self._queue: deque[tuple[float, Array]] = deque()  # (due time [s], targets) of delayed commands
        self._command_time: float | None = None  # [s] time of the newest command
        self.time += self.period
        self.holding = False

    def command(self, joints: tuple[str, ...], targets: Array) -> None:
        """Set joint targets by name; raises `UserError` for unknown joints and numbers that are not finite."""
        index = {name: i for i, name in enumerate(self.topics.commanded)}
        unknown = [name for name in joints if name not in index]
        if unknown or not joints or len(joints) != len(targets) or not np.isfinite(targets).all():
            names = ", ".join(joints) or "no joint"
            raise UserError(f"Invalid command for this robot: {len(targets)} targets for {names}.")
        control = self._queue[-1][1].copy() if self._queue else self._control.copy()
        control[self.topics.actuators[[index[name] for name in joints]]] = targets
        self._queue.append((self.time + self.sensor_noise.delay, control))
        self._command_time = self.time

    def advance(self) -> None:
        """Advance the simulation by one `period`."""
        for _ in range(self._parts):
            self._apply_commands()
            states, sensors = self._engine.advance(self._control[None], None)
            self._engine.commit(states, sensors, None)
            self.time += self._part
            if self._command_time is not None:
                self._count += 1
                if self._count % self._parts_per_step == 0 and not self.episode.done:
                    self._end_control_step()

    def messages(self, stamp: Time) -> dict[str, Message]:
        """Current measurements by source (see `robopolicy_robots.mujoco_topics`)."""
        state, noise = self._state(), self.sensor_noise
        qpos, qvel = state.qpos[0].copy(), state.qvel[0].copy()
        robot = self.topics.robot
        if noise.position_noise:
            qpos[robot.qpos] += noise.position_noise * self._rng.standard_normal(len(robot.qpos))
        if noise.encoder_step:
            qpos[robot.qpos] = np.round(qpos[robot.qpos] / noise.encoder_step) * noise.encoder_step
        if noise.velocity_noise:
            qvel[robot.qvel] += noise.velocity_noise * self._rng.standard_normal(len(robot.qvel))
        if noise.pose_noise:
            for body in self.topics.objects.values():
                qpos[body.position] += noise.pose_noise * self._rng.standard_normal(3)
        found = self.topics.messages(qpos, qvel, stamp)
        if self.task.has_velocity_command:  # generated by the task
            found[OPERATOR] = to_twist(self.task.velocity_command(self._state(self._before.memory))[0], stamp)
        return found

    def render(self, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """Current image `(height, width, 3)` of `camera`."""
        camera = self.task.resolve_camera(camera) or camera
        if (height, width) not in self._renderers:
            self._renderers[height, width] = Renderer(self.task.model, height, width)
        renderer = self._renderers[height, width]
        self._engine.pose(0, renderer.data)
        return renderer.frame(camera, self._engine.models[0]).copy()

    def close(self) -> None:
        """Free all resources; safe to call twice."""
        self._engine.close()
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _apply_commands(self) -> None:
        """Apply delayed commands to the motors, or hold after the timeout."""
        while self._queue and self._queue[0][0] <= self.time + _ROUNDING:
            self._control = self._queue.popleft()[1]
            self.holding = False
        silent = self._command_time is not None and self.time - self._command_time >= self.timeout - _ROUNDING
        if silent and not self.holding:
            self._queue.clear()
            self._control, self.holding = self._hold_targets(self._control, ~self.topics.is_gripper), True

    def _end_control_step(self) -> None:
        """Evaluate the task after a control step."""
        task, before = self.task, self._before
        # `control` updates the memory of the task. Its action argument affects rewards, not success.
        action = np.zeros((1, len(task.action_low)))
        task.control(action, before)
        self._before = after = self._state(before.memory)
        outcome = task.outcome(before, action, after)
        success = bool(outcome.info["success"][0]) if "success" in outcome.info else False
        steps = self.episode.steps + 1
        done = bool(outcome.terminated[0]) or steps >= task.max_episode_steps
        self.episode = EpisodeState(self.episode.seed, steps, success, done)

    def _hold_targets(self, control: Array, joints: NDArray[np.bool_]) -> Array:
        """Copy of `control` with the targets of `joints` `(J,)` bool set to their current positions."""
        targets, topics = control.copy(), self.topics
        targets[topics.actuators[joints]] = self._state().qpos[0, topics.targets[joints]]
        return targets

    def _state(self, memory: dict[str, NDArray[np.generic]] | None = None) -> BatchState:
        model, states = self.task.model, self._engine.states.copy()
        qpos, qvel = states[:, 1 : 1 + model.nq], states[:, 1 + model.nq : 1 + model.nq + model.nv]
        time = np.full(1, self._count * self._part)  # an episode begins with the first command
        return BatchState(model, qpos, qvel, time, self._engine.sensors.copy(), memory or {})
