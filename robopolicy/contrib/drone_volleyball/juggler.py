"""Scripted juggler: three skills per drone and a selector that never interrupts a swing.

A drone waits at its anchor (`HOVER`), moves below the point where the ball will come down (`GO`), and swings through
this point (`SWING`). The trajectory of a swing is planned at its start, so that the paddle is there in time, with the
tilt and the speed that send the ball to its goal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.contrib.drone_volleyball.court import VolleyTask, memory_of
from robopolicy.contrib.drone_volleyball.flight import (
    DroneState,
    Gains,
    Reference,
    along,
    at_rest,
    fall_time,
    paddle_for,
    rotor_thrusts,
    smooth,
    throw,
)
from robopolicy.contrib.drone_volleyball.scene import BALL_RADIUS, GRAVITY, PADDLE_TOP, UP
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import Array, BatchState
from robopolicy.sim.backends.warp import WarpSim
from robopolicy.sim.contract import Observation, VectorSim

HOVER, GO, SWING = range(3)
SHORTEST = 0.1  # [s] minimum time from the start of a swing to the contact


@dataclass(frozen=True)
class JugglingStyle:
    """Tunable settings of the juggler."""

    gains: Gains = field(default_factory=Gains)
    swing: float = 0.9  # [s] duration of a swing until the contact
    follow: float = 0.06  # [s] duration of the follow-through
    loosen: float = 0.4  # [s] before the contact, over which errors cease to tilt the drone
    ahead: float = 0.04  # [s] by which the tilt command leads, to compensate its lag
    dip: float = 0.1  # [m] below the intercept, where the drone waits for the ball
    apex: float = 4.0  # [m] height of the ball's centre at the top of its flight
    lead: float = 1.5  # lead of the throttle over the rotors' lag: 1 is none, 1 / THROTTLE_STEP cancels it


@dataclass(frozen=True)
class Intercept:
    """Predicted contacts of drones with the ball."""

    time: Array  # (N, D) [s] from now; 0 where the ball is too low
    end: Reference  # (N, D, 3) of the drone at the contact
    normal: Array  # (N, D, 3) of its paddle at the contact


@dataclass
class SwingPlan:
    """Planned swings, the last one of each drone."""

    coefficients: Array  # (N, D, 3, 6) of `smooth`
    began: Array  # (N, D) [s] start
    lasts: Array  # (N, D) [s] until the contact

    @classmethod
    def of(cls, count: int, drones: int) -> SwingPlan:
        """Allocate the arrays."""
        return cls(np.zeros((count, drones, 3, 6)), np.zeros((count, drones)), np.ones((count, drones)))


@dataclass(frozen=True)
class SkillContext:
    """Input of a skill."""

    task: VolleyTask
    state: BatchState
    pose: DroneState  # (N, D, ...)
    intercept: Intercept
    swings: SwingPlan
    style: JugglingStyle


Skill = Callable[[SkillContext], Reference]
"""Computes references `(N, D, 3)` of all drones for one skill."""


def hover(moment: SkillContext) -> Reference:
    """Stay at the anchor."""
    return at_rest(np.broadcast_to(moment.task.anchors, moment.pose.position.shape))


def go(moment: SkillContext) -> Reference:
    """Wait below the intercept, on the line of the coming swing."""
    return at_rest(moment.intercept.end.position - moment.style.dip * moment.intercept.normal)


def swing(moment: SkillContext) -> Reference:
    """Follow the planned swing, then continue straight."""
    swings, style, ago = moment.swings, moment.style, moment.state.time[:, None] - moment.swings.began
    now = along(swings.coefficients, swings.lasts, np.minimum(ago, swings.lasts))
    soon = along(swings.coefficients, swings.lasts, np.minimum(ago + style.ahead, swings.lasts))
    left = (swings.lasts - ago)[..., None]
    return Reference(
        position=now.position + np.maximum(-left, 0.0) * now.velocity,
        velocity=now.velocity,
        acceleration=soon.acceleration,
        jerk=np.where(left > style.ahead, soon.jerk, 0.0),
        grip=np.clip(left / style.loosen, 0.0, 1.0),
    )


SKILLS: Mapping[str, Skill] = {"hover": hover, "go": go, "swing": swing}


def select(
    skill: NDArray[np.int64], turn: NDArray[np.bool_], near: NDArray[np.bool_], over: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The next skill of every drone `(N, D)`. A swing always continues until it is `over`.

    Args:
        skill: The current skill.
        turn: Whether it is the drone's turn.
        near: Whether the ball comes down within the duration of a swing.
        over: Whether the current swing has hit the ball, or missed the moment.
    """
    free = np.where(turn, np.where(near, SWING, GO), HOVER)
    return np.where((skill == SWING) & ~over, SWING, free)


