"""The control loop: at a fixed rate, from messages over the policy's chunks and the safety filter to commands.

    DISCONNECTED -> WAIT_OBS -> ARMED -> RUN <-> HOLD(reason) -> STOPPED, and ESTOP from anywhere

Nothing is sent before RUN. HOLD and ESTOP send the fastest stop within the limits and then the same position (or zero
velocity) again and again. A hold ends by itself once its reason is gone, by a ramp from the measured position, unless
the reason is in `LASTING`; an emergency stop, only by `reset_estop` and `arm`. The loop never waits for the policy.

In the terms of ROS's lifecycle: `configure` connects, `arm` activates (lets the robot move), `deactivate` holds it,
`stop` shuts down.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from robopolicy.deploy.safety.filter import FilterState, Measured, SafetyFilter
from robopolicy.deploy.safety.interventions import Intervention, InterventionLog
from robopolicy.deploy.safety.motion import Array
from robopolicy.deploy.safety.watchdog import EStop
from robopolicy.errors import UserError
from robopolicy_robots.commands import command_message
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.intake import Intake
from robopolicy_robots.messages import CATALOGUE, Bool, String
from robopolicy_robots.pace import beats, ended_by_signals, unswept
from robopolicy_robots.parts import Parts
from robopolicy_robots.playback import Playback
from robopolicy_robots.policy_runner import Runner
from robopolicy_robots.robot import CAMERA, QUALITIES, RobotSpec
from robopolicy_robots.states import IN_PLACE, LASTING, Held, Reason, State, Tick
from robopolicy_robots.transports.base import Transport

log = logging.getLogger(__name__)
STATUS_PERIOD = 0.2  # [s]
HUNG = 1.0  # [s] after which a stop does not wait any longer for a tick of another thread
REPEAT = 5  # periods at rest that end a safe stop, lest the last message was lost
NOT_WARM, WARM_UPS = "the policy is not warm", 3  # answers before arming: the first takes long, others tell how long
MOVING = (State.ARMED, State.RUN, State.HOLD)  # states in which chunks are played or will be
REFUSED = {"shape": Reason.WRONG_SHAPE, "finite": Reason.NON_FINITE}  # by the filter
FAULTS = {"shape": Reason.WRONG_SHAPE, "non-finite": Reason.NON_FINITE, "unavailable": Reason.UNAVAILABLE}


class ControlLoop:
    """One robot, one policy.

    Raises:
        UserError: The embodiment needs a source or moves a joint that the robot does not have.
    """

    def __init__(
        self, robot: RobotSpec, transport: Transport, embodiment: Embodiment, runner: Runner, parts: Parts | None = None
    ) -> None:
        self.robot, self.runner, self.parts = robot, runner, parts or Parts()
        self.safety = self.parts.safety or SafetyFilter(robot.limits, robot.filter_config)
        self.estop = self.parts.estop or EStop(robot.guard.heartbeat)
        self.log = InterventionLog(window=max(1, round(robot.guard.window * robot.rate)))
        self.playback = Playback(robot, embodiment, runner, self.parts.join, self.parts.gate, self.parts.support)
        self.state, self.reason = State.DISCONNECTED, ""
        self.overruns = self.ticks = self._late_ticks = self._beats = 0
        self._now = self._due = self._status_due = -np.inf  # [s] of the running tick, when it was due; of a status
        self._wanted_running = self._ready = False  # an operator has armed it; chunks are asked for and followed
        self._warm, self._retry = 0, -np.inf  # answers of the policy so far; when to try again [s]
        self._hold_reason, self._in_place = Reason.OPERATOR, False  # and whether the robot was under control since RUN
        self._joint_fault = "no joint state yet"
        self._filter_state: FilterState | None = None  # from the first command on
        self._measured: Measured | None = None
        self._closing = threading.RLock()  # no tick while a stop of another thread brakes
        self.configure(transport, embodiment)

    def configure(self, transport: Transport, embodiment: Embodiment) -> None:
        """Connect; done by the constructor."""
        robot, command = self.robot, self.robot.command
        self.transport = transport  # which lives as long as what is connected through it
        self.intake = Intake(robot, transport, embodiment.sources)
        self._publisher = transport.advertise(command.topic, CATALOGUE[command.kind], QUALITIES[command.qos])
        self._status = transport.advertise(robot.status.topic, String, QUALITIES[robot.status.qos])
        self._estop_topic = transport.subscribe(robot.estop.topic, Bool, QUALITIES[robot.estop.qos])
        self._heartbeat = transport.subscribe(robot.heartbeat.topic, Bool, QUALITIES[robot.heartbeat.qos])

    def arm(self) -> None:
        """Let the robot move as soon as everything that arming demands is there.

        Raises:
            UserError: An emergency stop is pressed, or the loop has ended.
        """
        if self.state is State.STOPPED or self.estop:
            raise UserError(f"The robot cannot be armed: {self.estop.cause or 'the loop has ended'}.")
        if self.state is State.HOLD and self._hold_reason in LASTING:
            self.intake.unbind()
            self._enter(State.WAIT_OBS, "")
        self._wanted_running = True

    def deactivate(self) -> None:
        """Hold until it is armed again."""
        self._wanted_running = False
        if self.state in MOVING:
            self._hold(Held(Reason.OPERATOR))

    def reset_estop(self) -> None:
        """Release the emergency stop, as an operator; the robot has to be armed again.

        Raises:
            UserError: A source of it is still pressed.
        """
        self.estop.reset()
        if self.state is State.ESTOP:
            self.intake.unbind()
            self._enter(State.WAIT_OBS, "")

    def tick(self, now: float, due: float | None = None) -> Tick:
        """Do everything that there is to do at `now` [s] on the monotonic clock, of a tick that was due at `due`."""
        if self.state is State.STOPPED:
            return Tick(now, self.state, self.reason, None, None, None, ())
        self.ticks, self._now, self._due = self.ticks + 1, now, now if due is None else due
        self._hear(now)
        try:
            self._answers()
            self._judge()
        except Held as held:
            self._hold(held)
        wanted, command, done = self._command()
        self._send(command)
        tick = Tick(now, self.state, self.reason, self._measured and self._measured.position, wanted, command, done)
        if now >= self._status_due:
            self._say(now)
        if self.parts.on_tick is not None:
            self.parts.on_tick(tick)
        return tick

    def run(self, seconds: float = np.inf) -> None:
        """Tick at the robot's rate until `stop`, a signal, or `seconds` are over; always ends in a safe stop."""
        stopping = threading.Event()
        atexit.register(self.stop)
        with ended_by_signals(stopping), unswept():
            try:
                for due, missed in beats(self.robot.dt, stopping, seconds):
                    self.note_overrun(missed)
                    with self._closing:
                        self.tick(time.monotonic(), due)
                        if self.state is State.STOPPED:
                            break
                        self._glance(due + self.robot.dt, stopping)
            except BaseException:
                log.exception("The control loop failed")
                raise
            finally:
                self.stop()
                atexit.unregister(self.stop)

    def note_overrun(self, missed: int) -> None:
        """Count periods without a tick; late ticks in a row are a reason to hold."""
        self.overruns += missed
        self._late_ticks = self._late_ticks + 1 if missed else 0

    def stop(self) -> None:
        """The one safe stop: brake within limits, repeat the last position for a moment, let go. May be called twice.

        Every way out ends here: `run` returning or raising, SIGINT, SIGTERM and the end of the interpreter.
        """
        alone = self._closing.acquire(timeout=HUNG)
        try:
            if self.state is State.STOPPED:
                return
            repeated = 0
            while self._filter_state is not None and repeated < REPEAT:
                command, self._filter_state = self.safety.hold(self._filter_state, self.robot.dt)
                repeated += self._filter_state.motion.at_rest
                with suppress(Exception):  # the transport may be what failed
                    self._send(command)
                time.sleep(self.robot.dt)
            self._enter(State.STOPPED, self.estop.cause or "shut down")
            with suppress(Exception):
                self._say(time.monotonic())
            self.runner.close()
        finally:
            if alone:
                self._closing.release()

    def unmet(self, now: float) -> str:
        """The first thing that arming demands and that is not so; empty if all is well."""
        if not self.parts.dry_run and self._publisher.matched < 1:
            return f"nobody takes {self.robot.command.topic}"
        if fault := self.intake.stranger() or self.intake.stale(now):
            return fault
        if self._measured is None:
            return self._joint_fault
        if not self.estop.attended:
            return f"no operator on {self.robot.heartbeat.topic}"
        if self._filter_state is not None and not self._filter_state.motion.at_rest:
            return "the last stop is not over"
        outside = ~self.robot.limits.inside(self._measured.position, slack=1e-3)
        if outside.any():
            return f"{self.robot.names[int(np.argmax(outside))]} is outside its limits"
        return "" if self._warm >= WARM_UPS else NOT_WARM

    def _hear(self, now: float) -> None:
        self.intake.drain()
        try:
            self._measured, self._joint_fault = self.intake.measured(now), ""
        except UserError as error:
            self._measured, self._joint_fault = None, str(error)
        said = [each.message.data for each in self._estop_topic.unread()]
        for pressed in said if self.state in MOVING else said[-1:]:  # at rest, what was said before does not matter
            self.estop.level(self.robot.estop.topic, pressed)
        if (beat := self._heartbeat.latest()) is not None and beat.sequence != self._beats:
            self._beats = beat.sequence
            self.estop.beat(now)

    def _answers(self) -> None:
        """Take what the policy has answered, if anything."""
        if (answer := self.runner.poll()) is None:
            return
        if answer.chunk is not None:
            self._warm, self._retry = self._warm + 1, -np.inf
            self.playback.put(answer)
            return
        self.log.add(Intervention(f"policy {answer.fault}", "", np.nan, np.nan, self._now))
        log.warning("Policy: %s: %s", answer.fault, answer.detail)
        if self.state in MOVING:
            if answer.fault != "exception":
                raise Held(FAULTS[answer.fault], answer.detail)
            self.estop.press(f"policy exception: {answer.detail}")

    def _judge(self) -> None:
        """Move to the state that the situation demands."""
        now, late = self._now, self.intake.watchdog.oldest(self._now)
        if self.state in MOVING and self._filter_state and late and late[1] > self.robot.guard.estop_after:
            self.estop.press(f"'{late[0]}' silent for {late[1]:.2f} s")
        if self.estop.check(now):
            if self.state is not State.ESTOP:
                self.log.add(Intervention("estop", "", np.nan, np.nan, now))
                self._wanted_running = self._ready = False
                self._enter(State.ESTOP, self.estop.cause)
        elif self.state not in MOVING:
            self._wait()
        else:
            self._check(late)
            resting = self._filter_state is None or self._filter_state.motion.at_rest
            if self.state is State.HOLD and not self._ready and self._hold_reason not in LASTING and resting:
                self._begin()
                self._ready = True

    def _begin(self) -> None:
        self.playback.start(self._due, self.intake.state)
        self.playback.look(self._due, self.intake.state)

    def _wait(self) -> None:
        """Warm the policy up, and arm once everything is there and an operator wants it."""
        unmet = self.unmet(self._now)
        self._enter(State.WAIT_OBS if self.intake.state else State.DISCONNECTED, unmet)
        warming = unmet == NOT_WARM and not self.runner.busy and self._now >= self._retry
        if not warming and (unmet or not self._wanted_running):
            return
        try:
            self._begin()
        except Held as held:
            self._enter(State.WAIT_OBS, str(held))
            return
        if warming:
            self._retry = self._now + 1.0
            self.playback.ask(self._due)
        else:
            self.intake.bind()
            self._ready = True
            self._enter(State.ARMED, "")

    def _check(self, late: tuple[str, float, float] | None) -> None:
        """Hold if anything speaks against moving now."""
        if stranger := self.intake.stranger():
            raise Held(Reason.PEER_LOST if stranger.startswith("0 ") else Reason.PUBLISHER, stranger)
        if late:
            reason = Reason.STALE_CAMERA if late[0].startswith(CAMERA) else Reason.STALE_OBSERVATION
            raise Held(reason, f"'{late[0]}'", Intervention("stale", *late, self._now))
        if self._measured is None:
            raise Held(Reason.BAD_OBSERVATION, self._joint_fault)
        if not self.parts.dry_run and self._publisher.matched < 1:
            raise Held(Reason.PEER_LOST, f"nobody takes {self.robot.command.topic}")
        if self._late_ticks >= self.robot.guard.overruns:
            raise Held(Reason.OVERRUN, f"{self._late_ticks} late ticks in a row")
        if self.state is not State.RUN:
            return
        if self.robot.mode == "absolute" and self._filter_state and not self.parts.dry_run:
            error = np.abs(self._filter_state.motion.position - self._measured.position)
            if error.max() > self.robot.guard.tracking:
                raise Held(Reason.TRACKING, f"{self.robot.names[int(np.argmax(error))]}: {error.max():.3g}")
        if self.log.share > self.robot.guard.saturation:
            raise Held(Reason.SATURATION, f"{100 * self.log.share:.0f} % of the ticks")

    def _follow(self) -> Array | None:
        """The joint targets `(J,)` that the policy wants now; None while there are none."""
        self.playback.look(self._due, self.intake.state)
        self.playback.ask(self._due)
        self._answers()  # of a runner that is quick enough
        if self.estop:
            return None
        goal = self.playback.goal(self._due, self.intake.state)
        if goal is None:
            if self.state is State.RUN:
                raise Held(Reason.CHUNK_EXHAUSTED)
            return None
        if self.state is not State.RUN:
            self._set_off(goal)
        return self.playback.target(self._due)

    def _glance(self, due: float, stopping: threading.Event) -> None:
        """Observe and ask shortly before the tick of `due`, where it begins an action and inference is quick."""
        ahead = self.playback.ahead(due) if self._ready else 0.0
        if not ahead or stopping.wait(max(0.0, due - ahead - time.monotonic())):
            return
        self.intake.drain()
        try:
            self.playback.look(due, self.intake.state)
            self.playback.ask(due, ahead)
        except Held as held:
            self._hold(held)

    def _set_off(self, goal: Array) -> None:
        """Begin to move, from where the robot is."""
        assert self._measured is not None
        position = self._measured.position
        if self._filter_state is None or self.state is State.ARMED or not self._in_place:
            self._filter_state = FilterState.at_rest(position)
        far = np.abs(goal - position)
        if self.robot.mode == "absolute" and not far.max() <= self.robot.guard.first_command:
            raise Held(Reason.FIRST_COMMAND, f"{self.robot.names[int(np.argmax(far))]}: {far.max():.3g}")
        self.playback.depart(self._due, self._filter_state.motion.position)
        self.log.forget_window()
        self._enter(State.RUN, "")

    def _command(self) -> tuple[Array | None, Array | None, tuple[Intervention, ...]]:
        """What is wanted, what is sent, and what the filter did about it."""
        wanted, done = None, ()
        try:
            wanted = self._follow() if self._ready else None
        except Held as held:
            self._hold(held)
        if self._filter_state is None:
            return wanted, None, done
        dt, measured = self.robot.dt, self._measured
        if self.state is State.HOLD and not self._ready and not self.intake.watchdog.oldest(self._now):
            wanted = self.parts.fallback(self._filter_state.motion.position, dt)
        if wanted is None or measured is None or self.state not in (State.RUN, State.HOLD):
            command, self._filter_state = self.safety.hold(self._filter_state, dt)
            return wanted, command, done
        command, self._filter_state, done = self.safety.step(wanted, self._filter_state, measured, dt)
        self.log.tick((*self.playback.bent(), *done))
        if done and done[0].kind in REFUSED:
            self._hold(Held(REFUSED[done[0].kind]))
        return wanted, command, done

    def _hold(self, held: Held) -> None:
        if held.found is not None and (self.state is not State.HOLD or held.reason is not self._hold_reason):
            self.log.add(held.found)
        self._ready = False
        if self.state is State.HOLD and self._hold_reason in LASTING and held.reason not in LASTING:
            return  # what passes does not take the place of what an operator has to see
        self._in_place = held.reason in IN_PLACE and (self.state is State.RUN or self._in_place)
        self._hold_reason, self._wanted_running = held.reason, self._wanted_running and held.reason not in LASTING
        self._enter(State.HOLD, str(held))

    def _send(self, command: Array | None) -> None:
        if command is not None and not self.parts.dry_run:
            self._publisher.publish(command_message(self.robot, command))

    def _enter(self, state: State, reason: str) -> None:
        if state is not self.state:
            log.warning("%s -> %s%s", self.state, state, f" ({reason})" if reason else "")
            self._status_due = -np.inf
        self.state, self.reason = state, reason

    def _say(self, now: float) -> None:
        self._status_due = now + STATUS_PERIOD
        self._status.publish(String(json.dumps(self.status(now))))

    def status(self, now: float) -> dict[str, Any]:
        """Everything worth watching, as plain values."""
        return {
            "robot": self.robot.name,
            "state": str(self.state),
            "reason": self.reason,
            "ticks": self.ticks,
            "overruns": self.overruns,
            "latency": round(self.runner.latency, 4),
            "remaining": round(self.playback.remaining(now), 4),
            "ages": self.intake.ages(now),
            "interventions": dict(self.log.counts),
            "limited": round(self.log.share, 3),
        }
