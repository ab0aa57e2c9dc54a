"""`robopolicy deploy --check`: is everything there that a run needs, and does it fit together? Nothing is driven.

Only a simulated robot is moved, to where it is: its command time-out and its emergency stop are tried out. Those of a
real robot are asked for, since trying them is the operator's business.
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
from robopolicy.deploy.contract import ChunkSource
from robopolicy.errors import UserError
from robopolicy_robots.commands import command_message
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.intake import Intake
from robopolicy_robots.messages import CATALOGUE, Bool, Message
from robopolicy_robots.policy_source import Wanted, misfits
from robopolicy_robots.robot import QUALITIES, RobotSpec
from robopolicy_robots.simulated.client import Simulation
from robopolicy_robots.transports.base import Publisher, Transport

LISTEN = 1.0  # [s] for which rates are measured
PATIENCE = 5.0  # [s] until what is missing counts as missing
ASKED = 20  # chunks whose time is taken, after one that warms up
SLACK = 0.1  # [s] that a busy machine may add to the robot's time-out


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    ok: bool
    found: str


@dataclass
class Subject:
    """What is checked."""

    robot: RobotSpec
    transport: Transport
    embodiment: Embodiment
    source: ChunkSource
    wanted: Wanted
    other: Callable[[], Transport]  # another transport of the same kind, as an operator's button would use
    simulation: Simulation | None = None


def check(subject: Subject) -> list[Finding]:
    """Look at everything, in the order in which a run needs it."""
    robot = subject.robot
    intake = Intake(robot, subject.transport, subject.embodiment.sources)
    commands = subject.transport.advertise(
        robot.command.topic, CATALOGUE[robot.command.kind], QUALITIES[robot.command.qos]
    )
    findings = [_described(subject), *_heard(subject, intake)]
    until = time.monotonic() + PATIENCE
    while not commands.matched and time.monotonic() < until:
        time.sleep(0.01)
    takers = commands.matched
    findings.append(Finding("commands", takers > 0, f"{takers} subscribers of {robot.command.topic}"))
    steps: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("joints", lambda: _joints(subject, intake)),
        ("policy", lambda: _policy(subject, intake)),
        ("emergency stop", lambda: _estop(subject)),
        ("command time-out", lambda: _timeout(subject, intake, commands)),
    )
    for name, look in steps:
        try:
            findings.extend(look())
        except UserError as error:
            findings.append(Finding(name, False, str(error)))
    return findings


def show(findings: list[Finding], title: str) -> int:
    """Print the table; 0 if all is well, else 2."""
    table = Table(title=title, title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for each in findings:
        table.add_row(each.name, "pass" if each.ok else "FAIL", each.found)
    console = Console()
    console.print(table)
    failed = sum(not each.ok for each in findings)
    console.print(f"{failed} of {len(findings)} checks failed" if failed else f"all {len(findings)} checks passed")
    return 2 if failed else 0


def _described(subject: Subject) -> Finding:
    """Limits without which nothing protects a real robot."""
    limits, robot = subject.robot.limits, subject.robot
    endless = [
        joint.name for joint, width in zip(robot.joints, limits.position_high - limits.position_low, strict=True)
        if not np.isfinite(width)
    ]  # fmt: skip
    unknown = [name for name in ("acceleration", "jerk", "effort") if not np.isfinite(getattr(limits, name)).any()]
    found = f"{len(robot.joints)} joints" + (f"; no limits of {', '.join(unknown)}" if unknown else "")
    if endless:
        found = f"no position limits of {', '.join(endless)}"
    return Finding("limits", not endless, found)


def _heard(subject: Subject, intake: Intake) -> Iterator[Finding]:
    """Every source: how many speak, how often, how old it gets."""
    until = time.monotonic() + PATIENCE
    while (intake.watchdog.oldest(time.monotonic()) or intake.stranger()) and time.monotonic() < until:
        intake.drain()
        time.sleep(0.005)
    begin = time.monotonic()
    before = {key: received.sequence for key, received in intake.state.items()}
    oldest = dict.fromkeys(intake.watchdog.streams, 0.0)
    while (now := time.monotonic()) < begin + LISTEN:
        intake.drain()
        oldest = {key: max(oldest[key], stream.age(now)) for key, stream in intake.watchdog.streams.items()}
        time.sleep(0.002)
    sequences = {key: received.sequence for key, received in intake.state.items()}
    for key, subscription in intake.subscriptions.items():
        rate = (sequences.get(key, 0) - before.get(key, 0)) / LISTEN
        deadline, speakers = subject.robot.deadline(key), subscription.publishers
        found = f"{speakers} publishers of {subject.robot.source(key).topic}, {rate:.0f} Hz"
        found += f", at most {1e3 * oldest[key]:.0f} ms old, allowed {1e3 * deadline:.0f} ms" if rate else ""
        yield Finding(f"source {key}", speakers == 1 and rate > 0 and oldest[key] <= deadline, found)


def _joints(subject: Subject, intake: Intake) -> Iterator[Finding]:
    """All of them reported, finite and inside their limits."""
    measured = intake.measured(time.monotonic()).position
    outside = ~subject.robot.limits.inside(measured, slack=1e-3)
    names = ", ".join(np.array(subject.robot.names)[outside])
    yield Finding("joints", not names, f"outside their limits: {names}" if names else "all reported, inside limits")


def _policy(subject: Subject, intake: Intake) -> Iterator[Finding]:
    """Whether observations and actions fit, how near the first target is, and whether chunks come in time."""
    source, robot, embodiment = subject.source, subject.robot, subject.embodiment
    spec = source.spec
    wanted, wrong = subject.wanted, misfits(source, subject.wanted)
    found = f"{wanted.task}, actions of {1e3 * wanted.control_dt:g} ms"
    yield Finding("task", not wrong, "; ".join(wrong) or found)
    if isinstance(source, Bundle):
        report = source.verify()
        text = f"golden chunks within {report.max_error:.0e}, allowed {report.tolerance:.0e}"
        yield Finding("bundle", report.ok, text)
    if wrong:
        return
    embodiment.start(intake.state)
    seen = embodiment.observe(intake.state)
    for key, shape in spec.observation.items():
        found = np.shape(seen[key]) if key in seen else "nothing"
        if found != tuple(shape):
            raise UserError(f"The policy expects '{key}' of shape {tuple(shape)}, the robot gives {found}.")
    obs = {key: np.stack([seen[key]] * spec.obs_horizon) for key in spec.observation}
    seconds: list[float] = []
    for _ in range(ASKED + 1):
        start = time.monotonic()
        chunk = source.chunk(obs)
        seconds.append(time.monotonic() - start)
    if not np.isfinite(chunk).all():
        raise UserError("The policy answers with numbers that are not finite.")
    order = [embodiment.joints.index(name) for name in robot.names]
    goal = np.asarray(embodiment.command(chunk[0], intake.state))[order]
    far = np.abs(goal - intake.measured(time.monotonic()).position).max() if robot.mode == "absolute" else 0.0
    yield Finding("first target", far <= robot.guard.first_command, f"{far:.3f} rad or m from where the robot is")
    p95, dt = float(np.quantile(seconds[1:], 0.95)), embodiment.control_dt
    delay = int(delay_steps(p95, robot.dt) * robot.dt / dt + 1e-6)
    played = min(spec.execute, spec.horizon - delay)
    found = (
        f"p95 {1e3 * p95:.1f} ms; {max(played, 0)} of a chunk's {spec.horizon} actions of {1e3 * dt:.0f} ms are played"
    )
    found += f", it was trained to play {spec.execute}" if played != spec.execute else ""
    yield Finding("inference", played >= max(delay, 1), found)
    ticks = dt * robot.rate
    yield Finding("rate", ticks >= 1.0 - 1e-6, f"{robot.rate:g} Hz, {ticks:.3g} ticks an action")


def _estop(subject: Subject) -> Iterator[Finding]:
    """A simulated robot's is pressed and released; of a real one somebody has to be there who can."""
    robot, topic = subject.robot, subject.robot.estop.topic
    ours = subject.transport.subscribe(topic, Bool, QUALITIES[robot.estop.qos])
    until = time.monotonic() + PATIENCE
    if subject.simulation is None:
        while not ours.publishers and time.monotonic() < until:
            time.sleep(0.01)
        found = f"{ours.publishers} publishers of {topic}"
        by_heart = f", heartbeat within {robot.guard.heartbeat:g} s" if robot.guard.heartbeat else ""
        yield Finding("emergency stop", ours.publishers > 0 or bool(by_heart), found + by_heart)
        return
    with subject.other() as operator:
        button = operator.advertise(topic, Bool, QUALITIES[robot.estop.qos])
        found = {pressed: _arrives(button, ours, pressed, until) for pressed in (True, False)}
    heard = ", ".join(f"{'pressed' if key else 'released'} {seen}" for key, seen in found.items())
    yield Finding("emergency stop", "unheard" not in heard, f"{topic}: {heard}")


