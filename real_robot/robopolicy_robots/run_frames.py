"""Frames of a run on a robot, for a display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from robopolicy.viewer.display import Display
from robopolicy.viewer.frames import EpisodeFrame, SafetyEvent, split_observation
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.loop import ControlLoop
from robopolicy_robots.states import State, Tick


class RunFrames:
    """Frames of one episode, one for each action of the policy.

    A frame has the bodies of the task's model, the newest observation, joint positions before and after the safety
    filter, the chunk from now on, and the events since the last frame: states of the loop, with their reasons, and
    interventions of the filter.

    Args:
        display: Display.
        label: Name of the episode.
        loop: Control loop.
        embodiment: Embodiment of the robot.
        success: Returns whether the task is solved; None where that is unknown.
    """

    def __init__(
        self,
        display: Display,
        label: str,
        loop: ControlLoop,
        embodiment: Embodiment,
        success: Callable[[], bool | None],
    ) -> None:
        self._display, self._label, self._loop, self._embodiment = display, label, loop, embodiment
        self._success = success
        self._events: list[SafetyEvent] = []
        self._entered = ""  # state of the loop and its reason
        self._begin: float | None = None  # [s] of the first frame
        self._due = -np.inf  # [s] of the next frame
        self._last: EpisodeFrame | None = None

    def update(self, tick: Tick) -> None:
        """Note the events of a tick, and show a frame if it is due and there is an observation."""
        self._enter(tick.state, tick.reason)
        self._events += [SafetyEvent(str(each)) for each in tick.interventions]
        observation = self._loop.executor.observation
        if tick.now < self._due or tick.measured is None or not observation:
            return
        self._begin = tick.now if self._begin is None else self._begin
        dt = self._embodiment.control_dt
        self._due = max(self._due + dt, tick.now)
        images, vectors = split_observation(observation)
        joints = {"measured": tick.measured, "target": tick.target, "command": tick.command}
        vectors |= {key: value.astype(np.float32) for key, value in joints.items() if value is not None}
        chunk = self._loop.executor.upcoming(tick.now)
        frame = EpisodeFrame(
            self._embodiment.physics_state(self._loop.inputs.state),
            images,
            vectors,
            success=self._success(),
            chunk=None if chunk is None or not len(chunk) else chunk.astype(np.float32),
        )
        self._show(frame, tick.now - self._begin)

    def end(self) -> None:
        """Show the last frame again with the outcome and the events of the end."""
        self._enter(self._loop.state, self._loop.reason)
        if self._last is not None and self._begin is not None:
            self._show(replace(self._last, success=self._success()), self._due - self._begin)

    def _enter(self, state: State, reason: str) -> None:
        entered = f"{state}: {reason}" if reason else str(state)
        if entered != self._entered:
            self._entered = entered
            self._events.append(SafetyEvent(entered, state in (State.HOLD, State.ESTOP)))

    def _show(self, frame: EpisodeFrame, moment: float) -> None:
        self._last, events, self._events = frame, tuple(self._events), []
        self._display.add(self._label, moment, replace(frame, events=events))
