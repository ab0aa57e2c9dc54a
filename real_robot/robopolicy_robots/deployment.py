"""Deployment of a policy on a robot: setup, episodes and report."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.atomic import write_text
from robopolicy.cli.display import open_display
from robopolicy.cli.options import check_overwrite, reject_unused
from robopolicy.data.ood_detector import OODDetector, load_ood_detector
from robopolicy.deploy.chunk_buffer import BLENDINGS
from robopolicy.deploy.contract import ChunkPolicy, start_episode
from robopolicy.deploy.dashboard import parse_address
from robopolicy.deploy.safety.interventions import meaning
from robopolicy.deploy.safety.ood import RESPONSES, ActionOODCheck, ActionOODConfig
from robopolicy.deploy.safety.watchdog import EStop
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.intervals import wilson
from robopolicy.files import check_new_file, next_free_path
from robopolicy.sim.registry import NO_TASK
from robopolicy.spec import HIDDEN_STATE
from robopolicy.teleop.chunk_policy import HumanChunkPolicy
from robopolicy.viewer.display import Display
from robopolicy.viewer.display_process import FrameStream
from robopolicy_robots.check import PreflightContext, check, show
from robopolicy_robots.connection import connect, to_argv
from robopolicy_robots.embodiment import Embodiment
from robopolicy_robots.filter_log import RecordedFilter
from robopolicy_robots.human import open_human
from robopolicy_robots.loop import ControlLoop, LoopOptions
from robopolicy_robots.metrics import RunMetrics
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.policy_source import (
    SharedChunkPolicy,
    SyncRunner,
    compatibility_errors,
    open_source,
    without_device,
)
from robopolicy_robots.rate import set_realtime_priority
from robopolicy_robots.recorder import RecordedTransport, Recorder
from robopolicy_robots.robot import CAMERA, RobotSpec, load_robot
from robopolicy_robots.run_frames import RunFrames
from robopolicy_robots.setup import Setup, images_of, joint_setup, task_setup
from robopolicy_robots.simulated.client import START_TIMEOUT, SimulatedTime, Simulation, simulated
from robopolicy_robots.simulated.node import build, node_parser, task_of
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import check_transport
from robopolicy_robots.tui import RunDisplay, open_view

RUN_OPTIONS = ("--episodes", "--seconds", "--record", "--out", "--dry-run", "--browser", "--ood-data", "--display")


@dataclass
class EpisodeRecord:
    """Record of one episode, or of one run on a real robot."""

    seed: int | None = None
    success: bool | None = None
    steps: int = 0  # control steps, of a simulated robot
    done: bool = False  # the episode ended
    state: str = ""  # final state of the loop
    reason: str = ""
    ticks: int = 0
    misses: int = 0  # missed periods
    holds: int = 0  # number of holds
    interventions: dict[str, int] = field(default_factory=dict)
    inference_ms: float = 0.0  # p95
    tick_times: list[float] = field(default_factory=list)  # [s] when ticks began


def deploy(args: argparse.Namespace) -> int:
    """Run `robopolicy deploy` and return the exit code: 0 after a normal end, 1 after an emergency stop."""
    robot = load_robot(args.robot)
    changed = {name: getattr(args, name) for name in ("rate", "domain") if getattr(args, name) is not None}
    robot = replace(robot, **changed)
    args.transport = args.transport or robot.transport
    _check(args, robot)
    # Raises an error for a missing source before anything starts.
    setup = None if args.task == NO_TASK else task_setup(args.task, task_of(args.task), robot)
    report = _report_path(args)
    if args.priority is not None:
        set_realtime_priority(args.priority)
    with open_display(args) as display:
        return _run(args, robot, setup, report, display)


def _run(args: argparse.Namespace, robot: RobotSpec, setup: Setup | None, report: Path, display: Display | None) -> int:
    """Run the episodes and write the report; return the exit code."""
    estop = EStop(robot.safety.heartbeat_timeout)
    with ExitStack() as stack:
        stack.enter_context(estop.on_signal())
        if args.teleop is None:
            source = stack.enter_context(closing(open_source(args.policy, args.device)))
        else:
            source, setup = open_human(args, robot, setup, stack)
        if args.chunk_blending == "rtc" and not source.takes_prefix:
            raise UserError(
                f"--chunk-blending rtc needs a policy that continues a prefix, and {args.policy} does not; pass a "
                "bundle of 'robopolicy export --rtc' or a server of such a bundle, or choose another blending."
            )
        setup, images = setup or joint_setup(source, robot), images_of(source)
        for camera in images:
            robot.source(CAMERA + camera)
        if robot.simulated and args.transport != "loopback":
            connect(args, robot).close()  # raises transport errors before a process starts
        if args.check:
            return _run_checks(args, robot, setup, source)
        if errors := compatibility_errors(source, setup.requirements):
            fitted = robot.name if args.task == NO_TASK else setup.requirements.task
            raise UserError(f"The policy {args.policy} does not fit {fitted}: {'; '.join(errors)}.")
        gate = _gate(args, source)
        if robot.simulated and not args.use_running_sim:
            stack.enter_context(_simulation(args, robot, source))
        recorder = stack.enter_context(Recorder(args.record)) if args.record else None
        view = stack.enter_context(open_view(args.no_tui, RunMetrics(robot, args.task), args.browser))
        if display is not None:
            display.begin(FrameStream(f"{robot.name}, {args.task}", setup.requirements.control_dt))
        shared, episodes = SharedChunkPolicy(source), list[EpisodeRecord]()
        for number in range(args.episodes if robot.simulated else 1):
            seed = args.seed + number
            name = f"seed {seed}" if robot.simulated else "run"
            show = None if display is None else partial(RunFrames, display, name)
            episode = _run_episode(args, robot, setup.make(images), shared, recorder, view, gate, estop, seed, show)
            episodes.append(episode)
            view.episode_finished(episode, len(episodes), args.episodes)
            if not episode.done:
                break
    metrics = summary(args, robot, episodes)
    write_text(report, json.dumps(metrics, indent=2) + "\n")
    view.run_finished(metrics, report)
    return 1 if any(each.state == State.ESTOP for each in episodes) else 0


def _check(args: argparse.Namespace, robot: RobotSpec) -> None:
    """Raise `UserError` for invalid or conflicting options."""
    if args.browser is not None:
        parse_address(args.browser)
    if args.policy is None and args.teleop is None:
        raise UserError("Pass a policy with --policy, a person's device with --teleop, or both.")
    if args.teleop is None:
        reject_unused(args, "without --teleop", "--demonstrations")
    check_transport(args.transport)
    if args.chunk_blending not in BLENDINGS:
        raise unknown_name("chunk blending", args.chunk_blending, BLENDINGS)
    if args.ood_action not in RESPONSES:
        raise unknown_name("response", args.ood_action, RESPONSES)
    check_overwrite(args, "--out", "--record", "--display")
    if args.ood_data is None:
        reject_unused(args, "without --ood-data", "--ood-action")
    if args.policy is None:
        reject_unused(args, "without --policy", "--device")
    elif (why := without_device(args.policy)) is not None:
        reject_unused(args, why, "--device")
    if args.check:
        reject_unused(args, "with --check, which does not move the robot", *RUN_OPTIONS)
    if robot.simulated and args.task == NO_TASK:
        raise UserError(f"The simulated robot {robot.name} needs a task; pass e.g. --task manipulation/lift.")
    if not robot.simulated:
        reject_unused(args, f"on {robot.name}, which is a real robot", "--seed")
    if not robot.simulated and args.episodes > 1:
        raise UserError(
            f"--episodes is for simulated robots; {robot.name} is a real robot and moves until you stop it."
        )
    if not robot.simulated and (args.lockstep or args.use_running_sim):
        option = "--lockstep" if args.lockstep else "--use-running-sim"
        raise UserError(f"{option} is for simulated robots; {robot.name} is a real robot.")
    if robot.simulated and args.transport == "lerobot":
        raise UserError(f"LeRobot controls real robots; {robot.name} is a simulated robot.")
    if not robot.simulated and args.transport == "loopback":
        raise UserError("The transport loopback connects only within this process; choose the transport of the robot.")
    if args.use_running_sim and args.transport == "loopback":
        raise UserError("The transport loopback connects only within this process, where no robot runs yet.")
    if args.check and args.lockstep:
        raise UserError("--check cannot run in lockstep, where time passes only with commands; leave one of them out.")
    if args.dry_run and args.lockstep:
        raise UserError(
            "--dry-run cannot run in lockstep, where time passes only with commands; leave one of them out."
        )


def _report_path(args: argparse.Namespace) -> Path:
    """Path of the report; raises `UserError` for an output path that exists already or cannot be written."""
    report = args.out or next_free_path(Path("runs/deploy")) / "report.json"
    check_new_file(report, ".json", overwrite=args.overwrite)
    if args.record is not None:
        check_new_file(args.record, ".mcap", overwrite=args.overwrite, option="--record")
    return report


def _run_checks(args: argparse.Namespace, robot: RobotSpec, setup: Setup, source: ChunkPolicy) -> int:
    """Run the preflight checks and return the exit code."""
    with ExitStack() as stack:
        if robot.simulated and not args.use_running_sim:
            stack.enter_context(_simulation(args, robot, source))
        transport = stack.enter_context(connect(args, robot))
        simulation = Simulation(transport) if robot.simulated else None
        if simulation is not None:
            simulation.reset(args.seed)
        embodiment = setup.make(images_of(source))
        context = PreflightContext(
            robot, transport, embodiment, source, setup.requirements, lambda: connect(args, robot), simulation
        )
        return show(check(context), f"{robot.name}, {args.task}, {args.transport}")


def _gate(args: argparse.Namespace, source: ChunkPolicy) -> OODDetector | None:
    """OOD detector for the vectors that the policy observes; None without `--ood-data`."""
    if args.ood_data is None:
        return None
    shapes = {key: shape for key, shape in source.spec.observation.items() if key != HIDDEN_STATE}
    gate = load_ood_detector(args.ood_data, [key for key, shape in shapes.items() if len(shape) == 1])
    zeros = {key: torch.zeros(1, *shape) for key, shape in shapes.items()}
    gate.point(zeros, torch.zeros(1, source.spec.action_dim))  # raises an error for wrong sizes
    return gate


@contextmanager
def _simulation(args: argparse.Namespace, robot: RobotSpec, source: ChunkPolicy) -> Iterator[None]:
    """Run a simulated robot in its own process, or in a thread for the transport loopback."""
    argv = ["--robot", args.robot, "--task", args.task, *to_argv(args)]
    argv += ["--lockstep", "--rate", f"{robot.rate:.17g}"] if args.lockstep else []
    argv += ["--cameras", *images_of(source)]
    if args.transport != "loopback":
        with simulated(argv):
            yield
        return
    node, stopping = build(node_parser().parse_args(argv)), threading.Event()

    def run() -> None:
        try:
            node.run(stopping.is_set)
        finally:
            node.close()  # in this thread, which created the renderers

    thread = threading.Thread(target=run, name="simulated robot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(5.0)


def _run_episode(
    args: argparse.Namespace,
    robot: RobotSpec,
    embodiment: Embodiment,
    shared: SharedChunkPolicy,
    recorder: Recorder | None,
    view: RunDisplay,
    gate: OODDetector | None,
    estop: EStop,
    seed: int,
    show: Callable[..., RunFrames] | None,
) -> EpisodeRecord:
    """Run one episode; a real robot runs until it stops."""
    source, record = shared.source, EpisodeRecord(seed if robot.simulated else None)
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
        runner = SyncRunner(shared) if args.lockstep else PolicyRunner(shared)
        support = ActionOODCheck(gate, ActionOODConfig(args.ood_action)) if gate is not None else None
        checks = {"safety": safety, "support": support, "estop": estop}
        options = LoopOptions(**checks, chunk_blending=args.chunk_blending, dry_run=args.dry_run)
        if simulation is not None:
            simulation.reset(seed)
        loop = ControlLoop(robot, transport, embodiment, runner, options)
        stack.callback(loop.stop)
        solved = (lambda: simulation.status.success) if simulation is not None else lambda: None
        frames = None if show is None else show(loop, embodiment, solved)
        begin, armed, missed, last = time.monotonic(), False, 0, loop.state

        def after(tick: Tick) -> None:
            nonlocal armed, last, begin, missed
            if armed:
                record.tick_times.append(tick.now)
            record.holds += tick.state is State.HOLD and last is not State.HOLD
            last = tick.state
            view.update(loop.status(tick.now), tick)
            if frames is not None and armed:
                frames.update(tick)
            if view.stopped:
                loop.estop.press("pressed in the browser")
            elif not armed and not loop.arming_blocker(tick.now):
                start_episode(source, seed)  # after the warm-up; restarts the noise
                loop.arm()
                armed, begin, missed = True, time.monotonic(), loop.overruns
            elif not armed and time.monotonic() - begin > START_TIMEOUT:
                raise UserError(f"The robot cannot be armed: {loop.arming_blocker(tick.now)}.")
            done = (simulation is not None and simulation.status.done) or getattr(source, "stopped", False)
            expired = armed and args.seconds and time.monotonic() - begin > args.seconds
            if done or tick.state is State.ESTOP or expired:
                record.state, record.reason = str(tick.state), tick.reason
                loop.stop()

        options.on_tick = after
        if isinstance(clock, SimulatedTime):
            assert simulation is not None
            clock.catch_up(simulation.status.time)
            _in_lockstep(loop, clock)
        else:
            loop.run()
        if frames is not None:
            frames.end()
        if simulation is not None:
            status = simulation.status
            record.success, record.steps, record.done = status.success, status.steps, status.done
        if isinstance(source, HumanChunkPolicy):
            with shared.idle():  # the last demonstration may still be written
                source.finish(success=bool(record.success))
        record.state = record.state or str(loop.state)
        record.ticks, record.misses = len(record.tick_times), loop.overruns - missed
        record.interventions, record.inference_ms = dict(loop.log.counts), 1e3 * runner.latency
    return record


def _in_lockstep(loop: ControlLoop, clock: SimulatedTime) -> None:
    """Run one tick per period of the robot; every command advances the time."""
    until = time.monotonic() + START_TIMEOUT
    while loop.state is not State.STOPPED:
        tick = loop.tick(clock.now)
        if loop.state is State.STOPPED:
            return
        if tick.command is not None:
            clock.catch_up(clock.now + loop.robot.dt)
            until = time.monotonic() + START_TIMEOUT
        elif time.monotonic() > until:
            raise UserError(f"The simulated robot received no command in {START_TIMEOUT:g} s: {tick.reason}.")
        else:
            time.sleep(1e-3)


def summary(args: argparse.Namespace, robot: RobotSpec, episodes: list[EpisodeRecord]) -> dict[str, Any]:
    """Metrics for `report.json`."""
    periods = np.concatenate([np.diff(each.tick_times) for each in episodes] or [np.zeros(0)])
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
        "intervention_meanings": {kind: meaning(kind) for kind in kinds},
        "episodes": [
            {key: value for key, value in vars(each).items() if key not in ("tick_times", "inference_ms")}
            for each in episodes
        ],
    }


def _quantile(periods: np.ndarray, share: float) -> float | None:
    """Quantile [ms] of `periods` [s]; None without any."""
    return round(1e3 * float(np.quantile(periods, share)), 3) if len(periods) else None
