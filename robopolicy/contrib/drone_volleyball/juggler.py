"""The scripted juggler: three skills per drone and a selector that never leaves a swing before it is over.

A drone waits at its anchor (`HOVER`), goes below the point where the ball will come down (`GO`), and swings through
that point (`SWING`) along a trajectory laid down when the swing begins, so that the paddle is there at the right moment
with the tilt and the speed that send the ball where it should go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.contrib.drone_volleyball.court import VolleyTask, recall
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
from robopolicy.sim.contract import Observation, VectorSim

HOVER, GO, SWING = range(3)
SHORTEST = 0.1  # [s] before the ball is met; a swing does not begin later


@dataclass(frozen=True)
class JugglingStyle:
    """How the juggler plays; all that one may tune."""

    gains: Gains = field(default_factory=Gains)
    swing: float = 0.9  # [s] a swing takes until the ball is met
    follow: float = 0.06  # [s] it goes on after that
    loosen: float = 0.4  # [s] over which errors cease to tilt the drone before the ball is met
    ahead: float = 0.04  # [s] by which the tilt is asked for earlier than it should be, because it lags
    dip: float = 0.1  # [m] below the meeting point, where the drone waits for the ball
    apex: float = 4.0  # [m] height of the ball's centre at the top of its flight
    lead: float = 1.5  # how far the throttle runs ahead of the rotors' lag: 1 not at all, 1 / THROTTLE_STEP undoes it


@dataclass(frozen=True)
class Meeting:
    """How drones would meet the ball if it were theirs to strike."""

    time: Array  # (N, D) [s] from now; 0 where the ball is too low
    end: Reference  # (N, D, 3) of the drone at that moment
    normal: Array  # (N, D, 3) of its paddle then


@dataclass
class Swings:
    """Swings laid down, the last one of each drone."""

    coefficients: Array  # (N, D, 3, 6) of `smooth`
    began: Array  # (N, D) [s]
    lasts: Array  # (N, D) [s] until the ball is met

    @classmethod
    def of(cls, count: int, drones: int) -> Swings:
        """Room for them."""
        return cls(np.zeros((count, drones, 3, 6)), np.zeros((count, drones)), np.ones((count, drones)))


@dataclass(frozen=True)
class Moment:
    """What a skill sees."""

    task: VolleyTask
    state: BatchState
    pose: DroneState  # (N, D, ...)
    meeting: Meeting
    swings: Swings
    style: JugglingStyle


Skill = Callable[[Moment], Reference]
"""Where drones should be now, `(N, D, 3)` each, if all of them played this skill."""


def hover(moment: Moment) -> Reference:
    """Stay at the anchor."""
    return at_rest(np.broadcast_to(moment.task.anchors, moment.pose.position.shape))


def go(moment: Moment) -> Reference:
    """Wait below the meeting point, on the line along which the paddle will strike."""
    return at_rest(moment.meeting.end.position - moment.style.dip * moment.meeting.normal)


def swing(moment: Moment) -> Reference:
    """Follow the swing that was laid down, then go straight on."""
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
    """The next skill of every drone `(N, D)`. A swing that is not `over` goes on, whatever else has changed.

    Args:
        skill: What it does now.
        turn: Whether the ball is its to strike.
        near: Whether the ball comes down in no more time than a swing takes.
        over: Whether the swing that it is in has met the ball, or passed the moment to do so.
    """
    free = np.where(turn, np.where(near, SWING, GO), HOVER)
    return np.where((skill == SWING) & ~over, SWING, free)


class Juggler:
    """Expert of all drills; a function of the present state and of the swing it is in.

    Args:
        style: How it plays.
        skills: Takes the place of skills of `SKILLS`, by name.
    """

    def __init__(self, style: JugglingStyle | None = None, skills: Mapping[str, Skill] | None = None) -> None:
        if unknown := sorted(set(skills or {}) - set(SKILLS)):
            raise UserError(f"A juggler has the skills {', '.join(SKILLS)}, not {', '.join(unknown)}; use those.")
        self.style = style or JugglingStyle()
        self.skills = dict(SKILLS) | dict(skills or {})
        self.skill: NDArray[np.int64] = np.zeros((0, 0), np.int64)  # (N, D) what each drone does
        self.swings = Swings.of(0, 0)

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, 4 D)` for the simulator's present state."""
        task = getattr(sim, "task", None)
        if not isinstance(sim, MujocoSim) or not isinstance(task, VolleyTask):
            raise UserError("The scripted juggler needs a volley task on a native MuJoCo backend.")
        state = sim.state()
        if self.skill.shape != (len(state), task.drones):
            self.skill = np.full((len(state), task.drones), HOVER)
            self.swings = Swings.of(len(state), task.drones)
        self.skill[sim.episode_step.numpy() == 0] = HOVER
        return torch.from_numpy(self.act(task, state)).float()

    def act(self, task: VolleyTask, state: BatchState) -> Array:
        """Actions `(N, 4 D)`."""
        pose, throttle = task.pose(state), recall(state)["throttle"]
        moment = Moment(task, state, pose, meet(task, state, self.style), self.swings, self.style)
        self._choose(moment)
        wanted = [self.skills[name](moment) for name in SKILLS]
        reference = Reference(*(_picked(self.skill, parts) for parts in zip(*wanted, strict=True)))
        thrusts = rotor_thrusts(task.frame, self.style.gains, pose, reference)
        ahead = throttle + self.style.lead * (np.sqrt(thrusts / task.frame.max_thrust) - throttle)
        return (2 * np.square(np.clip(ahead, 0.0, 1.0)) - 1).reshape(len(state), -1)

    def _choose(self, moment: Moment) -> None:
        """Let the selector decide, and lay down the swings that begin."""
        swings, time = self.swings, moment.meeting.time
        over = moment.state.time[:, None] - swings.began > swings.lasts + self.style.follow
        flies = recall(moment.state)["touching"][:, None] == 0  # only then it is known where the ball will go
        near = flies & (time > SHORTEST) & (time <= self.style.swing)
        old = self.skill
        self.skill = select(old, moment.task.turn(moment.state), near, over)
        begins = (self.skill == SWING) & ((old != SWING) | over)
        laid = smooth(_motion(moment), moment.meeting.end, np.maximum(time, SHORTEST))
        swings.coefficients[begins] = laid[begins]
        swings.began[begins] = np.broadcast_to(moment.state.time[:, None], begins.shape)[begins]
        swings.lasts[begins] = time[begins]


