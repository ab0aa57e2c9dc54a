"""Control loop at a fixed rate: messages, policy chunks, safety filter, commands.

    DISCONNECTED -> WAIT_OBS -> ARMED -> RUN <-> HOLD(reason) -> STOPPED, and ESTOP from anywhere

Nothing is sent before RUN. HOLD and ESTOP send the fastest stop within the limits and then repeat the same position (or
zero velocity). A hold ends once its reason no longer applies, with a ramp from the measured position, unless the reason
is in `LATCHED`. An emergency stop ends only with `reset_estop` and `arm`. The loop never waits for a policy.
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

from robopolicy.deploy.safety.filter import FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.interventions import InterventionLog, SafetyIntervention
from robopolicy.deploy.safety.motion import Array, hold
from robopolicy.deploy.safety.watchdog import EStop
from robopolicy.errors import UserError
from robopolicy_robots.chunk_executor import ChunkExecutor
from robopolicy_robots.command_output import open_output
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.loop_options import LoopOptions
from robopolicy_robots.messages import Bool, String
from robopolicy_robots.policy_runner import InferenceRunner
from robopolicy_robots.rate import gc_frozen, stop_on_signals, ticks
from robopolicy_robots.robot import CAMERA, QOS_PROFILES, RobotSpec
from robopolicy_robots.sensor_inputs import SensorInputs
from robopolicy_robots.states import LATCHED, RESUME_FROM_COMMAND, Reason, SafetyHold, State, Tick
from robopolicy_robots.transports.base import Transport

log = logging.getLogger(__name__)
STATUS_PERIOD = 0.2  # [s]
STOP_TIMEOUT = 1.0  # [s] maximum time that `stop` waits for a tick of another thread
STOP_REPEATS = 5  # commands at rest at the end of a safe stop, in case a message is lost
NOT_WARM, WARM_UPS = "the policy is not warm", 3  # results before arming, to measure the latency; the first is slow
MOVING = (State.ARMED, State.RUN, State.HOLD)  # states with motion or before motion
# Interventions of the filter that hold.
REJECTED = {"shape": Reason.WRONG_SHAPE, "finite": Reason.NON_FINITE, "measurement": Reason.BAD_OBSERVATION}
FAULTS = {"shape": Reason.WRONG_SHAPE, "non-finite": Reason.NON_FINITE, "unavailable": Reason.UNAVAILABLE}


class ControlLoop:
    """Control loop of one robot with one policy; raises `UserError` if the robot lacks a required source or joint."""

    def __init__(
        self,
        robot: RobotSpec,
        transport: Transport,
        embodiment: Embodiment,
        runner: InferenceRunner,
        options: LoopOptions | None = None,
    ) -> None:
        self.robot, self.runner, self.options = robot, runner, options or LoopOptions()
        self.safety = self.options.safety or SafetyFilter(robot.limits, robot.filter_config)
        self.estop = self.options.estop or EStop(robot.safety.heartbeat_timeout)
        self.log = InterventionLog(window=max(1, round(robot.safety.window * robot.rate)))
        blending, gate, support = self.options.chunk_blending, self.options.gate, self.options.support
        self.executor = ChunkExecutor(robot, embodiment, runner, blending, gate, support)
        self.state, self.reason = State.DISCONNECTED, ""
        self.overruns = self.ticks = self._late_ticks = self._last_beat = 0
        self._now = self._due = self._status_due = -np.inf  # [s] time and due time of the tick; due time of a status
        self._armed = self._ready = False  # `arm` was called; chunks are requested and executed
        self._warm, self._retry = 0, -np.inf  # number of results of the policy; time of the next attempt [s]
        self._hold_reason, self._in_place = Reason.OPERATOR, False  # and whether to resume from the last command
        self._joint_fault = "no joint state yet"
        self._filter_state: FilterState | None = None  # from the first command on
        self._measured: JointMeasurement | None = None
        self._closing = threading.RLock()  # prevents ticks during `stop` in another thread
        self.configure(transport, embodiment)

    def configure(self, transport: Transport, embodiment: Embodiment) -> None:
        """Connect to the topics; called by the constructor."""
        robot = self.robot
        self.transport = transport  # must live as long as its publishers
        self.inputs = SensorInputs(robot, transport, embodiment.sources)
        self.output = open_output(robot, transport, self.safety, self.executor)
        if self.options.fallback is not hold and not (self.output.streaming and robot.mode == "absolute"):
            found = f"mode: {robot.mode}" if self.output.streaming else "an action"
            raise UserError(f"A fallback needs position commands on a topic, and {robot.name} has {found}.")
        self._status = transport.advertise(robot.status.topic, String, QOS_PROFILES[robot.status.qos])
        self._estop_topic = transport.subscribe(robot.estop.topic, Bool, QOS_PROFILES[robot.estop.qos])
        self._heartbeat = transport.subscribe(robot.heartbeat.topic, Bool, QOS_PROFILES[robot.heartbeat.qos])

    def arm(self) -> None:
        """Let the robot move once it can be armed; raises `UserError` if stopped or the emergency stop is pressed."""
        if self.state is State.STOPPED or self.estop:
            raise UserError(f"The robot cannot be armed: {self.estop.cause or 'the loop has ended'}.")
        if self.state is State.HOLD and self._hold_reason in LATCHED:
            self.inputs.unlock_publishers()
            self._enter(State.WAIT_OBS, "")
        self._armed = True

    def deactivate(self) -> None:
        """Hold until `arm` is called again."""
        self._armed = False
        if self.state in MOVING:
            self._hold(SafetyHold(Reason.OPERATOR))

    def reset_estop(self) -> None:
        """Release the emergency stop without arming; raises `UserError` if a source of it is still pressed."""
        self.estop.reset()
        if self.state is State.ESTOP:
            self.inputs.unlock_publishers()
            self._enter(State.WAIT_OBS, "")

    def tick(self, now: float, due: float | None = None) -> Tick:
        """Run one tick at `now` [s, monotonic] that was due at `due`."""
        if self.state is State.STOPPED:
            return Tick(now, self.state, self.reason, None, None, None, ())
        self.ticks, self._now, self._due = self.ticks + 1, now, now if due is None else due
        self._poll_inputs(now)
        try:
            self._poll_policy()
            self._update_state()
        except SafetyHold as held:
            self._hold(held)
        target, command, done = self._command()
        self._send(command)
        tick = Tick(now, self.state, self.reason, self._measured and self._measured.position, target, command, done)
        if now >= self._status_due:
            self._publish_status(now)
        if self.options.on_tick is not None:
            self.options.on_tick(tick)
        return tick

    def run(self, seconds: float = np.inf) -> None:
        """Run ticks at the robot's rate until `stop`, a signal or for `seconds`; always ends with a safe stop."""
        stopping = threading.Event()
        atexit.register(self.stop)
        with stop_on_signals(stopping), self.estop.on_signal(), gc_frozen():
            try:
                for due, missed in ticks(self.robot.dt, stopping, seconds):
                    with self._closing:
                        self.note_overrun(missed)
                        self.tick(time.monotonic(), due)
                        if self.state is State.STOPPED:
                            break
                        self._early_observe(due + self.robot.dt, stopping)
            except BaseException:
                log.exception("The control loop failed")
                raise
            finally:
                self.stop()
                atexit.unregister(self.stop)

    def note_overrun(self, missed: int) -> None:
        """Count missed periods; consecutive late ticks are a reason to hold."""
        self.overruns += missed
        self._late_ticks = self._late_ticks + 1 if missed else 0
        if missed and self._filter_state is not None:
            self._filter_state = self.output.skip(self._filter_state, missed)

    def stop(self) -> None:
        """Brake within the limits, repeat the last position and disconnect; a second call does nothing."""
        acquired = self._closing.acquire(timeout=STOP_TIMEOUT)
        try:
            if self.state is State.STOPPED:
                return
            repeated = 0
            while self._filter_state is not None and repeated < STOP_REPEATS:
                command, self._filter_state = self.output.hold(self._filter_state, time.monotonic())
                repeated += self._filter_state.motion.at_rest
                with suppress(Exception):  # the transport may have failed
                    self._send(command)
                time.sleep(self.robot.dt)
            self._enter(State.STOPPED, self.estop.cause or "shut down")
            with suppress(Exception):
                self.output.cancel()
                self._publish_status(time.monotonic())
            self.runner.close()
        finally:
            if acquired:
                self._closing.release()

    def arming_blocker(self, now: float) -> str:
        """First unmet condition of arming; empty if all are met."""
        if not self.options.dry_run and self.output.matched < 1:
            return f"no {self.output.name}"
        if fault := self.inputs.publisher_error() or self.inputs.stale_source(now):
            return fault
        if self._measured is None:
            return self._joint_fault
        if not self.estop.heartbeat_ok:
            return f"no operator on {self.robot.heartbeat.topic}"
        if self._filter_state is not None and not self._filter_state.motion.at_rest:
            return "the last stop has not ended"
        for end in (self._estop_topic, self._heartbeat):
            if unmet := end.describe().unmet:
                return f"a publisher of {end.topic} has another {' and '.join(unmet)}; change its qos or the robot's"
        if not (inside := self.robot.limits.inside(self._measured.position, slack=1e-3)).all():
            return f"{self.robot.names[int(np.argmin(inside))]} is outside its limits"
        return "" if self._warm >= WARM_UPS else NOT_WARM

    def _poll_inputs(self, now: float) -> None:
        self.inputs.poll()
        try:
            self._measured, self._joint_fault = self.inputs.measured(now), ""
        except UserError as error:
            self._measured, self._joint_fault = None, str(error)
        levels = [each.message.data for each in self._estop_topic.unread()]
        for pressed in levels if self.state in MOVING else levels[-1:]:  # at rest, only the last message counts
            self.estop.set_level(self.robot.estop.topic, pressed)
        if (beat := self._heartbeat.latest()) is not None and beat.sequence != self._last_beat:
            self._last_beat = beat.sequence
            if beat.message.data:  # a button that is let go may send False
                self.estop.heartbeat(now)

    def _poll_policy(self) -> None:
        """Read a result of the policy, if available."""
        if (result := self.runner.poll()) is None:
            return
        if result.chunk is not None:
            self._warm, self._retry = self._warm + 1, -np.inf
            self.executor.receive(result)
            return
        self.log.add(SafetyIntervention(f"policy {result.fault}", "", np.nan, np.nan, self._now))
        log.warning("Policy: %s: %s", result.fault, result.detail)
        if self.state in MOVING:
            if result.fault != "exception":
                raise SafetyHold(FAULTS[result.fault], result.detail)
            self.estop.press(f"policy exception: {result.detail}")

    def _update_state(self) -> None:
        """Update the state of the loop."""
        now, late = self._now, self.inputs.watchdog.oldest(self._now)
        if self.state in MOVING and self._filter_state and late and late[1] > self.robot.safety.estop_after:
            self.estop.press(f"no message of '{late[0]}' for {late[1]:.2f} s")
        if self.estop.check(now):
            if self.state is not State.ESTOP:
                self.log.add(SafetyIntervention("estop", "", np.nan, np.nan, now))
                self._armed = self._ready = False
                self.output.cancel()
                self._enter(State.ESTOP, self.estop.cause)
        elif self.state not in MOVING:
            self._try_arming()
        else:
            self._check(late)
            resting = self._filter_state is None or self._filter_state.motion.at_rest
            if self.state is State.HOLD and not self._ready and self._hold_reason not in LATCHED and resting:
                self._begin()
                self._ready = True

    def _begin(self) -> None:
        self.executor.start(self._due, self.inputs.state)
        self.executor.observe(self._due, self.inputs.state)

    def _try_arming(self) -> None:
        """Warm up the policy, and arm once all conditions are met and `arm` was called."""
        blocker = self.arming_blocker(self._now)
        self._enter(State.WAIT_OBS if self.inputs.state else State.DISCONNECTED, blocker)
        warming = blocker == NOT_WARM and not self.runner.busy and self._now >= self._retry
        if not warming and (blocker or not self._armed):
            return
        try:
            self._begin()
        except SafetyHold as held:
            self._enter(State.WAIT_OBS, str(held))
            return
        if warming:
            self._retry = self._now + 1.0
            self.executor.request(self._due)
        else:
            self.inputs.lock_publishers()
            self._ready = True
            self._enter(State.ARMED, "")

    def _check(self, late: tuple[str, float, float] | None) -> None:
        """Raise `SafetyHold` if a safety condition is violated."""
        if failure := self.output.failure:
            self.output.cancel()  # the controller may still follow an earlier goal
            raise SafetyHold(Reason.GOAL, failure)
        if error := self.inputs.publisher_error():
            raise SafetyHold(Reason.PEER_LOST if error.startswith("0 ") else Reason.PUBLISHER, error)
        if late:
            reason = Reason.STALE_CAMERA if late[0].startswith(CAMERA) else Reason.STALE_OBSERVATION
            raise SafetyHold(reason, f"'{late[0]}'", SafetyIntervention("stale", *late, self._now, "s"))
        if self._measured is None:
            raise SafetyHold(Reason.BAD_OBSERVATION, self._joint_fault)
        if not self.options.dry_run and self.output.matched < 1:
            raise SafetyHold(Reason.PEER_LOST, f"no {self.output.name}")
        if self._late_ticks >= self.robot.safety.max_overruns:
            raise SafetyHold(Reason.OVERRUN, f"{self._late_ticks} late ticks in a row")
        if self.state is not State.RUN:
            return
        if self.robot.mode == "absolute" and self._filter_state and not self.options.dry_run:
            error = np.abs(self._filter_state.motion.position - self._measured.position)
            if error.max() > (allowed := self.robot.safety.max_tracking_error):
                raise SafetyHold(Reason.TRACKING, self.robot.largest(error, allowed))
        if self.log.limited_fraction > self.robot.safety.max_limited_fraction:
            raise SafetyHold(Reason.SATURATION, f"{100 * self.log.limited_fraction:.0f} % of the ticks")

    def _policy_target(self) -> Array | None:
        """Current joint targets `(J,)` of the policy, or None."""
        self.executor.observe(self._due, self.inputs.state)
        self._poll_policy()  # a chunk that has arrived since the start of the tick is not asked for again
        self.executor.request(self._due)
        self._poll_policy()  # a fast runner may have finished already
        if self.estop:
            return None
        goal = self.executor.waypoint(self._due, self.inputs.state)
        if goal is None:
            if self.state is State.RUN:
                raise SafetyHold(Reason.CHUNK_EXHAUSTED)
            return None
        if self.state is not State.RUN:
            self._start_motion(goal)
        return self.executor.target(self._due)

    def _early_observe(self, due: float, stopping: threading.Event) -> None:
        """If inference is fast, observe and request a chunk shortly before the tick at `due` that begins an action."""
        ahead = self.executor.ahead(due) if self._ready else 0.0
        if not ahead or stopping.wait(max(0.0, due - ahead - time.monotonic())):
            return
        self.inputs.poll()
        try:
            self.executor.observe(due, self.inputs.state)
            self.executor.request(due, ahead)
        except SafetyHold as held:
            self._hold(held)

    def _start_motion(self, goal: Array) -> None:
        """Begin to move from the current position."""
        assert self._measured is not None
        position = self._measured.position
        if self._filter_state is None or self.state is State.ARMED or not self._in_place:
            self._filter_state = FilterState.at_rest(position)
        far, allowed = np.abs(goal - position), self.robot.safety.max_initial_error
        if self.robot.mode == "absolute" and not far.max() <= allowed:
            raise SafetyHold(Reason.FIRST_COMMAND, self.robot.largest(far, allowed))
        self.executor.begin_segment(self._due, self._filter_state.motion.position)
        self.log.reset_window()
        self._enter(State.RUN, "")

    def _command(self) -> tuple[Array | None, Array | None, tuple[SafetyIntervention, ...]]:
        """Target of the policy, safe command, and interventions of the filter."""
        target, done = None, ()
        try:
            target = self._policy_target() if self._ready else None
        except SafetyHold as held:
            self._hold(held)
        if self._filter_state is None:
            return target, None, done
        measured = self._measured
        if self.state is State.HOLD and not self._ready and not self.inputs.watchdog.oldest(self._now):
            target = self.options.fallback(self._filter_state.motion.position, self.robot.dt)
        if target is None or measured is None or self.state not in (State.RUN, State.HOLD):
            command, self._filter_state = self.output.hold(self._filter_state, self._due)
            return target, command, done
        command, self._filter_state, done = self.output.step(target, self._filter_state, measured, self._due)
        self.log.tick((*self.executor.limited(), *done))
        if done and done[0].kind in REJECTED:
            self._hold(SafetyHold(REJECTED[done[0].kind]))
        return target, command, done

    def _hold(self, held: SafetyHold) -> None:
        if held.found is not None and (self.state is not State.HOLD or held.reason is not self._hold_reason):
            self.log.add(held.found)
        self._ready = False
        if self.state is State.HOLD and self._hold_reason in LATCHED and held.reason not in LATCHED:
            return  # keep a latched reason
        self._in_place = held.reason in RESUME_FROM_COMMAND and (self.state is State.RUN or self._in_place)
        self._hold_reason, self._armed = held.reason, self._armed and held.reason not in LATCHED
        self._enter(State.HOLD, str(held))

    def _send(self, command: Array | None) -> None:
        if command is not None and not self.options.dry_run:
            self.output.send(command)

    def _enter(self, state: State, reason: str) -> None:
        if state is not self.state:
            log.warning("%s -> %s%s", self.state, state, f" ({reason})" if reason else "")
            self._status_due = -np.inf
        self.state, self.reason = state, reason

    def _publish_status(self, now: float) -> None:
        self._status_due = now + STATUS_PERIOD
        self._status.publish(String(json.dumps(self.status(now))))

    def status(self, now: float) -> dict[str, Any]:
        """Status of the loop as plain values."""
        return {
            "robot": self.robot.name,
            "state": str(self.state),
            "reason": self.reason,
            "ticks": self.ticks,
            "overruns": self.overruns,
            "latency": round(self.runner.latency, 4),
            "remaining": round(self.executor.remaining(now), 4),
            "ages": self.inputs.ages(now),
            "interventions": dict(self.log.counts),
            "limited": round(self.log.limited_fraction, 3),
        }
