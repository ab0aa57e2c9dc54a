"""`robopolicy teleop`: move a simulated task or a robot by hand, and record demonstrations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, check_numbers, check_overwrite, reject_unused

if TYPE_CHECKING:
    from robopolicy.data.collect import EpisodeWriter
    from robopolicy.data.episodes import Episode
    from robopolicy.sim.registry import Expert, SimOptions

EXAMPLES = """\
examples:
  robopolicy teleop lift
  robopolicy teleop lift --device gamepad --speed 0.5 --episodes 10 --out data/lift_by_hand
  robopolicy teleop push --device terminal
  robopolicy teleop push --backend worldmodel:runs/push_world/checkpoints/best
  robopolicy teleop pick_place --device spacemouse --cameras front wrist --out data/pick_place_by_hand
  robopolicy teleop gymnasium_robotics/FetchPickAndPlace-v4 --map x y z gripper- --out data/fetch_by_hand
"""
SESSION_OPTIONS = ("--map", "--scale", "--speed", "--view")


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "teleop",
        description="Move a simulated task by hand, and record demonstrations as a LeRobotDataset. It moves only while "
        "the dead-man switch of the device is held; meanwhile the simulation waits.",
        epilog=EXAMPLES,
    )
    parser.add_argument("task", help="task id, see 'robopolicy list tasks'")
    text = "browser[:[HOST:]PORT], gamepad[:NUMBER], terminal, spacemouse, lerobot:TYPE[:PORT] (default: browser)"
    parser.add_argument("--device", default="browser", metavar="NAME[:ARGUMENT]", help=text)
    add_session_options(parser)
    parser.add_argument("--out", type=Path, help="dataset to write (default: record nothing)")
    parser.add_argument("--episodes", type=int, default=10, help="episodes to keep (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (default: 0)")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER[,FOLDER] (default: its own)")
    parser.add_argument("--cameras", nargs="+", default=[], metavar="NAME", help="cameras to record (default: none)")
    parser.add_argument("--image-size", type=int, default=64, help="pixels, square (default: 64)")
    parser.add_argument("--images", choices=("video", "png"), default="video", help="png is lossless (default: video)")
    parser.add_argument("--keep-failures", action="store_true", help="also record failed episodes")
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a person's session, also of `collect --takeover`."""
    text = "x, y, z, roll, pitch, yaw, gripper or 0 per action; x- flips x (default: by the names of the actions)"
    parser.add_argument("--map", nargs="+", default=[], metavar="INPUT", help=text)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of full speed by hand (default: 1)")
    parser.add_argument("--speed", type=float, default=1.0, help="simulated seconds per second (default: 1)")
    parser.add_argument("--view", metavar="CAMERA", help="camera that the browser shows (default: the task's own)")


def run(args: argparse.Namespace) -> int:
    """Run a session and return 0."""
    from robopolicy.sim.registry import SimOptions

    _check(args)
    cameras = tuple(args.cameras)
    options = SimOptions(num_envs=1, backend=args.backend, cameras=cameras, image_size=args.image_size, held_out=False)
    return record_session(args, options, args.device)


def record_session(args: argparse.Namespace, options: SimOptions, device: str, policy: Expert | None = None) -> int:
    """Run the session of a person at `device`, who takes over from `policy` if there is one; return 0.

    `args` has the options of `add_session_options` and of the dataset.
    """
    from contextlib import ExitStack, closing
    from dataclasses import asdict

    from robopolicy.data.formats.lerobot import LeRobotWriter
    from robopolicy.evaluation.actors import PolicyExpert, check_compatible
    from robopolicy.shutdown import handle_shutdown
    from robopolicy.sim.registry import get_task
    from robopolicy.teleop.devices import open_device
    from robopolicy.teleop.operator import HumanOperator
    from robopolicy.teleop.session import SessionConfig, TeleopSession
    from robopolicy.training.world_sims import make_env

    entry = get_task(args.task)
    with ExitStack() as stack:
        sim = stack.enter_context(closing(make_env(entry.name, options, tested=args.out is not None)))
        spec = sim.spec
        assert policy is None or isinstance(policy, PolicyExpert)
        if policy is not None:
            check_compatible(policy.actor.policy.spec, spec)
        sink: EpisodeWriter = _Discard()
        if args.out is not None:
            names = {key: observation.names for key, observation in spec.observation.items()}
            names["action"] = names["policy_action"] = spec.action_names
            settings: dict[str, Any] = {"video": args.images == "video", "overwrite": args.overwrite, "names": names}
            settings |= {"action_type": spec.action_type, "keep_on_error": True}
            sink = stack.enter_context(LeRobotWriter(args.out, control_dt=spec.control_dt, **settings))
        teleop = stack.enter_context(closing(open_device(device)))
        person = HumanOperator.of_sim(teleop, spec, tuple(args.map), args.scale)
        config = SessionConfig(args.episodes, args.seed, not args.keep_failures, args.speed, args.view)
        session = TeleopSession(sim, person, sink, config, policy=policy)
        with handle_shutdown(lambda _: session.stop()):  # the recorded episodes are kept
            report = session.run()
    if args.json:
        print(json.dumps({"task": entry.name, "out": str(args.out or ""), **asdict(report)}))
    else:
        print(f"{args.out or entry.name}: {report}")
    return 0


class _Discard:
    """Sink of a session that records nothing."""

    def add(self, episode: Episode) -> None:
        """Drop the episode."""


def check_session(args: argparse.Namespace) -> None:
    """Raise a UserError for invalid numbers of `add_session_options`."""
    from robopolicy.errors import UserError

    for name, limit in (("scale", 1.0), ("speed", float("inf"))):
        value = getattr(args, name)
        if not (0 < value <= limit and value < float("inf")):
            raise UserError(f"--{name} must be positive{' and at most 1' if limit == 1 else ''}, got {value:g}.")


def _check(args: argparse.Namespace) -> None:
    check_numbers(args, positive=("episodes", "image_size"), non_negative=("seed",))
    check_session(args)
    check_overwrite(args, "--out")
    if args.out is None:
        reject_unused(args, "without --out", "--cameras", "--images", "--keep-failures")
    if not args.cameras:
        reject_unused(args, "without --cameras", "--image-size", "--images")