def meet(task: VolleyTask, state: BatchState, style: JugglingStyle) -> Meeting:
    """Where each drone would meet the ball to send it to its goal."""
    ball, velocity = (part[:, None] for part in task.ball(state))  # (N, 1, 3)
    goal = task.goal(state)  # (N, D, 3)
    reach = PADDLE_TOP + BALL_RADIUS
    normal = np.broadcast_to(UP, goal.shape)
    for _ in range(3):  # the tilt moves the meeting point a little, and that the tilt
        level = task.anchors[:, 2] + reach * normal[..., 2]
        time = fall_time(ball[..., 2], velocity[..., 2], level)
        coming = velocity - GRAVITY * time[..., None] * UP
        point = ball + velocity * time[..., None] - 0.5 * GRAVITY * np.square(time)[..., None] * UP
        normal, speed = paddle_for(coming, throw(point, goal, np.asarray(style.apex)))
    thrust = GRAVITY / normal[..., 2:]  # of a drone that neither rises nor falls faster
    end = Reference(
        position=point - reach * normal,
        velocity=speed[..., None] * normal,
        acceleration=thrust * normal - GRAVITY * UP,
        jerk=np.zeros_like(normal),
    )
    return Meeting(time, end, normal)


def _motion(moment: Moment) -> Reference:
    """The drones' own motion now, their acceleration from the thrust of their rotors."""
    throttle = recall(moment.state)["throttle"]
    lift = moment.task.frame.max_thrust * np.square(throttle).sum(-1, keepdims=True) / moment.task.frame.mass
    acceleration = lift * moment.pose.rotation[..., 2] - GRAVITY * UP
    return Reference(moment.pose.position, moment.pose.velocity, acceleration, np.zeros_like(acceleration))


def _picked(skill: NDArray[np.int64], parts: Sequence[Array]) -> Array:
    """Of `parts`, `(N, D, 3)` for each skill, those of the skills `(N, D)` that are played."""
    return np.take_along_axis(np.stack(parts), skill[None, ..., None], 0)[0]
