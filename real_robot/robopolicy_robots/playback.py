"""From observations over the policy's chunks to joint targets, one action after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.chunk_buffer import ChunkBuffer, delay_steps
from robopolicy.deploy.safety.interventions import Intervention
from robopolicy.deploy.safety.motion import Array
from robopolicy.deploy.safety.ood import ObservationGate, Support, SupportCheck
from robopolicy.errors import UserError
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.policy_runner import Answer, Runner
from robopolicy_robots.robot import RobotSpec
from robopolicy_robots.states import Held, Reason
from robopolicy_robots.transports.base import Received

Heard = Mapping[str, Received]
MARGIN, HURRY = 1.5, 0.001  # a chunk is asked for this many of its p95 latencies and these seconds ahead
QUICK = 0.75  # ticks that this may be at most for a look between two of them


class Playback:
    """The policy's side of a control loop; time is counted in actions (slots) since `start`.

    As in simulation, every slot has one observation and one action, and row k of a chunk belongs k slots after the one
    whose observation it was computed from. Ticks fall anywhere into slots, so their times would not do: a chunk laid
    where its tick fell plays some of its actions twice and leaves out others. Times are those at which ticks were due
    [s], lest a tick that comes late asks for a larger step than the filter lets pass.

    A slot is observed before it begins, by as much as inference takes beyond whole slots, so that the chunk is there
    when it begins: asked for then, a chunk that took 5 ms would be of use a whole action later. Where that is less than
    a tick, the loop looks between two ticks (`ahead`), else some ticks early. So as many actions of each chunk are
    played as the policy was trained to play, unless inference takes longer than what is left of it; policies trained
    to play all of a chunk do worse where only a part is played. If a chunk comes late and nothing is left to play,
    time waits for it at the last goal, at most as long as an action.

    Raises:
        UserError: The embodiment does not move the robot's joints.
    """

    def __init__(
        self,
        robot: RobotSpec,
        embodiment: Embodiment,
        runner: Runner,
        join: str,
        gate: ObservationGate | None = None,
        support: SupportCheck | None = None,
    ) -> None:
        strangers = sorted(set(robot.names) ^ set(embodiment.joints))
        if strangers:
            raise UserError(f"Only one of the robot and the embodiment moves {', '.join(strangers)}.")
        self.buffer = ChunkBuffer(embodiment.control_dt, runner.spec.action_dim, join)
        self._robot, self._embodiment, self._runner, self._gate = robot, embodiment, runner, gate
        self._support = support
        self._bent: list[Intervention] = []  # by the support check, since it was last asked
        self._order = [embodiment.joints.index(name) for name in robot.names]
        self._history: deque[dict[str, NDArray[Any]]] = deque(maxlen=runner.spec.obs_horizon)
        self._origin = np.inf  # [s] when slot 0 began
        self._asked: tuple[float, int] = (np.nan, -1)  # when a chunk was asked for, and for which slot's observation
        # The last tick of an action should reach its goal, and none should have to wait there, which would make the
        # next one jump: with q actions to every p ticks (p / q in lowest terms) that is a q-th of a period ahead.
        ticks = Fraction(embodiment.control_dt * robot.rate).limit_denominator(16)
        self._ahead = robot.dt / ticks.denominator
        self._slot = self._seen = -1  # whose action is played, and whose observation was taken
        self._from = self._goal = np.zeros(len(robot.names))
        self._waited = False  # for a late chunk, at the last goal

    def start(self, now: float, state: Heard) -> None:
        """Forget the past and start from where the robot is.

        Raises:
            Held: The embodiment cannot.
        """
        self.buffer.clear()
        self._history.clear()
        self._origin, self._slot, self._seen = now, -1, -1
        self._asked, self._waited = (np.nan, -1), False
        try:
            self._embodiment.start(state)
        except UserError as error:
            raise Held(Reason.BAD_OBSERVATION, str(error)) from error

    def look(self, now: float, state: Heard) -> None:
        """Observe, once a slot.

        Raises:
            Held: What is seen cannot be used, or is unlike the data.
        """
        slot = self._at(now + self._inference()[1])
        if slot <= self._seen:
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

    def ahead(self, due: float) -> float:
        """How long before a tick at `due` to observe and to ask for its chunk [s]; 0 where there is no need to."""
        quick, seconds = self._quick()
        return seconds if quick and self._at(due) > self._seen else 0.0

    def ask(self, now: float, ahead: float = 0.0) -> None:
        """Ask for the next chunk if it is time to, so that it arrives before this one ends.

        Args:
            now: When the tick is due at which the chunk is wanted.
            ahead: How long before that this is [s].
        """
        spec, runner, dt = self._runner.spec, self._runner, self._embodiment.control_dt
        seen, execute = self._seen * dt, max(1, min(spec.execute, spec.horizon - self._inference()[0]))
        if runner.busy or not self.buffer.due(seen, execute):
            return
        rows = [*self._history]
        rows = rows[:1] * (spec.obs_horizon - len(rows)) + rows
        obs = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        prefix = None
        if runner.takes_prefix and self.buffer.join == "rtc":
            arrival = now - ahead + runner.latency - self._origin
            prefix = self.buffer.committed(seen, min(delay_steps(arrival - seen, dt), spec.horizon - 1))
        self._asked = now, self._seen
        runner.request(obs, now, prefix if prefix is not None and len(prefix) else None)

    def put(self, answer: Answer) -> None:
        """Take a chunk, unless it was asked for before the start."""
        asked, slot = self._asked
        if answer.chunk is not None and answer.observed == asked:
            self.buffer.put(answer.chunk, slot * self._embodiment.control_dt)

    def remaining(self, now: float) -> float:
        """Seconds for which there are actions."""
        return self.buffer.remaining(now - self._origin) if np.isfinite(self._origin) else 0.0

    def goal(self, now: float, state: Heard) -> Array | None:
        """Where the action of this slot leads, `(J,)` in the robot's order; None while there is no action.

        Raises:
            Held: The embodiment refuses the action.
        """
        slot = self._at(now)
        if slot == self._slot:
            return self._goal
        goal = action = None
        following = self._slot >= 0
        # Ticks that were missed may have skipped slots; the controller of an embodiment counts on their actions, too.
        for each in range(self._slot + 1 if following else slot, slot + 1):
            action = self.buffer.action(each * self._embodiment.control_dt)
            goal = None if action is None else self._commanded(action, state)
        if goal is not None and action is not None and self._support is not None:
            goal = self._supported(self._support.judge(self._history[-1], action), goal, following, now)
        if goal is None:
            self._waited = following and self._runner.busy and slot == self._slot + 1
            return self._goal if self._waited else None
        self._slot, self._from, self._goal = slot, self._goal, goal
        if self._waited:
            self.depart(now, self._from)
            self._waited = False
        return goal

    def bent(self) -> tuple[Intervention, ...]:
        """What the support check did to goals since this was called last."""
        done, self._bent = tuple(self._bent), []
        return done

    def depart(self, now: float, position: Array) -> None:
        """The robot sets off from `position` `(J,)`; the action of this slot lasts as long as any other."""
        self._from, self._origin = position.copy(), now - self._slot * self._embodiment.control_dt

    def target(self, now: float) -> Array:
        """The target of this tick: on the straight way from the last action's goal to this one's, or this one's."""
        if not self._robot.interpolate or self._robot.mode == "velocity":
            return self._goal
        share = (now + self._ahead - self._origin) / self._embodiment.control_dt - self._slot
        return self._from + max(share, 0.0) * (self._goal - self._from) if share < 1.0 else self._goal

    def _commanded(self, action: Array, state: Heard) -> Array:
        try:
            return np.asarray(self._embodiment.command(action, state), np.float64)[self._order]
        except (UserError, IndexError) as error:
            raise Held(Reason.WRONG_SHAPE, str(error)) from error

    def _supported(self, said: Support, goal: Array, following: bool, now: float) -> Array:
        """The goal, or the part of the way to it that an action without support in the data may go.

        Raises:
            Held: Too many such actions came in a row, or the first one does not go all the way.
        """
        if said.share == 1.0 and not said.held:
            return goal
        found = Intervention("support", "", said.score, said.threshold, now)
        if said.held or not following:
            raise Held(Reason.UNSUPPORTED, f"score {said.score:.4g}, at least {said.threshold:.4g}", found)
        self._bent.append(found)
        start = self._goal if self._robot.mode == "absolute" else np.zeros_like(goal)  # of no change, of no velocity
        return start + said.share * (goal - start)

    def _quick(self) -> tuple[bool, float]:
        """Whether chunks take well less than a tick, and how long before a tick to ask for them [s]."""
        latency = self._runner.latency
        seconds = MARGIN * latency + HURRY if latency else 0.0
        return seconds < QUICK * self._robot.dt, seconds

    def _inference(self) -> tuple[int, float]:
        """What a chunk that is not quick takes to be there, in whole slots and a rest [s] in whole ticks."""
        dt, tick = self._embodiment.control_dt, self._robot.dt
        if self._quick()[0]:
            return 0, 0.0
        seconds = delay_steps(self._runner.latency, tick) * tick
        slots = int(seconds / dt + 1e-6)
        return slots, max(seconds - slots * dt, 0.0)

    def _at(self, now: float) -> int:
        return int((now - self._origin) / self._embodiment.control_dt + 1e-6)