def _arrives(button: Publisher[Bool], ours: Any, pressed: bool, until: float) -> str:
    start = time.monotonic()
    while time.monotonic() < until:
        button.publish(Bool(pressed))
        time.sleep(0.005)
        if (received := ours.latest()) is not None and received.message.data is pressed:
            return f"heard after {1e3 * (time.monotonic() - start):.0f} ms"
    return "unheard"


def _timeout(subject: Subject, intake: Intake, commands: Publisher[Message]) -> Iterator[Finding]:
    """The robot's own protection should this program die: stated, and of a simulated robot measured."""
    robot, simulation = subject.robot, subject.simulation
    if robot.command_timeout is None:
        raise UserError(
            "not stated: find out after how long the robot stops without commands, and say 'command_timeout'"
        )
    if simulation is None:
        yield Finding("command time-out", True, f"{1e3 * robot.command_timeout:.0f} ms, as stated; try it yourself")
        return
    here = command_message(robot, intake.measured(time.monotonic()).position)
    for _ in range(10):
        commands.publish(here)
        sent = time.monotonic()
        time.sleep(robot.dt)
    while not simulation.status.holding and time.monotonic() < sent + PATIENCE:
        time.sleep(0.001)
    after = time.monotonic() - sent
    allowed = robot.command_timeout + 2.0 * robot.dt + SLACK
    found = f"holds {1e3 * after:.0f} ms after the last command, stated {1e3 * robot.command_timeout:.0f} ms"
    yield Finding("command time-out", simulation.status.holding and after <= allowed, found)
