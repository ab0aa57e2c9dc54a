"""One deployment: robot, transport, embodiment, policy and control loop put together, played and reported."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.cli.options import check_idle, check_overwrite
from robopolicy.data.support import SupportGate, open_gate
from robopolicy.deploy.chunk_buffer import JOINS
from robopolicy.deploy.contract import ChunkSource
from robopolicy.deploy.dashboard import parse_address
from robopolicy.deploy.safety.ood import RESPONSES, SupportCheck, SupportCheckConfig
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.intervals import wilson
from robopolicy.files import check_new_file, free_place, write_text
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.sim.registry import get_task
from robopolicy.spec import MEMORY
from robopolicy_robots.check import Subject, check, show
from robopolicy_robots.figures import Figures
from robopolicy_robots.filter_log import RecordedFilter
from robopolicy_robots.live_view import View, open_view
from robopolicy_robots.loop import ControlLoop, Parts
from robopolicy_robots.pace import prioritise
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.policy_source import InlineRunner, Kept, Wanted, misfits, open_source, start_episode
from robopolicy_robots.reach import connect, repeated
from robopolicy_robots.recorder import RecordedTransport, Recorder
from robopolicy_robots.robot import CAMERA, RobotSpec, load_robot
from robopolicy_robots.simulated.client import PATIENCE, SimulatedTime, Simulation, simulated
from robopolicy_robots.simulated.node import build, node_parser, task_of
from robopolicy_robots.states import State, Tick
from robopolicy_robots.task_embodiment import TaskEmbodiment
from robopolicy_robots.transports.base import TRANSPORTS
from robopolicy_robots.wiring import prefix_of

DRIVING = ("--episodes", "--seconds", "--record", "--out", "--dry-run", "--browser", "--support")


@dataclass
class Played:
    """What one episode, or one stretch on a real robot, came to."""

    seed: int | None = None
    success: bool | None = None
    steps: int = 0  # control steps, of a simulated robot
    done: bool = False  # the episode came to its end
    state: str = ""  # of the loop at its end
    reason: str = ""
    ticks: int = 0
    misses: int = 0  # periods in which no tick began
    holds: int = 0  # times that the loop held
    interventions: dict[str, int] = field(default_factory=dict)
    inference_ms: float = 0.0  # p95
    moments: list[float] = field(default_factory=list)  # [s] when ticks began


def deploy(args: argparse.Namespace) -> int:
    """Run `robopolicy deploy`; 0 when it ended as it should, 1 when the safety layer stopped the robot for good.

    Raises:
        UserError: Something is wrong with the arguments, or does not answer.
    """
    robot = load_robot(args.robot)
    asked = {name: getattr(args, name) for name in ("rate", "domain") if getattr(args, name) is not None}
    robot = replace(robot, **asked)
    args.transport = args.transport or robot.transport
    _check(args, robot)
    task = task_of(args.task)
    embodiment = TaskEmbodiment(task, prefix_of(task.model, robot.names))
    for key in embodiment.sources:
        robot.source(key)  # refuses a task for another robot, or of more than it says, before anything is started
    wanted = Wanted(
        get_task(args.task).name,
        {key: tensor.shape for key, tensor in task.observation.items()},
        task.action_low,
        task.action_high,
        embodiment.control_dt,
    )
    report = _places(args)
    if args.priority is not None:
        prioritise(args.priority)
    with ExitStack() as stack:
        source = open_source(args.policy, args.device)
        stack.callback(source.close)
        if args.join == "rtc" and not source.takes_prefix:
            raise UserError(
                f"--join rtc needs a policy that continues what is being played, and {args.policy} does not; pass a "
                "bundle of 'robopolicy export --rtc' or a server of one, or choose another join."
            )
        for camera in _images(source):
            robot.source(CAMERA + camera)
        if robot.simulated and args.transport != "loopback":
            connect(args, robot).close()  # what is wrong with the transport is said before a process is started
        if args.check:
            return _checked(args, robot, task, source, wanted)
        if wrong := misfits(source, wanted):
            raise UserError(f"The policy {args.policy} does not fit {wanted.task}: {'; '.join(wrong)}.")
        gate = _gate(args, source)
        if robot.simulated and not args.attach:
            stack.enter_context(_simulation(args, robot, source))
        recorder = stack.enter_context(Recorder(args.record)) if args.record else None
        view = stack.enter_context(open_view(args.plain, Figures(robot, args.task), args.browser))
        episodes: list[Played] = []
        for number in range(args.episodes if robot.simulated else 1):
            episodes.append(
                _play(
                    args,
                    robot,
                    TaskEmbodiment(task, prefix_of(task.model, robot.names), _images(source)),
                    source,
                    recorder,
                    view,
                    gate,
                    args.seed + number,
                )
            )
            view.finished(episodes[-1], len(episodes), args.episodes)
            if not episodes[-1].done:
                break
    figures = summary(args, robot, episodes)
    write_text(report, json.dumps(figures, indent=2) + "\n")
    view.closing(figures, report)
    return 1 if any(each.state == State.ESTOP for each in episodes) else 0


def _check(args: argparse.Namespace, robot: RobotSpec) -> None:
    """Refuse options that do not go together.

    Raises:
        UserError: They do not; one line.
    """
    if args.browser is not None:
        parse_address(args.browser)
    if args.transport not in (*TRANSPORTS, "auto"):
        raise unknown_name("transport", args.transport, (*TRANSPORTS, "auto"))
    if args.join not in JOINS:
        raise unknown_name("join", args.join, JOINS)
    if args.unsupported not in RESPONSES:
        raise unknown_name("response", args.unsupported, RESPONSES)
    check_overwrite(args, "--out", "--record")
    if args.support is None:
        check_idle(args, "without --support", "--unsupported")
    if args.check:
        check_idle(args, "with --check, which drives nothing", *DRIVING)
    if not robot.simulated:
        check_idle(args, f"on {robot.name}, which is a real robot", "--seed")
    if not robot.simulated and args.episodes > 1:
        raise UserError(f"--episodes is for simulated robots; {robot.name} is a real one, and moves until you stop it.")
    if not robot.simulated and (args.lockstep or args.attach):
        option = "--lockstep" if args.lockstep else "--attach"
        raise UserError(f"{option} is for simulated robots; {robot.name} is a real one.")
    if robot.simulated and args.transport == "lerobot":
        raise UserError(f"LeRobot drives real robots; {robot.name} is a simulated one.")
    if not robot.simulated and args.transport == "loopback":
        raise UserError("The transport loopback stays within this process; name the one that reaches the robot.")
    if args.attach and args.transport == "loopback":
        raise UserError("The transport loopback stays within this process, so there is no robot to attach to.")
    if args.check and args.lockstep:
        raise UserError("In lockstep time passes with commands, and --check looks at what comes by itself.")
    if args.dry_run and args.lockstep:
        raise UserError("In lockstep time passes with commands, and --dry-run sends none; leave one of them out.")


def _places(args: argparse.Namespace) -> Path:
    """Where the report goes; refuses places of files now rather than after the run.

    Raises:
        UserError: A place is taken or cannot be written.
    """
    report = args.out or free_place(Path("runs/deploy")) / "report.json"
    check_new_file(report, ".json", overwrite=args.overwrite)
    if args.record is not None:
        check_new_file(args.record, ".mcap", overwrite=args.overwrite, option="--record")
    return report


def _checked(args: argparse.Namespace, robot: RobotSpec, task: MujocoTask, source: ChunkSource, wanted: Wanted) -> int:
    """Check in place of driving; the exit code."""
    with ExitStack() as stack:
        if robot.simulated and not args.attach:
            stack.enter_context(_simulation(args, robot, source))
        transport = stack.enter_context(connect(args, robot))
        simulation = Simulation(transport) if robot.simulated else None
        if simulation is not None:
            simulation.reset(args.seed)
        subject = Subject(
            robot,
            transport,
            TaskEmbodiment(task, prefix_of(task.model, robot.names), _images(source)),
            source,
            wanted,
            lambda: connect(args, robot),
            simulation,
        )
        return show(check(subject), f"{robot.name}, {args.task}, {args.transport}")


def _gate(args: argparse.Namespace, source: ChunkSource) -> SupportGate | None:
    """The support of the data in what the policy sees of it; None unless it was asked for."""
    if args.support is None:
        return None
    seen = {key: shape for key, shape in source.spec.observation.items() if key != MEMORY}
    gate = open_gate(args.support, [key for key, shape in seen.items() if len(shape) == 1])
    blank = {key: torch.zeros(1, *shape) for key, shape in seen.items()}
    gate.point(blank, torch.zeros(1, source.spec.action_dim))  # refuses what does not fit
    return gate


def _images(source: ChunkSource) -> dict[str, tuple[int, int]]:
    """Cameras that a policy sees and the sizes of their pictures."""
    shapes = {
        key.removeprefix(CAMERA): shape for key, shape in source.spec.observation.items() if key.startswith(CAMERA)
    }
    return {name: (shape[1], shape[2]) for name, shape in shapes.items()}


@contextmanager
def _simulation(args: argparse.Namespace, robot: RobotSpec, source: ChunkSource) -> Iterator[None]:
    """A simulated robot: in a process of its own, or in a thread where the transport is within this one."""
    words = ["--robot", args.robot, "--task", args.task, *repeated(args)]
    words += ["--lockstep", "--rate", f"{robot.rate:.17g}"] if args.lockstep else []
    words += ["--cameras", *_images(source)]
    if args.transport != "loopback":
        with simulated(words):
            yield
        return
    node, over = build(node_parser().parse_args(words)), threading.Event()

    def live() -> None:
        try:
            node.run(over.is_set)
        finally:
            node.close()  # here, as what renders belongs to the thread that made it

    thread = threading.Thread(target=live, name="simulated robot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)


def _play(
    args: argparse.Namespace,
    robot: RobotSpec,
    embodiment: TaskEmbodiment,
    source: ChunkSource,
    recorder: Recorder | None,
    view: View,
    gate: SupportGate | None,
    seed: int,
) -> Played:
    """Play one episode; a real robot goes on until it is told to stop."""
    played = Played(seed if robot.simulated else None)
    with ExitStack() as stack:
        transport = clock = connect(args, robot)
        view.watch(transport)
        if args.lockstep:
            transport = clock = SimulatedTime(transport)
        stack.callback(clock.close)
        simulation = Simulation(transport) if robot.simulated else None
        if recorder is not None:
            transport = RecordedTransport(transport, recorder)
        safety = RecordedFilter(robot.limits, robot.filter_config, recorder=recorder) if recorder is not None else None
        runner = InlineRunner(Kept(source)) if args.lockstep else PolicyRunner(Kept(source))
        support = SupportCheck(gate, SupportCheckConfig(args.unsupported)) if gate is not None else None
        parts = Parts(safety=safety, join=args.join, support=support, dry_run=args.dry_run)
        if simulation is not None:
            simulation.reset(seed)
        loop = ControlLoop(robot, transport, embodiment, runner, parts)
        stack.callback(loop.stop)
        begin, armed, missed, last = time.monotonic(), False, 0, loop.state

        def after(tick: Tick) -> None:
            nonlocal armed, last, begin, missed
            if armed:
                played.moments.append(tick.now)
            played.holds += tick.state is State.HOLD and last is not State.HOLD
            last = tick.state
            view.update(loop.status(tick.now), tick)
            if view.stopped:
                loop.estop.press("pressed in the browser")
            elif not armed and not loop.unmet(tick.now):
                start_episode(source, seed)  # the policy has been warmed up; its noise begins anew
                loop.arm()
                armed, begin, missed = True, time.monotonic(), loop.overruns
            elif not armed and time.monotonic() - begin > PATIENCE:
                raise UserError(f"The robot cannot be armed: {loop.unmet(tick.now)}.")
            over = simulation is not None and simulation.status.done
            enough = armed and args.seconds and time.monotonic() - begin > args.seconds
            if over or tick.state is State.ESTOP or enough:
                played.state, played.reason = str(tick.state), tick.reason
                loop.stop()

        parts.on_tick = after
        if isinstance(clock, SimulatedTime):
            assert simulation is not None
            clock.catch_up(simulation.status.time)
            _in_lockstep(loop, clock)
        else:
            loop.run()
        if simulation is not None:
            status = simulation.status
            played.success, played.steps, played.done = status.success, status.steps, status.done
        played.state = played.state or str(loop.state)
        played.ticks, played.misses = len(played.moments), loop.overruns - missed
        played.interventions, played.inference_ms = dict(loop.log.counts), 1e3 * runner.latency
    return played


def _in_lockstep(loop: ControlLoop, clock: SimulatedTime) -> None:
    """Tick whenever the robot has come to the end of a period; time passes with every command."""
    until = time.monotonic() + PATIENCE
    while loop.state is not State.STOPPED:
        tick = loop.tick(clock.now)
        if loop.state is State.STOPPED:
            return
        if tick.command is not None:
            clock.catch_up(clock.now + loop.robot.dt)
            until = time.monotonic() + PATIENCE
        elif time.monotonic() > until:
            raise UserError(f"The simulated robot cannot be driven: {tick.reason}.")
        else:
            time.sleep(1e-3)


def summary(args: argparse.Namespace, robot: RobotSpec, episodes: list[Played]) -> dict[str, Any]:
    """The figures of `report.json`."""
    periods = np.concatenate([np.diff(each.moments) for each in episodes] or [np.zeros(0)])
    ticks, misses = sum(each.ticks for each in episodes), sum(each.misses for each in episodes)
    scored = [each for each in episodes if each.done]
    rate = wilson(sum(bool(each.success) for each in scored), len(scored)) if scored else None
    kinds = sorted({kind for each in episodes for kind in each.interventions})
    return {
        "robot": robot.name,
        "task": args.task,
        "policy": args.policy,
        "transport": args.transport,
        "lockstep": args.lockstep,
        "dry_run": args.dry_run,
        "rate": robot.rate,
        "n": len(scored),
        "success": rate.estimate if rate else None,
        "low": rate.low if rate else None,
        "high": rate.high if rate else None,
        "ticks": ticks,
        "period_p50_ms": _quantile(periods, 0.5),
        "period_p99_ms": _quantile(periods, 0.99),
        "jitter_p50_ms": _quantile(np.abs(periods - robot.dt), 0.5),
        "jitter_p99_ms": _quantile(np.abs(periods - robot.dt), 0.99),
        "deadline_misses": misses,
        "deadline_miss_share": misses / max(ticks + misses, 1),
        "inference_p95_ms": max((each.inference_ms for each in episodes), default=0.0),
        "holds": sum(each.holds for each in episodes),
        "interventions": {kind: sum(each.interventions.get(kind, 0) for each in episodes) for kind in kinds},
        "episodes": [
            {key: value for key, value in vars(each).items() if key not in ("moments", "inference_ms")}
            for each in episodes
        ],
    }


def _quantile(periods: np.ndarray, share: float) -> float | None:
    return round(1e3 * float(np.quantile(periods, share)), 3) if len(periods) else None