class Juggler:
    """Expert of all drills; depends on the current state and the current swing.

    Args:
        style: Settings.
        skills: Replacements of `SKILLS`, by name.
    """

    def __init__(self, style: JugglingStyle | None = None, skills: Mapping[str, Skill] | None = None) -> None:
        if unknown := sorted(set(skills or {}) - set(SKILLS)):
            raise UserError(f"A juggler has the skills {', '.join(SKILLS)}, got {', '.join(unknown)}.")
        self.style = style or JugglingStyle()
        self.skills = dict(SKILLS) | dict(skills or {})
        self.skill: NDArray[np.int64] = np.zeros((0, 0), np.int64)  # (N, D) current skills
        self.swings = SwingPlan.of(0, 0)

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, 4 D)` for the simulator's current state."""
        task = getattr(sim, "task", None)
        if not isinstance(sim, MujocoSim | WarpSim) or not isinstance(task, VolleyTask):
            raise UserError("The scripted juggler needs a volley task on a MuJoCo backend.")
        state = sim.state().on_host()
        if self.skill.shape != (len(state), task.drones):
            self.skill = np.full((len(state), task.drones), HOVER)
            self.swings = SwingPlan.of(len(state), task.drones)
        self.skill[sim.episode_step.cpu().numpy() == 0] = HOVER
        return torch.from_numpy(self.act(task, state)).float().to(sim.device)

    def act(self, task: VolleyTask, state: BatchState) -> Array:
        """Actions `(N, 4 D)`."""
        pose, throttle = task.pose(state), memory_of(state)["throttle"]
        moment = SkillContext(task, state, pose, predict_intercept(task, state, self.style), self.swings, self.style)
        self._choose(moment)
        references = [self.skills[name](moment) for name in SKILLS]
        reference = Reference(*(_picked(self.skill, parts) for parts in zip(*references, strict=True)))
        thrusts = rotor_thrusts(task.frame, self.style.gains, pose, reference)
        ahead = throttle + self.style.lead * (np.sqrt(thrusts / task.frame.max_thrust) - throttle)
        return (2 * np.square(np.clip(ahead, 0.0, 1.0)) - 1).reshape(len(state), -1)

    def _choose(self, moment: SkillContext) -> None:
        """Select the skills, and plan the swings that begin."""
        swings, time = self.swings, moment.intercept.time
        over = moment.state.time[:, None] - swings.began > swings.lasts + self.style.follow
        flies = memory_of(moment.state)["touching"][:, None] == 0  # in contact, the flight of the ball is unknown
        near = flies & (time > SHORTEST) & (time <= self.style.swing)
        old = self.skill
        self.skill = select(old, moment.task.turn(moment.state), near, over)
        begins = (self.skill == SWING) & ((old != SWING) | over)
        planned = smooth(_motion(moment), moment.intercept.end, np.maximum(time, SHORTEST))
        swings.coefficients[begins] = planned[begins]
        swings.began[begins] = np.broadcast_to(moment.state.time[:, None], begins.shape)[begins]
        swings.lasts[begins] = time[begins]


def predict_intercept(task: VolleyTask, state: BatchState, style: JugglingStyle) -> Intercept:
    """Predict where each drone can hit the ball to send it to its goal."""
    ball, velocity = (part[:, None] for part in task.ball(state))  # (N, 1, 3)
    goal = task.goal(state)  # (N, D, 3)
    reach = PADDLE_TOP + BALL_RADIUS
    normal = np.broadcast_to(UP, goal.shape)
    for _ in range(3):  # tilt and intercept depend on each other
        level = task.anchors[:, 2] + reach * normal[..., 2]
        time = fall_time(ball[..., 2], velocity[..., 2], level)
        coming = velocity - GRAVITY * time[..., None] * UP
        point = ball + velocity * time[..., None] - 0.5 * GRAVITY * np.square(time)[..., None] * UP
        normal, speed = paddle_for(coming, throw(point, goal, np.asarray(style.apex)))
    thrust = GRAVITY / normal[..., 2:]  # of a drone without vertical acceleration
    end = Reference(
        position=point - reach * normal,
        velocity=speed[..., None] * normal,
        acceleration=thrust * normal - GRAVITY * UP,
        jerk=np.zeros_like(normal),
    )
    return Intercept(time, end, normal)


def _motion(moment: SkillContext) -> Reference:
    """Current motion of the drones, with the acceleration from their rotor thrusts."""
    throttle = memory_of(moment.state)["throttle"]
    lift = moment.task.frame.max_thrust * np.square(throttle).sum(-1, keepdims=True) / moment.task.frame.mass
    acceleration = lift * moment.pose.rotation[..., 2] - GRAVITY * UP
    return Reference(moment.pose.position, moment.pose.velocity, acceleration, np.zeros_like(acceleration))


def _picked(skill: NDArray[np.int64], parts: Sequence[Array]) -> Array:
    """Select from `parts`, `(N, D, 3)` for each skill, by the current skills `(N, D)`."""
    return np.take_along_axis(np.stack(parts), skill[None, ..., None], 0)[0]
