"""`robopolicy collect`: record demonstrations of a scripted expert or a policy as a LeRobotDataset."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.display import add_display_option, open_display
from robopolicy.cli.options import add_overwrite_option, check_numbers, reject_unused
from robopolicy.cli.teleop import SESSION_OPTIONS, add_session_options, check_session, record_session
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from torch import Tensor

    from robopolicy.sim.contract import VectorSim
    from robopolicy.sim.registry import Expert, TaskEntry
    from robopolicy.viewer.display import Display
    from robopolicy.viewer.displayed_sim import DisplayedSim

EXAMPLES = """\
examples:
  robopolicy collect lift --episodes 200 --out data/lift
  robopolicy collect manipulation/pick_place --episodes 100 --cameras front --image-size 96 --out data/pick_place
  robopolicy collect lift --episodes 100 --point-clouds front --out data/lift_clouds
  robopolicy collect lift --episodes 100 --noise 0.1 --keep-failures --out data/lift_noisy
  robopolicy collect push --render --cameras top --policies expert+0.5 random replay --episodes 900 --out data/films
  robopolicy collect metaworld/reach-v3 --episodes 50 --out data/reach
  robopolicy collect hopper --policy runs/hopper_sac/checkpoints/last --keep-failures --episodes 50 --out data/hopper
  robopolicy collect hopper --policy random --keep-failures --episodes 100 --out data/hopper_random
  robopolicy collect lift --policy runs/lift_flow_bc/checkpoints/best --takeover --out data/lift_dagger
  robopolicy collect ogbench_collect/cube-single-v0 --episodes 50 --num-envs 4 --out data/cube --overwrite
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "collect",
        description="Record demonstrations of a task's scripted expert, or of a policy, as a LeRobotDataset (v3.0). "
        "The dataset depends on the seed, not on the number of environments.",
        epilog=EXAMPLES,
    )
    parser.add_argument("task", help="task id, see 'robopolicy list tasks'")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    text = "checkpoint to record, or random for uniform actions (default: scripted expert)"
    parser.add_argument("--policy", metavar="CKPT", help=text)
    parser.add_argument("--stochastic", action="store_true", help="sample actions with exploration noise")
    parser.add_argument("--episodes", type=int, default=100, help="recorded episodes (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (default: 0)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--backend", default="auto", help="simulator backend (default: the task's own)")
    parser.add_argument("--cameras", nargs="+", default=[], metavar="NAME", help="cameras to record (default: none)")
    parser.add_argument("--image-size", type=int, default=64, help="pixels, square (default: 64)")
    text = "cameras whose point clouds to record (default: none)"
    parser.add_argument("--point-clouds", nargs="+", default=[], metavar="NAME", help=text)
    parser.add_argument("--points", type=int, default=256, help="points per cloud (default: 256)")
    parser.add_argument("--images", choices=("video", "png"), default="video", help="png is lossless (default: video)")
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    text = (
        "action noise as a fraction of the action range; the dataset contains both the intended actions, for "
        "imitation, and the executed ones, for value learning (default: 0)"
    )
    parser.add_argument("--noise", type=float, default=0.0, help=text)
    parser.add_argument("--keep-failures", action="store_true", help="also record failed episodes")
    text = "record videos of --policies for a world model, with executed actions, closing frames and failures"
    parser.add_argument("--render", action="store_true", help=text)
    text = (
        "policies with an equal part of the episodes each: expert, random, a checkpoint, or replay: actions of the "
        "first policy at other starts; +0.3 adds action noise of 0.3 of the range (default: expert)"
    )
    parser.add_argument("--policies", nargs="+", default=["expert"], metavar="POLICY[+NOISE]", help=text)
    text = "frames of a video that follow the end of the task, where the simulator can continue (default: 10)"
    parser.add_argument("--after-success", type=int, default=10, metavar="STEPS", help=text)
    text = "a person at a device (default: browser) takes over from --policy and hands back; frames record who acted"
    parser.add_argument("--takeover", nargs="?", const="browser", metavar="DEVICE", help=text)
    add_session_options(parser)
    add_display_option(parser)
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Collect a dataset and return 0; an environment failure raises a UserError and keeps the recorded episodes."""
    _check(args)
    with open_display(args) as display:
        return _collect(args, display)


def _collect(args: argparse.Namespace, display: Display | None) -> int:
    from contextlib import closing
    from dataclasses import asdict

    from robopolicy.cli.progress import progress_bars
    from robopolicy.data.collect import ActionWriter, CollectReport, collect
    from robopolicy.data.episodes import is_image
    from robopolicy.data.formats.lerobot import LeRobotWriter
    from robopolicy.errors import UserError
    from robopolicy.evaluation.actors import PolicyExpert, ReplayExpert, check_compatible
    from robopolicy.sim.registry import SimOptions, get_task, make_sim

    entry = get_task(args.task)
    actions: list[Tensor] = []  # of the first part
    parts = _video_parts(args, entry, actions) if args.render else [_demonstrations(args, entry)]
    options = SimOptions(
        num_envs=1 if args.takeover else min(args.num_envs, args.episodes),
        backend=args.backend,
        cameras=tuple(args.cameras),
        image_size=args.image_size,
        point_clouds=tuple(args.point_clouds),
        points=args.points,
        reward=args.reward,
        ends_on_success=not args.render,
        held_out=False,
    )
    if args.takeover:
        return record_session(args, options, args.takeover, parts[0].make())
    with closing(make_sim(entry.name, options)) as sim:
        spec = sim.spec
        if not any(is_image(key) for key in spec.observation):
            reject_unused(args, "without images (add --cameras)", "--images")
        demonstrators = [part.make() for part in parts]
        for demonstrator in demonstrators:
            if isinstance(demonstrator, PolicyExpert):
                check_compatible(demonstrator.actor.policy.spec, spec)
        shown = None if display is None else _shown(sim, display, demonstrators)
        names = {key: observation.names for key, observation in spec.observation.items()}
        names["action"] = names["executed"] = spec.action_names
        with (
            progress_bars() as add_bar,
            LeRobotWriter(
                args.out,
                control_dt=spec.control_dt,
                video=args.images == "video",
                overwrite=args.overwrite,
                names=names,
                action_type=spec.action_type,
            ) as writer,
        ):
            update = add_bar(f"collect {entry.name}", args.episodes)
            replays = any(isinstance(each, ReplayExpert) for each in demonstrators)
            report = CollectReport(0, 0, 0, 0)
            for part, demonstrator in zip(parts, demonstrators, strict=True):
                done = report.kept
                report += collect(
                    shown or sim,
                    demonstrator,
                    ActionWriter(writer, actions) if replays and part is parts[0] else writer,
                    episodes=part.episodes,
                    seed=args.seed + report.attempts,
                    only_success=not (args.keep_failures or args.render),
                    noise=part.noise,
                    behaviour=part.label,
                    after_success=args.after_success,
                    progress=lambda kept, _, done=done: update(done + kept),
                )
                if report.stopped:
                    break
            if shown is not None:
                shown.flush()
    if args.json:
        print(json.dumps({"task": entry.name, "out": str(args.out), **asdict(report)}))
    else:
        print(f"{args.out}: {report}")
    if report.stopped:
        raise UserError(f"{report.stopped} {args.out} contains the {counted(report.kept, 'episode')} recorded before.")
    return 0


def _shown(sim: VectorSim, display: Display, demonstrators: list[Expert]) -> DisplayedSim:
    """Wrap the simulator, so that the display shows it and the chunks of policies."""
    from robopolicy.evaluation.actors import PolicyExpert
    from robopolicy.viewer.display_process import FrameStream
    from robopolicy.viewer.displayed_sim import DisplayedSim

    display.begin(FrameStream(f"collect {sim.spec.task}", sim.spec.control_dt))
    shown = DisplayedSim(sim, display)
    for demonstrator in demonstrators:
        if isinstance(demonstrator, PolicyExpert):
            demonstrator.on_chunk = shown.predict
    return shown


@dataclass(frozen=True)
class _Part:
    """Episodes of one demonstrator."""

    make: Callable[[], Expert]
    episodes: int
    noise: float
    label: str = ""  # label of the behaviour in a video dataset


def _demonstrations(args: argparse.Namespace, entry: TaskEntry) -> _Part:
    from robopolicy.evaluation.actors import RandomExpert

    if args.policy is None:
        make = entry.require_expert()
    elif args.policy == "random":
        make = partial(RandomExpert, hold=1)
    else:
        make = _policy_expert(Path(args.policy), args)
    return _Part(make, args.episodes, args.noise)


def _video_parts(args: argparse.Namespace, entry: TaskEntry, actions: list[Tensor]) -> list[_Part]:
    """Divide the episodes among the policies; the first ones receive the remainder. A replay repeats `actions`."""
    from robopolicy.cli.policy_args import parse_noise, short_names
    from robopolicy.errors import UserError
    from robopolicy.evaluation.actors import RandomExpert, ReplayExpert

    parts: list[_Part] = []
    parsed = [parse_noise(name) for name in args.policies]
    names = list(dict.fromkeys(name for name, _ in parsed))
    labels = dict(zip(names, short_names(names), strict=True))
    scripted: dict[str, Callable[[], Callable[[], Expert]]] = {
        "expert": entry.require_expert,
        "random": lambda: RandomExpert,
        "replay": lambda: partial(ReplayExpert, actions),
    }
    for index, (name, noise) in enumerate(parsed):
        make = scripted.get(name)
        count = args.episodes // len(parsed) + (index < args.episodes % len(parsed))
        label = labels[name] + (f"+{noise:g}" if noise else "")
        parts.append(_Part(make() if make else _policy_expert(Path(name), args), count, noise, label))
    if len({part.label for part in parts}) < len(parts) or args.episodes < len(parts):
        raise UserError(f"{counted(args.episodes, 'episode')} cannot be divided among {args.policies}.")
    return parts


def _policy_expert(path: Path, args: argparse.Namespace) -> Callable[[], Expert]:
    from robopolicy.evaluation.actors import PolicyExpert
    from robopolicy.training.checkpoint import load_policy

    policy, _ = load_policy(path)
    return lambda: PolicyExpert(policy, deterministic=not args.stochastic)


def _check(args: argparse.Namespace) -> None:
    from robopolicy.errors import UserError

    counts = ("episodes", "num_envs", "image_size", "points")
    check_numbers(args, positive=counts, non_negative=("seed", "after_success"))
    if not 0 <= args.noise < float("inf"):
        raise UserError(f"--noise must be 0 or larger, got {args.noise}.")
    check_session(args)
    if not args.takeover:
        reject_unused(args, "without --takeover", *SESSION_OPTIONS)
    elif args.render or args.policy in (None, "random"):
        raise UserError("--takeover needs the policy that the person corrects; pass --policy CKPT, without --render.")
    else:
        reject_unused(args, "with --takeover", "--num-envs", "--noise", "--display")
    if args.render and (args.policy or args.noise):
        raise UserError("--render takes its policies and noises from --policies, e.g. expert random CKPT+0.3.")
    if args.render and not args.cameras:
        raise UserError("A video dataset requires cameras; pass --cameras, e.g. --cameras front.")
    policies = [name.partition("+")[0] for name in (args.policies if args.render else [args.policy or "expert"])]
    if args.render and policies[0] == "replay":
        raise UserError(
            "replay repeats the actions of the first policy; name another policy first, e.g. expert replay."
        )
    if all(name in ("expert", "random", "replay") for name in policies):
        reject_unused(args, "on experts and random actions", "--stochastic")
    if not (args.cameras or args.point_clouds):
        reject_unused(args, "without --cameras", "--image-size")
    if not args.point_clouds:
        reject_unused(args, "without --point-clouds", "--points")
    if not args.render:
        reject_unused(args, "without --render", "--after-success")
    if not args.render and args.policies != ["expert"]:
        raise UserError("--policies requires --render.")
