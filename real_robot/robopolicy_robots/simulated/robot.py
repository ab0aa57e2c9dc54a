"""Physics of a simulated robot: one environment of a task, controlled by joint targets.

Episode i has the initial state of episode i of an evaluation (`task.initial` with the same seed), is stepped by the
same engine and scored by `outcome` of the task, so successes through messages and in process are paired.
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

    @property
    def waits(self) -> bool:
        """Whether no command has moved the robot yet."""
        return not self.steps


class SimulatedRobot:
    """Simulated robot with joint targets as input and measurements as output; time passes only in `advance`.

    Args:
        task: Task to simulate.
        prefix: Prefix of joint names in messages.
        period: Seconds of one `advance`, a whole number of physics steps.
        timeout: Seconds without a command after which the robot holds: joints stay at their measured positions, and a
            gripper keeps its grip. This is the robot's own protection against a controller that dies.
        imperfections: Delay and sensor noise.
        seed: Of the noise.
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
        # Control steps end between parts, and one that is a single part is stepped as in an evaluation.
        part = math.gcd(steps, task.frame_skip)
        self._parts, self._parts_of_a_step, self._part = steps // part, task.frame_skip // part, part * physics
        self.task = task
        self.topics = MujocoTopics(task.model, prefix)
        self.period, self.timeout = period, timeout
        self.sensor_noise = sensor_noise or SensorNoise()
        self.time = -period  # [s] simulated since the creation of the robot
        self.holding = False  # by the robot's own timeout
        self._engine = RolloutEngine(task.model, 1, part)
        self._rng = np.random.default_rng(seed)
        self._renderers: dict[tuple[int, int], Renderer] = {}
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Start episode `seed`; takes one period, so that old and new states have different times."""
        if seed < 0:
            raise UserError(f"Seeds must be 0 or larger, got {seed}.")
        initial = self.task.initial(np.random.default_rng(seed))
        self._engine.edit(0, initial.model)
        self._engine.place(0, initial.qpos, initial.qvel)
        self._count = 0  # parts simulated since the first command
        self.episode = EpisodeState(seed)
        self._before = self._state({key: np.asarray(value)[None] for key, value in initial.memory.items()})
        self._control = self._standing(np.zeros(self.task.model.nu), np.ones_like(self.topics.is_gripper))
        self._queue: deque[tuple[float, Array]] = deque()  # commands on their way to the motors
        self._commanded: float | None = None  # time of the newest command
        self.time += self.period
        self.holding = False

    def command(self, joints: tuple[str, ...], targets: Array) -> None:
        """Take joint targets by name; joints that are left out keep theirs.

        Raises:
            UserError: A joint is unknown, or a number is not finite; the robot ignores the command.
        """
        place = {name: i for i, name in enumerate(self.topics.commanded)}
        unknown = [name for name in joints if name not in place]
        if unknown or not joints or len(joints) != len(targets) or not np.isfinite(targets).all():
            named = ", ".join(joints) or "no joint"
            raise UserError(f"Not a command of this robot: {len(targets)} targets for {named}.")
        wanted = self._queue[-1][1].copy() if self._queue else self._control.copy()
        wanted[self.topics.actuators[[place[name] for name in joints]]] = targets
        self._queue.append((self.time + self.sensor_noise.delay, wanted))
        self._commanded = self.time

    def advance(self) -> None:
        """Advance the simulation by one `period`."""
        for _ in range(self._parts):
            self._steer()
            states, sensors = self._engine.advance(self._control[None], None)
            self._engine.commit(states, sensors, None)
            self.time += self._part
            if self._commanded is not None:
                self._count += 1
                if self._count % self._parts_of_a_step == 0 and not self.episode.done:
                    self._end_control_step()

    def messages(self, stamp: Time) -> dict[str, Message]:
        """Current measurements by source; see `robopolicy_robots.mujoco_topics`."""
        state, off = self._state(), self.sensor_noise
        qpos, qvel = state.qpos[0].copy(), state.qvel[0].copy()
        robot = self.topics.robot
        if off.position_noise:
            qpos[robot.qpos] += off.position_noise * self._rng.standard_normal(len(robot.qpos))
        if off.encoder_step:
            qpos[robot.qpos] = np.round(qpos[robot.qpos] / off.encoder_step) * off.encoder_step
        if off.velocity_noise:
            qvel[robot.qvel] += off.velocity_noise * self._rng.standard_normal(len(robot.qvel))
        if off.pose_noise:
            for body in self.topics.objects.values():
                qpos[body.position] += off.pose_noise * self._rng.standard_normal(3)
        found = self.topics.messages(qpos, qvel, stamp)
        if self.task.has_velocity_command:  # the task generates the commands of an operator
            found[OPERATOR] = to_twist(self.task.velocity_command(self._state(self._before.memory))[0], stamp)
        return found

    def render(self, camera: str, height: int, width: int) -> NDArray[np.uint8]:
        """Current image `(height, width, 3)` of `camera`."""
        camera = self.task.shown_camera(camera) or camera
        if (height, width) not in self._renderers:
            self._renderers[height, width] = Renderer(self.task.model, height, width)
        renderer = self._renderers[height, width]
        self._engine.pose(0, renderer.data)
        return renderer.frame(camera).copy()

    def close(self) -> None:
        """Free what it holds; safe to call twice."""
        self._engine.close()
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _steer(self) -> None:
        """Apply delayed commands to the motors, or hold after the timeout."""
        while self._queue and self._queue[0][0] <= self.time + _ROUNDING:
            self._control = self._queue.popleft()[1]
            self.holding = False
        silent = self._commanded is not None and self.time - self._commanded >= self.timeout - _ROUNDING
        if silent and not self.holding:
            self._queue.clear()
            self._control, self.holding = self._standing(self._control, ~self.topics.is_gripper), True

    def _end_control_step(self) -> None:
        """Evaluate the task after a control step."""
        task, before = self.task, self._before
        # `control` updates the memory of the task. Its action argument affects rewards, not success.
        idle = np.zeros((1, len(task.action_low)))
        task.control(idle, before)
        self._before = after = self._state(before.memory)
        outcome = task.outcome(before, idle, after)
        success = bool(outcome.info["success"][0]) if "success" in outcome.info else False
        steps = self.episode.steps + 1
        over = bool(outcome.terminated[0]) or steps >= task.max_episode_steps
        self.episode = EpisodeState(self.episode.seed, steps, success, over)

    def _standing(self, control: Array, joints: NDArray[np.bool_]) -> Array:
        """`control` with the targets of `joints` `(J,)` bool set to their present positions."""
        standing, topics = control.copy(), self.topics
        standing[topics.actuators[joints]] = self._state().qpos[0, topics.targets[joints]]
        return standing

    def _state(self, memory: dict[str, NDArray[np.generic]] | None = None) -> BatchState:
        model, states = self.task.model, self._engine.states.copy()
        qpos, qvel = states[:, 1 : 1 + model.nq], states[:, 1 + model.nq : 1 + model.nq + model.nv]
        time = np.full(1, self._count * self._part)  # an episode begins with the first command
        return BatchState(model, qpos, qvel, time, self._engine.sensors.copy(), memory or {})
