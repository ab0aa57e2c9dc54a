"""Execution of policy chunks: observations, chunk requests and joint targets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.chunk_buffer import ChunkBuffer, delay_steps
from robopolicy.deploy.safety.interventions import SafetyIntervention
from robopolicy.deploy.safety.motion import Array
from robopolicy.deploy.safety.ood import ActionOODCheck, ActionOODResult, ObservationGate
from robopolicy.errors import UserError
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.messages import JointState
from robopolicy_robots.policy_runner import InferenceResult, InferenceRunner
from robopolicy_robots.robot import JOINTS, RobotSpec
from robopolicy_robots.states import Reason, SafetyHold
from robopolicy_robots.transports.base import Received

Messages = Mapping[str, Received]
LATENCY_FACTOR, EXTRA_LEAD = 1.5, 0.001  # lead time of a request: factor of the p95 latency, and additional seconds
MAX_LEAD = 0.75  # maximum lead time, in ticks, for an observation between two ticks


class ChunkExecutor:
    """Executor of the chunks of a policy; time is counted in actions (slots) since `start`.

    As in simulation, every slot has one observation and one action, and row k of a chunk belongs k slots after the slot
    of its observation. Ticks need not align with slots, so a chunk placed at its tick would repeat some actions and
    skip others. Times are the due times of ticks [s], so that a late tick does not request a larger step than the
    filter allows.

    A slot is observed before it begins, by the inference time beyond whole slots, so that its chunk is available
    when it begins; otherwise a chunk that takes 5 ms would be late by a whole action. If that time is less than a tick,
    the loop observes between two ticks (`ahead`), else some ticks early. So the policy executes its full action
    horizon, unless inference takes longer than the rest of the chunk. If a chunk is late and no action is left, the
    executor waits at the last goal for at most one action.

    Raises:
        UserError: The embodiment does not move the robot's joints.
    """

    def __init__(
        self,
        robot: RobotSpec,
        embodiment: Embodiment,
        runner: InferenceRunner,
        blending: str,
        gate: ObservationGate | None = None,
        support: ActionOODCheck | None = None,
    ) -> None:
        unmatched = sorted(set(robot.names) ^ set(embodiment.joints))
        if unmatched:
            raise UserError(f"The joints of robot and embodiment differ: only one has {', '.join(unmatched)}.")
        self.buffer = ChunkBuffer(embodiment.control_dt, runner.spec.action_dim, blending)
        self._robot, self._embodiment, self._runner, self._gate = robot, embodiment, runner, gate
        self._support = support
        self.num_chunks = 0  # received since the construction
        self._messages: Messages = {}  # of the current action
        self._limited: list[SafetyIntervention] = []  # interventions of the OOD check since the last call
        self._order = [embodiment.joints.index(name) for name in robot.names]
        self._history: deque[dict[str, NDArray[Any]]] = deque(maxlen=runner.spec.obs_horizon)
        self._origin = np.inf  # [s] when slot 0 began
        self._requested: tuple[float, int] = (np.nan, -1)  # time of the request, and slot of its observation
        # The last tick of an action should reach its goal, and no tick should wait there, which would make the next one
        # jump: with q actions per p ticks (p / q in lowest terms), the target is a q-th of a period ahead.
        ticks = Fraction(embodiment.control_dt * robot.rate).limit_denominator(16)
        self._target_lead = robot.dt / ticks.denominator
        self._slot = self._observed = -1  # current slot, and slot of the last observation
        self._from = self._goal = np.zeros(len(robot.names))
        self._waited = False  # waiting for a late chunk at the last goal

    def start(self, now: float, state: Messages) -> None:
        """Reset and start from the current position; raises `SafetyHold` if the embodiment cannot start."""
        self.buffer.clear()
        self._history.clear()
        self._origin, self._slot, self._observed = now, -1, -1
        self._requested, self._waited = (np.nan, -1), False
        try:
            self._embodiment.start(state)
        except UserError as error:
            raise SafetyHold(Reason.BAD_OBSERVATION, str(error)) from error

    def observe(self, now: float, state: Messages) -> None:
        """Observe once per slot; raises `SafetyHold` for observations that are invalid or out of distribution."""
        slot = self._at(now + self._inference()[1])
        if slot <= self._observed:
            return
        self._observed = slot
        try:
            self._history.append(self._embodiment.observe(state))
        except UserError as error:
            raise SafetyHold(Reason.BAD_OBSERVATION, str(error)) from error
        if self._gate is not None:
            worst = self._gate.update(self._history[-1])
            if self._gate.closed:
                found = SafetyIntervention("gate", worst.key, worst.value, worst.limit, now)
                raise SafetyHold(Reason.STRANGE_OBSERVATION, f"{worst.key} = {worst.value:.4g}", found)

    def ahead(self, due: float) -> float:
        """Lead time [s] before a tick at `due` for observing and requesting its chunk; 0 if not needed."""
        fast, seconds = self._lead()
        return seconds if fast and self._at(due) > self._observed else 0.0

    def request(self, now: float, ahead: float = 0.0) -> None:
        """Request the next chunk if it is due, so that it arrives before the current one ends.

        Args:
            now: Due time of the tick that needs the chunk.
            ahead: Time until then [s].
        """
        spec, runner, dt = self._runner.spec, self._runner, self._embodiment.control_dt
        observed = self._observed * dt
        action_horizon = max(1, min(spec.action_horizon, spec.horizon - self._inference()[0]))
        if runner.busy or not self.buffer.due(observed, action_horizon):
            return
        rows = [*self._history]
        rows = rows[:1] * (spec.obs_horizon - len(rows)) + rows
        obs = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        prefix = None
        if runner.takes_prefix and self.buffer.blending == "rtc":
            arrival = now - ahead + runner.latency - self._origin
            prefix = self.buffer.committed(observed, min(delay_steps(arrival - observed, dt), spec.horizon - 1))
        self._requested = now, self._observed
        runner.request(obs, now, prefix if prefix is not None and len(prefix) else None)

    def receive(self, result: InferenceResult) -> None:
        """Add a chunk, unless it was requested before the start."""
        requested, slot = self._requested
        if result.chunk is not None and result.observed == requested:
            self.buffer.put(result.chunk, slot * self._embodiment.control_dt)
            self.num_chunks += 1

    def remaining(self, now: float) -> float:
        """Seconds until the buffer runs out of actions."""
        return self.buffer.remaining(now - self._origin) if np.isfinite(self._origin) else 0.0

    @property
    def observation(self) -> Mapping[str, NDArray[Any]]:
        """Newest observation; empty before the first one."""
        return self._history[-1] if self._history else {}

    def upcoming(self, now: float) -> NDArray[Any] | None:
        """Actions `(H, A)` of the newest chunk from `now` on, or None."""
        return self.buffer.upcoming(now - self._origin) if np.isfinite(self._origin) else None

    def waypoint(self, now: float, state: Messages) -> Array | None:
        """Joint goal `(J,)` of the current action, or None; raises `SafetyHold` if the embodiment rejects it."""
        slot, self._messages = self._at(now), state
        if slot == self._slot:
            return self._goal
        goal = action = None
        started = self._slot >= 0
        # Missed ticks may have skipped slots; the controller of an embodiment also needs their actions.
        for each in range(self._slot + 1 if started else slot, slot + 1):
            action = self.buffer.action(each * self._embodiment.control_dt)
            goal = None if action is None else self._joint_targets(action, state)
        if goal is not None and action is not None and self._support is not None:
            goal = self._supported(self._support.check(self._history[-1], action), goal, started, now)
        if goal is None:
            self._waited = started and self._runner.busy and slot == self._slot + 1
            return self._goal if self._waited else None
        self._slot, self._from, self._goal = slot, self._goal, goal
        if self._waited:
            self.begin_segment(now, self._from)
            self._waited = False
        return goal

    def limited(self) -> tuple[SafetyIntervention, ...]:
        """Interventions of the OOD check since the last call."""
        done, self._limited = tuple(self._limited), []
        return done

    def begin_segment(self, now: float, position: Array) -> None:
        """Begin a segment at `position` `(J,)`; the action of this slot has its full duration."""
        self._from, self._origin = position.copy(), now - self._slot * self._embodiment.control_dt

    def target(self, now: float) -> Array:
        """Target of this tick, interpolated between the goals of the last and the current action."""
        if not self._robot.interpolate or self._robot.mode == "velocity":
            return self._goal
        fraction = (now + self._target_lead - self._origin) / self._embodiment.control_dt - self._slot
        return self._from + max(fraction, 0.0) * (self._goal - self._from) if fraction < 1.0 else self._goal

    def fork(self) -> ChunkExecutor:
        """Copy for `next_target`, whose use does not change this executor."""
        ahead = copy(self)
        ahead.buffer, ahead._embodiment, ahead._support = copy(self.buffer), copy(self._embodiment), copy(self._support)
        ahead._limited = []
        return ahead

    def next_target(self, now: float, position: Array) -> Array | None:
        """Target `(J,)` of a coming tick if the robot is at `position` `(J,)` then; None if no valid action is left."""
        received = self._messages[JOINTS]
        message = received.message
        assert isinstance(message, JointState)
        moved = message.position.copy()
        moved[[message.name.index(name) for name in self._robot.names]] = position
        joints = replace(received, message=replace(message, position=moved))
        try:
            goal = self.waypoint(now, {**self._messages, JOINTS: joints})
        except SafetyHold:
            return None
        return None if goal is None else self.target(now)

    def _joint_targets(self, action: Array, state: Messages) -> Array:
        try:
            return np.asarray(self._embodiment.command(action, state), np.float64)[self._order]
        except (UserError, IndexError) as error:
            raise SafetyHold(Reason.WRONG_SHAPE, str(error)) from error

    def _supported(self, result: ActionOODResult, goal: Array, started: bool, now: float) -> Array:
        """Scale an out-of-distribution goal; raises `SafetyHold` for the first or too many consecutive actions."""
        if result.fraction == 1.0 and not result.hold:
            return goal
        found = SafetyIntervention("support", "", result.score, result.threshold, now)
        if result.hold or not started:
            raise SafetyHold(Reason.UNSUPPORTED, f"score {result.score:.4g}, at least {result.threshold:.4g}", found)
        self._limited.append(found)
        start = self._goal if self._robot.mode == "absolute" else np.zeros_like(goal)  # no change, or no velocity
        return start + result.fraction * (goal - start)

    def _lead(self) -> tuple[bool, float]:
        """Whether inference is much shorter than a tick, and the lead time of requests before a tick [s]."""
        latency = self._runner.latency
        seconds = LATENCY_FACTOR * latency + EXTRA_LEAD if latency else 0.0
        return seconds < MAX_LEAD * self._robot.dt, seconds

    def _inference(self) -> tuple[int, float]:
        """Latency of slow inference: whole slots, and the remainder [s] in whole ticks."""
        dt, tick = self._embodiment.control_dt, self._robot.dt
        if self._lead()[0]:
            return 0, 0.0
        seconds = delay_steps(self._runner.latency, tick) * tick
        slots = int(seconds / dt + 1e-6)
        return slots, max(seconds - slots * dt, 0.0)

    def _at(self, now: float) -> int:
        return int((now - self._origin) / self._embodiment.control_dt + 1e-6)
