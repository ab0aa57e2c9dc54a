"""Execution of policy chunks: observations, chunk requests and joint targets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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
from robopolicy_robots.policy_runner import InferenceResult, InferenceRunner
from robopolicy_robots.robot import RobotSpec
from robopolicy_robots.states import Reason, SafetyHold
from robopolicy_robots.transports.base import Received

Messages = Mapping[str, Received]
MARGIN, HURRY = 1.5, 0.001  # a chunk is requested this many p95 latencies and these seconds ahead
QUICK = 0.75  # maximum, in ticks, for an observation between two ticks


class ChunkExecutor:
    """Executor of the chunks of a policy; time is counted in actions (slots) since `start`.

    As in simulation, every slot has one observation and one action, and row k of a chunk belongs k slots after the slot
    of its observation. Ticks fall anywhere in slots, so their times are not used: a chunk placed
    at its tick would repeat some of its actions and skip others. Times are the due times of ticks
    [s], so that a late tick does not request a larger step than the filter allows.

    A slot is observed before it begins, by the inference time beyond whole slots, so that the chunk is available
    when it begins; otherwise a chunk that takes 5 ms would be late by a whole action. If that is less than
    a tick, the loop observes between two ticks (`ahead`), else some ticks early. So the number of executed actions is
    the action horizon of the policy, unless inference takes longer than the rest of the chunk; policies trained
    to execute a whole chunk perform worse if only a part is executed. If a chunk is late and no action is left,
    the executor waits at the last goal for at most one action.

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
        strangers = sorted(set(robot.names) ^ set(embodiment.joints))
        if strangers:
            raise UserError(f"Only one of the robot and the embodiment moves {', '.join(strangers)}.")
        self.buffer = ChunkBuffer(embodiment.control_dt, runner.spec.action_dim, blending)
        self._robot, self._embodiment, self._runner, self._gate = robot, embodiment, runner, gate
        self._support = support
        self._limited: list[SafetyIntervention] = []  # interventions of the OOD check since the last call
        self._order = [embodiment.joints.index(name) for name in robot.names]
        self._history: deque[dict[str, NDArray[Any]]] = deque(maxlen=runner.spec.obs_horizon)
        self._origin = np.inf  # [s] when slot 0 began
        self._asked: tuple[float, int] = (np.nan, -1)  # time of the request, and slot of its observation
        # The last tick of an action should reach its goal, and none should have to wait there, which would make the
        # next one jump: with q actions to every p ticks (p / q in lowest terms) that is a q-th of a period ahead.
        ticks = Fraction(embodiment.control_dt * robot.rate).limit_denominator(16)
        self._ahead = robot.dt / ticks.denominator
        self._slot = self._seen = -1  # current slot, and slot of the last observation
        self._from = self._goal = np.zeros(len(robot.names))
        self._waited = False  # waiting for a late chunk at the last goal

    def start(self, now: float, state: Messages) -> None:
        """Reset and start from the present position of the robot.

        Raises:
            SafetyHold: The embodiment cannot start.
        """
        self.buffer.clear()
        self._history.clear()
        self._origin, self._slot, self._seen = now, -1, -1
        self._asked, self._waited = (np.nan, -1), False
        try:
            self._embodiment.start(state)
        except UserError as error:
            raise SafetyHold(Reason.BAD_OBSERVATION, str(error)) from error

    def observe(self, now: float, state: Messages) -> None:
        """Observe once per slot.

        Raises:
            SafetyHold: The observation is invalid or out of distribution.
        """
        slot = self._at(now + self._inference()[1])
        if slot <= self._seen:
            return
        self._seen = slot
        try:
            self._history.append(self._embodiment.observe(state))
        except UserError as error:
            raise SafetyHold(Reason.BAD_OBSERVATION, str(error)) from error
        if self._gate is not None:
            finding = self._gate.update(self._history[-1])
            if self._gate.closed:
                found = SafetyIntervention("gate", finding.key, finding.value, finding.limit, now)
                raise SafetyHold(Reason.STRANGE_OBSERVATION, f"{finding.key} = {finding.value:.4g}", found)

    def ahead(self, due: float) -> float:
        """Lead time [s] before a tick at `due` for observing and requesting its chunk; 0 if not needed."""
        quick, seconds = self._quick()
        return seconds if quick and self._at(due) > self._seen else 0.0

    def request(self, now: float, ahead: float = 0.0) -> None:
        """Request the next chunk if it is due, so that it arrives before the current one ends.

        Args:
            now: Due time of the tick that needs the chunk.
            ahead: Time until then [s].
        """
        spec, runner, dt = self._runner.spec, self._runner, self._embodiment.control_dt
        seen, action_horizon = self._seen * dt, max(1, min(spec.action_horizon, spec.horizon - self._inference()[0]))
        if runner.busy or not self.buffer.due(seen, action_horizon):
            return
        rows = [*self._history]
        rows = rows[:1] * (spec.obs_horizon - len(rows)) + rows
        obs = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        prefix = None
        if runner.takes_prefix and self.buffer.blending == "rtc":
            arrival = now - ahead + runner.latency - self._origin
            prefix = self.buffer.committed(seen, min(delay_steps(arrival - seen, dt), spec.horizon - 1))
        self._asked = now, self._seen
        runner.request(obs, now, prefix if prefix is not None and len(prefix) else None)

    def receive(self, result: InferenceResult) -> None:
        """Add a chunk, unless it was requested before the start."""
        asked, slot = self._asked
        if result.chunk is not None and result.observed == asked:
            self.buffer.put(result.chunk, slot * self._embodiment.control_dt)

    def remaining(self, now: float) -> float:
        """Seconds until the buffer runs out of actions."""
        return self.buffer.remaining(now - self._origin) if np.isfinite(self._origin) else 0.0

    def waypoint(self, now: float, state: Messages) -> Array | None:
        """Where the action of this slot leads, `(J,)` in the robot's order; None while there is no action.

        Raises:
            SafetyHold: The embodiment refuses the action.
        """
        slot = self._at(now)
        if slot == self._slot:
            return self._goal
        goal = action = None
        following = self._slot >= 0
        # Missed ticks may have skipped slots; the controller of an embodiment also needs their actions.
        for each in range(self._slot + 1 if following else slot, slot + 1):
            action = self.buffer.action(each * self._embodiment.control_dt)
            goal = None if action is None else self._commanded(action, state)
        if goal is not None and action is not None and self._support is not None:
            goal = self._supported(self._support.check(self._history[-1], action), goal, following, now)
        if goal is None:
            self._waited = following and self._runner.busy and slot == self._slot + 1
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
        share = (now + self._ahead - self._origin) / self._embodiment.control_dt - self._slot
        return self._from + max(share, 0.0) * (self._goal - self._from) if share < 1.0 else self._goal

    def _commanded(self, action: Array, state: Messages) -> Array:
        try:
            return np.asarray(self._embodiment.command(action, state), np.float64)[self._order]
        except (UserError, IndexError) as error:
            raise SafetyHold(Reason.WRONG_SHAPE, str(error)) from error

    def _supported(self, said: ActionOODResult, goal: Array, following: bool, now: float) -> Array:
        """Goal of an action, or a part of the way to it for an out-of-distribution action.

        Raises:
            SafetyHold: Too many such actions in a row, or the first action is one of them.
        """
        if said.fraction == 1.0 and not said.hold:
            return goal
        found = SafetyIntervention("support", "", said.score, said.threshold, now)
        if said.hold or not following:
            raise SafetyHold(Reason.UNSUPPORTED, f"score {said.score:.4g}, at least {said.threshold:.4g}", found)
        self._limited.append(found)
        start = self._goal if self._robot.mode == "absolute" else np.zeros_like(goal)  # of no change, of no velocity
        return start + said.fraction * (goal - start)

    def _quick(self) -> tuple[bool, float]:
        """Whether inference is well below a tick, and the lead time of requests before a tick [s]."""
        latency = self._runner.latency
        seconds = MARGIN * latency + HURRY if latency else 0.0
        return seconds < QUICK * self._robot.dt, seconds

    def _inference(self) -> tuple[int, float]:
        """Latency of a slow chunk in whole slots and a remainder [s] in whole ticks."""
        dt, tick = self._embodiment.control_dt, self._robot.dt
        if self._quick()[0]:
            return 0, 0.0
        seconds = delay_steps(self._runner.latency, tick) * tick
        slots = int(seconds / dt + 1e-6)
        return slots, max(seconds - slots * dt, 0.0)

    def _at(self, now: float) -> int:
        return int((now - self._origin) / self._embodiment.control_dt + 1e-6)
