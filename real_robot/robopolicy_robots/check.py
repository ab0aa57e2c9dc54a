"""Preflight checks of `robopolicy deploy --check`, without motion of a real robot.

The command timeout and the emergency stop are measured only on a simulated robot, with a command to its current
position. For a real robot they must be declared, and the operator must test them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from robopolicy.deploy.bundle import Bundle
from robopolicy.deploy.chunk_buffer import delay_steps
from robopolicy.deploy.contract import ChunkPolicy
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy_robots.commands import command_message
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.messages import CATALOGUE, Bool, Message
from robopolicy_robots.policy_source import PolicyRequirements, compatibility_errors
from robopolicy_robots.robot import QOS_PROFILES, RobotSpec
from robopolicy_robots.sensor_inputs import SensorInputs
from robopolicy_robots.simulated.client import Simulation
from robopolicy_robots.transports.actions import TrajectoryClient
from robopolicy_robots.transports.base import Publisher, Transport

MEASURE_TIME = 1.0  # [s] for which rates are measured
DISCOVERY_TIMEOUT = 5.0  # [s] to wait for missing topics
TIMED_CHUNKS = 20  # timed requests after one warm-up
SLACK = 0.1  # [s] tolerance of the command timeout on a busy machine


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    name: str
    ok: bool
    found: str


@dataclass
class PreflightContext:
    """Objects that the checks need."""

    robot: RobotSpec
    transport: Transport
    embodiment: Embodiment
    source: ChunkPolicy
    requirements: PolicyRequirements
    operator_transport: Callable[[], Transport]  # opens a second connection, as an operator would
    simulation: Simulation | None = None


def check(context: PreflightContext) -> list[CheckResult]:
    """Run all checks in the order in which a run depends on them."""
    robot = context.robot
    inputs = SensorInputs(robot, context.transport, context.embodiment.sources)
    commands = _commands(context)
    results = [_limits(context), *_sources(context, inputs)]
    until = time.monotonic() + DISCOVERY_TIMEOUT
    while not commands.matched and time.monotonic() < until:
        time.sleep(0.01)
    count, peer = commands.matched, "action server" if robot.uses_action else "subscriber"
    found = f"{counted(count, peer)} of {robot.command.topic}"
    results.append(CheckResult("commands", count > 0, found))
    steps: tuple[tuple[str, Callable[[], Iterator[CheckResult]]], ...] = (
        ("joints", lambda: _joints(context, inputs)),
        ("policy", lambda: _policy(context, inputs)),
        ("emergency stop", lambda: _estop(context)),
        ("command time-out", lambda: _timeout(context, inputs, commands)),
    )
    for name, run in steps:
        try:
            results.extend(run())
        except UserError as error:
            results.append(CheckResult(name, False, str(error)))
    return results


def _commands(context: PreflightContext) -> Publisher[Message] | TrajectoryClient:
    """Open the topic or the action of the commands."""
    command = context.robot.command
    if context.robot.uses_action:
        return context.transport.trajectory_client(command.topic)
    return context.transport.advertise(command.topic, CATALOGUE[command.type], QOS_PROFILES[command.qos])


def show(results: list[CheckResult], title: str) -> int:
    """Print the results as a table; return 0 if all checks passed, else 2."""
    table = Table(title=title, title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for each in results:
        table.add_row(each.name, "pass" if each.ok else "FAIL", each.found)
    console = Console()
    console.print(table)
    failed = sum(not each.ok for each in results)
    total = counted(len(results), "check")
    console.print(f"{failed} of {total} failed" if failed else f"all {total} passed")
    return 2 if failed else 0


def _limits(context: PreflightContext) -> CheckResult:
    """Check that all joints have position limits."""
    limits, robot = context.robot.limits, context.robot
    unbounded = np.array(robot.names)[~np.isfinite(limits.position_high - limits.position_low)]
    unknown = [name for name in ("acceleration", "jerk", "effort") if not np.isfinite(getattr(limits, name)).any()]
    found = counted(len(robot.joints), "joint") + (f"; no limits of {', '.join(unknown)}" if unknown else "")
    if len(unbounded):
        found = f"no position limits of {', '.join(unbounded)}"
    return CheckResult("limits", not len(unbounded), found)


def _sources(context: PreflightContext, inputs: SensorInputs) -> Iterator[CheckResult]:
    """Check publishers, rate and age of every source."""
    until = time.monotonic() + DISCOVERY_TIMEOUT
    while (inputs.watchdog.oldest(time.monotonic()) or inputs.publisher_error()) and time.monotonic() < until:
        inputs.poll()
        time.sleep(0.005)
    begin = time.monotonic()
    before = {key: received.sequence for key, received in inputs.state.items()}
    oldest = dict.fromkeys(inputs.watchdog.streams, 0.0)
    while (now := time.monotonic()) < begin + MEASURE_TIME:
        inputs.poll()
        oldest = {key: max(oldest[key], stream.age(now)) for key, stream in inputs.watchdog.streams.items()}
        time.sleep(0.002)
    sequences = {key: received.sequence for key, received in inputs.state.items()}
    for key, subscription in inputs.subscriptions.items():
        rate = (sequences.get(key, 0) - before.get(key, 0)) / MEASURE_TIME
        deadline, publishers = context.robot.deadline(key), subscription.publishers
        found = f"{counted(publishers, 'publisher')} of {context.robot.source(key).topic}, {rate:.0f} Hz"
        found += f", at most {1e3 * oldest[key]:.0f} ms old, allowed {1e3 * deadline:.0f} ms" if rate else ""
        yield CheckResult(f"source {key}", publishers == 1 and rate > 0 and oldest[key] <= deadline, found)


def _joints(context: PreflightContext, inputs: SensorInputs) -> Iterator[CheckResult]:
    """Check that all joints are reported, finite and inside their limits."""
    measured = inputs.measured(time.monotonic()).position
    outside = ~context.robot.limits.inside(measured, slack=1e-3)
    names = ", ".join(np.array(context.robot.names)[outside])
    yield CheckResult("joints", not names, f"outside their limits: {names}" if names else "all reported, inside limits")


def _policy(context: PreflightContext, inputs: SensorInputs) -> Iterator[CheckResult]:
    """Check observations, actions, the distance of the first target and the inference time."""
    source, robot, embodiment = context.source, context.robot, context.embodiment
    spec = source.spec
    task, errors = context.requirements, compatibility_errors(source, context.requirements)
    found = f"{task.task}, actions of {1e3 * task.control_dt:g} ms"
    yield CheckResult("task", not errors, "; ".join(errors) or found)
    if isinstance(source, Bundle):
        report = source.verify()
        text = f"golden chunks within {report.max_error:.0e}, allowed {report.tolerance:.0e}"
        yield CheckResult("bundle", report.ok, text)
    if errors:
        return
    embodiment.start(inputs.state)
    current = embodiment.observe(inputs.state)
    for key, shape in spec.observation.items():
        found = np.shape(current[key]) if key in current else "nothing"
        if found != tuple(shape):
            raise UserError(f"The policy expects '{key}' of shape {tuple(shape)}, the robot provides {found}.")
    obs = {key: np.stack([current[key]] * spec.obs_horizon) for key in spec.observation}
    seconds: list[float] = []
    for _ in range(TIMED_CHUNKS + 1):
        start = time.monotonic()
        chunk = source.chunk(obs)
        seconds.append(time.monotonic() - start)
    if not np.isfinite(chunk).all():
        raise UserError("The policy returns numbers that are not finite.")
    order = [embodiment.joints.index(name) for name in robot.names]
    goal = np.asarray(embodiment.command(chunk[0], inputs.state))[order]
    far = np.abs(goal - inputs.measured(time.monotonic()).position).max() if robot.mode == "absolute" else 0.0
    near = far <= robot.safety.max_initial_error
    yield CheckResult("first target", near, f"{far:.3f} rad or m from the position of the robot")
    p95, dt = float(np.quantile(seconds[1:], 0.95)), embodiment.control_dt
    delay = int(delay_steps(p95, robot.dt) * robot.dt / dt + 1e-6)
    used = min(spec.action_horizon, spec.horizon - delay)
    actions = counted(spec.horizon, "action")
    found = f"p95 {1e3 * p95:.1f} ms; uses {max(used, 0)} of a chunk's {actions} of {1e3 * dt:.0f} ms"
    found += f", it was trained to execute {spec.action_horizon}" if used != spec.action_horizon else ""
    yield CheckResult("inference", used >= max(delay, 1), found)
    ticks = dt * robot.rate
    yield CheckResult("rate", ticks >= 1.0 - 1e-6, f"{robot.rate:g} Hz, {counted(f'{ticks:.3g}', 'tick')} per action")


def _estop(context: PreflightContext) -> Iterator[CheckResult]:
    """Press and release the emergency stop of a simulated robot; check for a publisher on a real robot."""
    robot, topic = context.robot, context.robot.estop.topic
    ours = context.transport.subscribe(topic, Bool, QOS_PROFILES[robot.estop.qos])
    until = time.monotonic() + DISCOVERY_TIMEOUT
    if context.simulation is None:
        while not ours.publishers and time.monotonic() < until:
            time.sleep(0.01)
        found = f"{counted(ours.publishers, 'publisher')} of {topic}"
        heartbeat = f", heartbeat within {robot.safety.heartbeat_timeout:g} s" if robot.safety.heartbeat_timeout else ""
        yield CheckResult("emergency stop", ours.publishers > 0 or bool(heartbeat), found + heartbeat)
        return
    with context.operator_transport() as operator:
        button = operator.advertise(topic, Bool, QOS_PROFILES[robot.estop.qos])
        delays = {pressed: _press(button, ours, pressed, until) for pressed in (True, False)}
    found = ", ".join(f"{'pressed' if key else 'released'} {delay}" for key, delay in delays.items())
    yield CheckResult("emergency stop", "not received" not in found, f"{topic}: {found}")


def _press(button: Publisher[Bool], ours: Any, pressed: bool, until: float) -> str:
    """Publish `pressed` until `ours` receives it, and return the delay as text."""
    start = time.monotonic()
    while time.monotonic() < until:
        button.publish(Bool(pressed))
        time.sleep(0.005)
        if (received := ours.latest()) is not None and received.message.data is pressed:
            return f"received after {1e3 * (time.monotonic() - start):.0f} ms"
    return "not received"


def _timeout(
    context: PreflightContext, inputs: SensorInputs, commands: Publisher[Message] | TrajectoryClient
) -> Iterator[CheckResult]:
    """Check that the command timeout is declared, and measure it on a simulated robot; goals end at rest themselves."""
    robot, simulation = context.robot, context.simulation
    if isinstance(commands, TrajectoryClient):
        yield CheckResult("command time-out", True, "every goal ends at rest")
        return
    if robot.command_timeout is None:
        raise UserError("not declared: measure when the robot stops without commands, and set 'command_timeout'")
    if simulation is None:
        found = f"{1e3 * robot.command_timeout:.0f} ms, as declared; test it yourself"
        yield CheckResult("command time-out", True, found)
        return
    here = command_message(robot, inputs.measured(time.monotonic()).position)
    for _ in range(10):
        commands.publish(here)
        sent = time.monotonic()
        time.sleep(robot.dt)
    while not simulation.status.holding and time.monotonic() < sent + DISCOVERY_TIMEOUT:
        time.sleep(0.001)
    after = time.monotonic() - sent
    allowed = robot.command_timeout + 2.0 * robot.dt + SLACK
    found = f"holds {1e3 * after:.0f} ms after the last command, declared {1e3 * robot.command_timeout:.0f} ms"
    yield CheckResult("command time-out", simulation.status.holding and after <= allowed, found)
