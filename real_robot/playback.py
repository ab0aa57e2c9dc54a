"""From observations over the policy's chunks to joint targets, one action after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from real_robot.policy_runner import Answer, Runner
from real_robot.robot import RobotSpec
from real_robot.states import Held, Reason
from real_robot.transports.base import Received
from robopolicy.deploy.chunk_buffer import ChunkBuffer, delay_steps
from robopolicy.deploy.safety.gate import ObservationGate
from robopolicy.deploy.safety.interventions import Intervention
from robopolicy.deploy.safety.limits import Array
from robopolicy.errors import UserError

Heard = Mapping[str, Received]


class Embodied(Protocol):
    """What is needed of an embodiment, see `real_robot.embodiment`."""

    sources: Mapping[str, Any]  # what it has to hear, by key
    joints: tuple[str, ...]  # in the order of its targets
    control_dt: float  # [s] an action lasts

    def start(self, state: Heard) -> None:
        """Forget the past."""
        ...

    def observe(self, state: Heard) -> dict[str, NDArray[Any]]:
        """What the policy sees."""
        ...

    def command(self, action: NDArray[Any], state: Heard) -> Array:
        """Joint targets for an action."""
        ...


class Playback:
    """The policy's side of a control loop; time is counted in actions (slots) since `start`.

    Raises:
        UserError: The embodiment does not move the robot's joints.
    """

    def __init__(
        self, robot: RobotSpec, embodiment: Embodied, runner: Runner, join: str, gate: ObservationGate | None
    ) -> None:
        strangers = sorted(set(robot.names) ^ set(embodiment.joints))
        if strangers:
            raise UserError(f"Only one of the robot and the embodiment moves {', '.join(strangers)}.")
        self.buffer = ChunkBuffer(embodiment.control_dt, runner.spec.action_dim, join)
        self._robot, self._embodiment, self._runner, self._gate = robot, embodiment, runner, gate
        self._order = [embodiment.joints.index(name) for name in robot.names]
        self._history: deque[dict[str, NDArray[Any]]] = deque(maxlen=runner.spec.obs_horizon)
        self._origin = np.inf  # [s] when slot 0 began
        # The last tick of an action should reach its goal, and none should have to wait there, which would make the
        # next one jump: with q actions to every p ticks (p / q in lowest terms) that is a q-th of a period ahead.
        ticks = Fraction(embodiment.control_dt * robot.rate).limit_denominator(16)
        self._ahead = robot.dt / ticks.denominator
        self._slot = self._seen = -1  # whose action is played, and whose observation was taken
        self._from = self._goal = np.zeros(len(robot.names))

    def start(self, now: float, state: Heard) -> None:
        """Forget the past and start from where the robot is.

        Raises:
            Held: The embodiment cannot.
        """
        self.buffer.clear()
        self._history.clear()
        self._origin, self._slot, self._seen = now, -1, -1
        try:
            self._embodiment.start(state)
        except UserError as error:
            raise Held(Reason.BAD_OBSERVATION, str(error)) from error

    def look(self, now: float, state: Heard) -> None:
        """Observe, once a slot.

        Raises:
            Held: What is seen cannot be used, or is unlike the data.
        """
        slot = self._at(now)
        if slot == self._seen:
            return
        self._seen = slot
        try:
            self._history.append(self._embodiment.observe(state))
        except UserError as error:
            raise Held(Reason.BAD_OBSERVATION, str(error)) from error
        if self._gate is not None:
            finding = self._gate.judge(self._history[-1])
            if self._gate.closed:
                found = Intervention("gate", finding.key, finding.value, finding.limit, now)
                raise Held(Reason.STRANGE_OBSERVATION, f"{finding.key} = {finding.value:.4g}", found)

    def ask(self, now: float) -> None:
        """Ask for the next chunk if it is time to, so that it arrives before this one ends."""
        spec, runner = self._runner.spec, self._runner
        delay = delay_steps(runner.latency, self._embodiment.control_dt)
        spare = bool(runner.latency)  # one that answers at once needs none
        execute = max(1, min(spec.execute, spec.horizon - delay - spare))
        short = self.buffer.remaining(now) <= runner.latency + 2.0 * self._robot.dt * spare
        if runner.busy or not (short or self.buffer.due(now, execute)):
            return
        rows = [*self._history]
        rows = rows[:1] * (spec.obs_horizon - len(rows)) + rows
        obs = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        continues = runner.takes_prefix and self.buffer.join == "rtc"
        runner.request(obs, now, self.buffer.committed(now, delay) if continues else None)

    def put(self, answer: Answer) -> None:
        """Take a chunk, unless it was asked for before the start."""
        if answer.chunk is not None and answer.observed >= self._origin:
            self.buffer.put(answer.chunk, answer.observed)

    def goal(self, now: float, state: Heard) -> Array | None:
        """Where the action of this slot leads, `(J,)` in the robot's order; None while there is no action.

        Raises:
            Held: The embodiment refuses the action.
        """
        slot = self._at(now)
        if slot != self._slot:
            action = self.buffer.action(now)
            if action is None:
                return None
            try:
                goal = np.asarray(self._embodiment.command(action, state), np.float64)[self._order]
            except (UserError, IndexError) as error:
                raise Held(Reason.WRONG_SHAPE, str(error)) from error
            self._slot, self._from, self._goal = slot, self._goal, goal
        return self._goal

    def depart(self, position: Array) -> None:
        """The robot sets off from `position` `(J,)`."""
        self._from = position.copy()

    def target(self, now: float) -> Array:
        """The target of this tick: on the straight way from the last action's goal to this one's, or this one's."""
        if not self._robot.interpolate or self._robot.mode == "velocity":
            return self._goal
        share = (now + self._ahead - self._origin) / self._embodiment.control_dt - self._slot
        return self._from + max(share, 0.0) * (self._goal - self._from) if share < 1.0 else self._goal

    def _at(self, now: float) -> int:
        return int((now - self._origin) / self._embodiment.control_dt + 1e-6)
