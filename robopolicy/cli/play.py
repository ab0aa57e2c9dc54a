"""`robopolicy play`: record episodes as a video, or show them in a viewer."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import (
    add_overwrite_option,
    add_rollout_options,
    check_numbers,
    check_overwrite,
    reject_unused,
)

if TYPE_CHECKING:
    from robopolicy.cli.policy_args import PolicyEntry
    from robopolicy.sim.contract import VectorSim

EXAMPLES = """\
examples:
  robopolicy play runs/lift_reinflow/checkpoints/best --out lift.mp4
  robopolicy play expert --task lift --episodes 9 --seed 0 --out expert.mp4
  robopolicy play random --task locomotion/hopper --episodes 1 --out random.gif
  robopolicy play runs/lift_reinflow/checkpoints/best --viewer
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "play",
        description="Run episodes and write a video grid whose borders mark success and failure; requires no display.",
        epilog=EXAMPLES,
    )
    parser.add_argument("policy", metavar="CKPT", help="checkpoint folder, 'expert' or 'random'")
    add_rollout_options(parser)
    parser.add_argument("--episodes", type=int, default=4, help="episodes (default: 4)")
    text = ".mp4 or .gif (default: the next free one of runs/play.mp4, runs/play_2.mp4)"
    parser.add_argument("--out", type=Path, help=text)
    add_overwrite_option(parser)
    parser.add_argument("--width", type=int, default=320, help="pixels of one episode (default: 320)")
    parser.add_argument("--height", type=int, default=240, help="pixels of one episode (default: 240)")
    parser.add_argument("--viewer", action="store_true", help="show in MuJoCo's window instead (requires a display)")


def run(args: argparse.Namespace) -> int:
    """Record or show episodes; return 0."""
    from contextlib import closing

    from robopolicy.cli.policy_args import load_policy_entries, open_sim, sim_options, with_planning
    from robopolicy.errors import UserError
    from robopolicy.files import check_new_file, next_free_path

    check_numbers(args, positive=("episodes", "width", "height"), non_negative=("seed",))
    check_overwrite(args, "--out")
    if args.viewer:
        reject_unused(args, "with --viewer", "--out", "--width", "--height", "--camera")
    args.out = args.out or next_free_path(Path("runs/play.mp4"))
    check_new_file(args.out, ".mp4", ".gif", overwrite=args.overwrite)
    has_display = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if args.viewer and sys.platform.startswith("linux") and not has_display:
        raise UserError("--viewer requires a display and there is none; omit it to write a video.")
    policy_entries, entry = load_policy_entries([args.policy], args.task, args.device)
    (policy_entry,) = with_planning(policy_entries, args, entry)
    if policy_entry.spec is None:
        reject_unused(args, "on experts and random actions", "--stochastic")
    options = sim_options(args, [policy_entry], 1 if args.viewer else args.episodes, args.device, args.judge)
    with closing(open_sim(entry, options, [policy_entry])) as sim:
        if args.viewer:
            _view(args, policy_entry, sim)
        else:
            _record_video(args, policy_entry, sim)
    return 0


def _record_video(args: argparse.Namespace, policy_entry: PolicyEntry, sim: VectorSim) -> None:
    from robopolicy.errors import UserError
    from robopolicy.evaluation.video import record, rendering_problem, write_video

    sim.reset(args.seed)
    problem = rendering_problem(sim)
    if problem is not None:
        raise UserError(problem)
    recording = record(
        policy_entry.make(),
        sim,
        range(args.seed, args.seed + args.episodes),
        title=policy_entry.label,
        camera=args.camera,
        width=args.width,
        height=args.height,
        deterministic=not args.stochastic,
    )
    path = write_video([recording], args.out)
    for clip in recording.clips:
        outcome = "" if clip.success is None else "success, " if clip.success else "fail, "
        print(f"seed {clip.seed}: {outcome}return {clip.total_reward:.4g}")
    speed = "" if recording.speed == 1 else f" ({recording.speed:g}x speed)"
    print(f"video: {path}{speed}")


def _view(args: argparse.Namespace, policy_entry: PolicyEntry, sim: VectorSim) -> None:
    """Show the episodes in MuJoCo's viewer in real time, until they end or the window is closed."""
    import mujoco
    import mujoco.viewer

    from robopolicy.errors import UserError
    from robopolicy.evaluation.harness import run_episodes
    from robopolicy.sim.backends.mujoco.backend import MujocoSim

    if not isinstance(sim, MujocoSim):
        raise UserError(f"--viewer supports only tasks of the native MuJoCo backend, not {sim.spec.task}.")
    data = mujoco.MjData(sim.task.model)
    with mujoco.viewer.launch_passive(sim.task.model, data) as viewer:

        def show() -> None:
            if not viewer.is_running():
                raise KeyboardInterrupt
            sim.engine.pose(0, data)
            viewer.sync()
            time.sleep(sim.spec.control_dt)

        seeds = range(args.seed, args.seed + args.episodes)
        run_episodes(policy_entry.make(), sim, seeds, deterministic=not args.stochastic, before_step=show)
