"""Log of the inputs and outputs of the safety filter, to filter a recording again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter, Workspace
from robopolicy.deploy.safety.interventions import SafetyIntervention
from robopolicy.deploy.safety.motion import Array, JointLimits, JointMotion
from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy_robots.messages import String
from robopolicy_robots.recorder import Recorded, Recorder

TOPIC = "/robopolicy/filter"


class RecordedFilter(SafetyFilter):
    """Safety filter that records its steps."""

    def __init__(
        self,
        limits: JointLimits,
        config: FilterConfig | None = None,
        workspace: Workspace | None = None,
        *,
        recorder: Recorder,
    ) -> None:
        super().__init__(limits, config, workspace)
        self._recorder = recorder

    def step(
        self, command: Any, state: FilterState, measured: JointMeasurement, dt: float
    ) -> tuple[Array, FilterState, tuple[SafetyIntervention, ...]]:
        """Call the filter and record the step."""
        sent, after, done = super().step(command, state, measured, dt)
        self._log_step(state, dt, sent, after, asked=_plain(command), measured=_plain(measured), done=done)
        return sent, after, done

    def hold(self, state: FilterState, dt: float) -> tuple[Array, FilterState]:
        """Call the filter and record the step."""
        sent, after = super().hold(state, dt)
        self._log_step(state, dt, sent, after)
        return sent, after

    def _log_step(self, state: FilterState, dt: float, sent: Array, after: FilterState, **more: Any) -> None:
        done = [each._asdict() for each in more.pop("done", ())]
        entry = {"dt": dt, "state": _plain(state), "sent": _plain(sent), "after": _plain(after), "done": done, **more}
        self._recorder.write(TOPIC, String(json.dumps(entry)))


def refilter(recording: Iterable[Recorded], safety: SafetyFilter) -> tuple[int, list[int]]:
    """Apply `safety` to the recorded inputs of a filter.

    Returns:
        The number of ticks, and the indices of ticks with a different command.

    Raises:
        UserError: A record is damaged, or belongs to a robot with other joints.
    """
    ticks, changed = 0, []
    for each in recording:
        if each.topic != TOPIC or not isinstance(each.message, String):
            continue
        try:
            entry = parse_json(each.message.data)
            state, dt, expected = _state(entry["state"]), entry["dt"], np.array(entry["sent"])
            if "measured" in entry:
                now = JointMeasurement(entry["measured"][0], *(np.array(value) for value in entry["measured"][1:]))
                command = np.array(entry["asked"]) if isinstance(entry["asked"], list) else entry["asked"]
                sent, after, _ = safety.step(command, state, now, dt)
            else:
                sent, after = safety.hold(state, dt)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"The record of tick {ticks} on {TOPIC} cannot be used: {error}.") from error
        if not np.array_equal(sent, expected) or _plain(after) != entry["after"]:
            changed.append(ticks)
        ticks += 1
    return ticks, changed


def _plain(value: Any) -> Any:
    """Convert arrays to lists; JSON stores floats exactly."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float | list | str) else repr(value)


def _state(value: Any) -> FilterState:
    motion, target = value
    return FilterState(JointMotion(*(np.array(each) for each in motion)), np.array(target))
