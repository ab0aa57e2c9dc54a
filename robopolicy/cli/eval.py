"""`robopolicy eval`: success and return with intervals, on fixed seeds, for one policy or two side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, add_player_options, check_idle, check_numbers, check_overwrite

if TYPE_CHECKING:
    from robopolicy.cli.policy_args import Player
    from robopolicy.evaluation.actors import Actor
    from robopolicy.evaluation.latency import LateResult
    from robopolicy.evaluation.result import EvalResult
    from robopolicy.policies.base import Policy
    from robopolicy.sim.registry import TaskEntry
    from robopolicy.text.evaluation import Sampled

EXAMPLES = """\
examples:
  robopolicy eval runs/lift_reinflow/checkpoints/best --episodes 200
  robopolicy eval runs/lift_flow_bc/checkpoints/best runs/lift_reinflow/checkpoints/best --out runs/eval_lift
  robopolicy eval expert --task manipulation/lift --episodes 200 --video 0
  robopolicy eval random runs/hopper_ppo/checkpoints/best --task locomotion/hopper --json
  robopolicy eval runs/hopper_ppo/checkpoints/best --holds 1 2 4 8 16
  robopolicy eval runs/lift_reinflow/checkpoints/best --latency 0 50 150 --join ensemble
  robopolicy eval runs/push_bc/checkpoints/best --imagine runs/push_world/checkpoints/best --candidates 8
  robopolicy eval runs/text_grpo/checkpoints/last --samples 16
"""

HELD = "Score with a decision every so many control steps"
LATE = "Score as if a chunk took so long to compute"
SAMPLED = "Chance that one of k answers is right, from {} at temperature 1"


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        description="Play a fixed set of episode seeds and report success (Wilson interval) and return (bootstrap). "
        "Two players are compared seed by seed. The result does not depend on the number of environments.",
        epilog=EXAMPLES,
    )
    parser.add_argument("players", nargs="+", metavar="CKPT", help="checkpoint folder, 'expert' or 'random'; at most 2")
    add_player_options(parser)
    parser.add_argument("--episodes", type=int, default=100, help="episodes per player (default: 100)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--out", type=Path, help="report folder (default: the next free one of runs/eval, runs/eval_2)")
    parser.add_argument(
        "--video", type=int, default=4, help="episodes to film, the first seeds; 0 for none (default: 4)"
    )
    parser.add_argument(
        "--holds",
        nargs="+",
        type=int,
        default=[],
        metavar=("M M", "M"),
        help="also decide every M control steps only, two or more increasing lengths, e.g. 1 2 4 8: how a "
        "policy stands slow decisions",
    )
    parser.add_argument(
        "--latency",
        nargs="+",
        type=float,
        default=[],
        metavar="MS",
        help="also play with chunks that arrive so many milliseconds late, earlier ones being played meanwhile",
    )
    parser.add_argument(
        "--join",
        default="replace",
        help="with --latency, where chunks overlap: replace, hold, ensemble or rtc (default: replace)",
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="of a text task: answers per prompt for pass@k; 0 for none (default: 8)"
    )
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate; 0 when the report is written."""
    from robopolicy.cli.policy_args import imagining, load_players
    from robopolicy.errors import UserError
    from robopolicy.evaluation.frequency import check_holds, frequency_facts, frequency_table
    from robopolicy.evaluation.latency import check_latencies, continuing, latency_facts, latency_table
    from robopolicy.evaluation.report import Report, aligned, all_notes, table, to_dict, write_report
    from robopolicy.evaluation.result import compare
    from robopolicy.files import atomic_folder, check_new_folder, free_place
    from robopolicy.text.evaluation import sampled_facts, sampled_table

    check_numbers(args, positive=("episodes", "num_envs"), non_negative=("seed", "video", "samples"))
    if len(args.players) > 2 or len(set(args.players)) < len(args.players):
        raise UserError(f"Pass one player or two different ones, got {' '.join(args.players)}.")
    if args.holds:
        check_holds(args.holds)
    latencies = [latency / 1e3 for latency in args.latency]
    check_latencies(latencies, args.join)
    _check_options(args)
    args.out = args.out or free_place(Path("runs/eval"))
    check_new_folder(args.out, "an evaluation report", "report.html", overwrite=args.overwrite)
    players, entry = load_players(args.players, args.task, args.device)
    players = imagining(players, args, entry)
    if all(player.spec is None for player in players):
        check_idle(args, "on experts and random actions", "--stochastic")
    if "text" not in entry.backends:
        check_idle(args, f"on {entry.name}, which is no text task", "--samples")
    else:
        check_idle(args, f"on {entry.name}, a text task", "--holds", "--latency", "--reward", "--camera")
    for player in players if args.join == "rtc" else ():
        continuing(player.make(), player.label)
    with atomic_folder(args.out) as folder:
        video, strip, notes = _film(args, players, entry, folder)  # first, because a bad camera name fails here
        results, held, late = _evaluate(args, players, entry, latencies, notes)
        sampled = _sample(args, players, entry)
        tables = {HELD: frequency_table(held)} if held else {}
        tables |= {f"{LATE} (join '{args.join}')": latency_table(late)} if late else {}
        tables |= {SAMPLED.format(args.samples): sampled_table(sampled)} if sampled else {}
        pairable = len(results) == 2 and all(result.seeded for result in results.values())
        report = Report(
            title=f"{' vs '.join(results)} on {entry.name}",
            results=results,
            comparison=compare(*results.values()) if pairable else None,
            video=video,
            strip=strip,
            notes=notes,
            facts=_facts(args, entry),
            tables=tables,
            extra=(frequency_facts(held) if held else {})
            | (latency_facts(late) if late else {})
            | (sampled_facts(sampled) if sampled else {}),
        )
        write_report(folder, report)
    if args.json:
        print(json.dumps({"out": str(args.out), **_without_episodes(to_dict(report))}))
        return 0
    print(f"{entry.name}, {args.episodes} episodes, seeds {args.seed} to {args.seed + args.episodes - 1}")
    print(aligned(*table(results)))
    for name, rows in tables.items():
        print(f"{name}:\n{aligned(*rows)}")
    if report.comparison is not None:
        print(report.comparison.sentence(*results))
    for note in all_notes(report):
        print(f"note: {note}")
    print(f"report: {args.out / 'report.html'}")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""
    check_overwrite(args, "--out")
    if not args.latency:
        check_idle(args, "without --latency", "--join")
    if not args.video:
        check_idle(args, "without a video", "--camera")


def _evaluate(
    args: argparse.Namespace, players: list[Player], entry: TaskEntry, latencies: list[float], notes: list[str]
) -> tuple[dict[str, EvalResult], dict[str, dict[int, EvalResult]], dict[str, dict[float, LateResult]]]:
    """Results of the players, and where asked for those with held actions by length and those by latency.

    What the reader should know about them is added to `notes`.
    """
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.cli.progress import progress_bars
    from robopolicy.evaluation.frequency import frequency_curve
    from robopolicy.evaluation.harness import evaluate
    from robopolicy.evaluation.latency import latency_curve
    from robopolicy.training.world_sims import doubts

    results: dict[str, EvalResult] = {}
    held: dict[str, dict[int, EvalResult]] = {}
    late: dict[str, dict[float, LateResult]] = {}
    episodes: dict[str, Any] = {"episodes": args.episodes, "seed": args.seed, "deterministic": not args.stochastic}
    options = sim_options(args, players, min(args.num_envs, args.episodes), args.device, args.judge)
    with closing(open_sim(entry, options, players)) as sim, progress_bars() as add_bar:
        for player in players:
            progress = add_bar(f"eval {player.label}", args.episodes)
            played = player.make()
            _notes(played)  # drops those of what was filmed
            results[player.label] = evaluate(played, sim, progress=progress, **episodes)
            notes += doubts(player.label, sim)
            notes += [f"{player.label}: {note}" for note in _notes(played)]
            if args.holds:
                held[player.label] = frequency_curve(player.make(), sim, args.holds, **episodes)
            if latencies:
                late[player.label] = latency_curve(player.make(), sim, latencies, join=args.join, **episodes)
    return results, held, late


def _notes(played: Policy | Actor) -> list[str]:
    """What a policy says about its decisions since the last call."""
    from robopolicy.policies.base import Policy

    return played.notes() if isinstance(played, Policy) else []


def _sample(args: argparse.Namespace, players: list[Player], entry: TaskEntry) -> dict[str, Sampled]:
    """Several answers of every text policy to each prompt; nothing where the task is no text."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.text.evaluation import sample_attempts
    from robopolicy.text.policy import TextPolicy
    from robopolicy.text.sim import TextSim

    seeds = range(args.seed, args.seed + args.episodes)
    with closing(open_sim(entry, sim_options(args, players, 1, judge=args.judge), players)) as sim:
        if not isinstance(sim, TextSim) or not args.samples:
            return {}
        policies = {player.label: player.make() for player in players}
        return {
            label: sample_attempts(policy, sim.task, seeds, samples=args.samples)
            for label, policy in policies.items()
            if isinstance(policy, TextPolicy)
        }


def _film(
    args: argparse.Namespace, players: list[Player], entry: TaskEntry, folder: Path
) -> tuple[Path | None, Path | None, list[str]]:
    """Video, still picture, and what to tell the reader about them."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options, video_problem
    from robopolicy.evaluation.video import record, write_strip, write_video

    count = min(args.video, args.episodes)
    if count == 0:
        return None, None, []
    with closing(open_sim(entry, sim_options(args, players, count, args.device, args.judge), players)) as sim:
        sim.reset(args.seed)
        problem = video_problem(sim)
        if problem is not None:
            return None, None, [problem]
        seeds = range(args.seed, args.seed + count)
        recordings = [
            record(player.make(), sim, seeds, title=player.label, camera=args.camera, deterministic=not args.stochastic)
            for player in players
        ]
    strip = write_strip(recordings, folder / "strip.png")
    return write_video(recordings, folder / "episodes.mp4"), strip, []


def _facts(args: argparse.Namespace, entry: TaskEntry) -> dict[str, str]:
    from robopolicy.versions import versions

    return {
        "task": entry.name,
        "seeds": f"{args.seed} to {args.seed + args.episodes - 1}",
        "actions": "with exploration noise" if args.stochastic else "deterministic",
        "policies": ", ".join(args.players),
        **({"best of": f"{args.candidates} chunks, imagined in {args.imagine}"} if args.imagine else {}),
        **{name: versions()[name] for name in ("robopolicy", "torch", "mujoco")},
    }


def _without_episodes(report: dict[str, Any]) -> dict[str, Any]:
    """The report without its long per-episode lists, which are in the file."""
    return {**report, "results": {label: result["summary"] for label, result in report["results"].items()}}
