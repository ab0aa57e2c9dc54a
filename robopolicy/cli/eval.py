"""`robopolicy eval`: success and return with intervals, on fixed seeds, for one policy or two side by side."""

from __future__ import annotations

import argparse
import json
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
    from robopolicy.evaluation.actors import Actor
    from robopolicy.evaluation.latency import LatencyResult
    from robopolicy.evaluation.result import EvalResult
    from robopolicy.policies.base import Policy
    from robopolicy.sim.registry import TaskEntry
    from robopolicy.text.evaluation import SampledRollouts

EXAMPLES = """\
examples:
  robopolicy eval runs/lift_reinflow/checkpoints/best --episodes 200
  robopolicy eval runs/lift_flow_bc/checkpoints/best runs/lift_reinflow/checkpoints/best --out runs/eval_lift
  robopolicy eval expert --task manipulation/lift --episodes 200 --video 0
  robopolicy eval random runs/hopper_ppo/checkpoints/best --task locomotion/hopper --json
  robopolicy eval runs/hopper_ppo/checkpoints/best --action-repeats 1 2 4 8 16
  robopolicy eval runs/lift_reinflow/checkpoints/best --latency 0 50 150 --chunk-blending ensemble
  robopolicy eval runs/push_bc/checkpoints/best --plan-with runs/push_world/checkpoints/best --candidates 8
  robopolicy eval runs/text_grpo/checkpoints/last --samples 16
"""

ACTION_REPEATS = "Score by control steps per decision"
LATENCY = "Score by inference latency"
PASS_AT_K = "Probability that one of k answers is correct, estimated from {} samples at temperature 1"


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        description="Evaluate policies on fixed episode seeds and report success (Wilson interval) and return "
        "(bootstrap). "
        "Two policies are compared seed by seed. The result does not depend on the number of environments.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "policies", nargs="+", metavar="CKPT", help="checkpoint folder, 'expert' or 'random'; at most 2"
    )
    add_rollout_options(parser)
    parser.add_argument("--episodes", type=int, default=100, help="episodes per policy (default: 100)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--out", type=Path, help="report folder (default: the next free one of runs/eval, runs/eval_2)")
    parser.add_argument(
        "--video",
        type=int,
        default=4,
        help="episodes to record as video, from the first seeds; 0 for none (default: 4)",
    )
    parser.add_argument(
        "--action-repeats",
        nargs="+",
        type=int,
        default=[],
        metavar=("M M", "M"),
        help="also evaluate with one decision every M control steps; two or more increasing numbers, e.g. 1 2 4 "
        "8: how the "
        "policy performs at lower decision rates",
    )
    parser.add_argument(
        "--latency",
        nargs="+",
        type=float,
        default=[],
        metavar="MS",
        help="also evaluate with this inference latency in milliseconds; earlier chunks are executed meanwhile",
    )
    parser.add_argument(
        "--chunk-blending",
        default="replace",
        help="with --latency, how overlapping chunks are blended: replace, hold, ensemble or rtc (default: replace)",
    )
    parser.add_argument(
        "--samples", type=int, default=8, help="answers per prompt for pass@k on text tasks; 0 for none (default: 8)"
    )
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate; 0 when the report is written."""
    from robopolicy.cli.policy_args import load_policy_entries, with_planning
    from robopolicy.errors import UserError
    from robopolicy.evaluation.frequency import check_action_repeats, frequency_facts, frequency_table
    from robopolicy.evaluation.latency import check_latencies, latency_facts, latency_table, require_continuation
    from robopolicy.evaluation.report import Report, aligned, all_notes, table, to_dict, write_report
    from robopolicy.evaluation.result import compare
    from robopolicy.files import atomic_folder, check_new_folder, next_free_path
    from robopolicy.text.evaluation import pass_at_k_facts, pass_at_k_table

    check_numbers(args, positive=("episodes", "num_envs"), non_negative=("seed", "video", "samples"))
    if len(args.policies) > 2 or len(set(args.policies)) < len(args.policies):
        raise UserError(f"Pass one policy or two different ones, got {' '.join(args.policies)}.")
    if args.action_repeats:
        check_action_repeats(args.action_repeats)
    latencies = [latency / 1e3 for latency in args.latency]
    check_latencies(latencies, args.chunk_blending)
    _check_options(args)
    args.out = args.out or next_free_path(Path("runs/eval"))
    check_new_folder(args.out, "an evaluation report", "report.html", overwrite=args.overwrite)
    policy_entries, entry = load_policy_entries(args.policies, args.task, args.device)
    policy_entries = with_planning(policy_entries, args, entry)
    if all(policy_entry.spec is None for policy_entry in policy_entries):
        reject_unused(args, "on experts and random actions", "--stochastic")
    if "text" not in entry.backends:
        reject_unused(args, f"on {entry.name}, which is no text task", "--samples")
    else:
        reject_unused(args, f"on {entry.name}, a text task", "--action-repeats", "--latency", "--reward", "--camera")
    for policy_entry in policy_entries if args.chunk_blending == "rtc" else ():
        require_continuation(policy_entry.make(), policy_entry.label)
    with atomic_folder(args.out) as folder:
        video, strip, notes = _record_video(
            args, policy_entries, entry, folder
        )  # first, because a bad camera name fails here
        results, held, late = _evaluate(args, policy_entries, entry, latencies, notes)
        sampled = _sample(args, policy_entries, entry)
        tables = {ACTION_REPEATS: frequency_table(held)} if held else {}
        tables |= {f"{LATENCY} (chunk blending '{args.chunk_blending}')": latency_table(late)} if late else {}
        tables |= {PASS_AT_K.format(args.samples): pass_at_k_table(sampled)} if sampled else {}
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
            | (pass_at_k_facts(sampled) if sampled else {}),
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
        reject_unused(args, "without --latency", "--chunk-blending")
    if not args.video:
        reject_unused(args, "without a video", "--camera")


def _evaluate(
    args: argparse.Namespace,
    policy_entries: list[PolicyEntry],
    entry: TaskEntry,
    latencies: list[float],
    notes: list[str],
) -> tuple[dict[str, EvalResult], dict[str, dict[int, EvalResult]], dict[str, dict[float, LatencyResult]]]:
    """Results of the players, and where asked for those with held actions by length and those by latency.

    What the reader should know about them is added to `notes`.
    """
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.cli.progress import progress_bars
    from robopolicy.evaluation.frequency import frequency_curve
    from robopolicy.evaluation.harness import evaluate
    from robopolicy.evaluation.latency import latency_curve
    from robopolicy.training.world_sims import abstention_notes

    results: dict[str, EvalResult] = {}
    held: dict[str, dict[int, EvalResult]] = {}
    late: dict[str, dict[float, LatencyResult]] = {}
    episodes: dict[str, Any] = {"episodes": args.episodes, "seed": args.seed, "deterministic": not args.stochastic}
    options = sim_options(args, policy_entries, min(args.num_envs, args.episodes), args.device, args.judge)
    with closing(open_sim(entry, options, policy_entries)) as sim, progress_bars() as add_bar:
        for policy_entry in policy_entries:
            progress = add_bar(f"eval {policy_entry.label}", args.episodes)
            played = policy_entry.make()
            _notes(played)  # drops those of what was filmed
            results[policy_entry.label] = evaluate(played, sim, progress=progress, **episodes)
            notes += abstention_notes(policy_entry.label, sim)
            notes += [f"{policy_entry.label}: {note}" for note in _notes(played)]
            if args.action_repeats:
                held[policy_entry.label] = frequency_curve(policy_entry.make(), sim, args.action_repeats, **episodes)
            if latencies:
                late[policy_entry.label] = latency_curve(
                    policy_entry.make(), sim, latencies, blending=args.chunk_blending, **episodes
                )
    return results, held, late


def _notes(played: Policy | Actor) -> list[str]:
    """What a policy says about its decisions since the last call."""
    from robopolicy.policies.base import Policy

    return played.notes() if isinstance(played, Policy) else []


def _sample(
    args: argparse.Namespace, policy_entries: list[PolicyEntry], entry: TaskEntry
) -> dict[str, SampledRollouts]:
    """Several answers of every text policy to each prompt; nothing where the task is no text."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.text.evaluation import sample_rollouts
    from robopolicy.text.policy import TextPolicy
    from robopolicy.text.sim import TextSim

    seeds = range(args.seed, args.seed + args.episodes)
    with closing(open_sim(entry, sim_options(args, policy_entries, 1, judge=args.judge), policy_entries)) as sim:
        if not isinstance(sim, TextSim) or not args.samples:
            return {}
        policies = {policy_entry.label: policy_entry.make() for policy_entry in policy_entries}
        return {
            label: sample_rollouts(policy, sim.task, seeds, samples=args.samples)
            for label, policy in policies.items()
            if isinstance(policy, TextPolicy)
        }


def _record_video(
    args: argparse.Namespace, policy_entries: list[PolicyEntry], entry: TaskEntry, folder: Path
) -> tuple[Path | None, Path | None, list[str]]:
    """Video, still picture, and what to tell the reader about them."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options, video_problem
    from robopolicy.evaluation.video import record, write_strip, write_video

    count = min(args.video, args.episodes)
    if count == 0:
        return None, None, []
    with closing(
        open_sim(entry, sim_options(args, policy_entries, count, args.device, args.judge), policy_entries)
    ) as sim:
        sim.reset(args.seed)
        problem = video_problem(sim)
        if problem is not None:
            return None, None, [problem]
        seeds = range(args.seed, args.seed + count)
        recordings = [
            record(
                policy_entry.make(),
                sim,
                seeds,
                title=policy_entry.label,
                camera=args.camera,
                deterministic=not args.stochastic,
            )
            for policy_entry in policy_entries
        ]
    strip = write_strip(recordings, folder / "strip.png")
    return write_video(recordings, folder / "episodes.mp4"), strip, []


def _facts(args: argparse.Namespace, entry: TaskEntry) -> dict[str, str]:
    from robopolicy.versions import versions

    return {
        "task": entry.name,
        "seeds": f"{args.seed} to {args.seed + args.episodes - 1}",
        "actions": "with exploration noise" if args.stochastic else "deterministic",
        "policies": ", ".join(args.policies),
        **({"best of": f"{args.candidates} chunks, imagined in {args.plan_with}"} if args.plan_with else {}),
        **{name: versions()[name] for name in ("robopolicy", "torch", "mujoco")},
    }


def _without_episodes(report: dict[str, Any]) -> dict[str, Any]:
    """The report without its long per-episode lists, which are in the file."""
    return {**report, "results": {label: result["summary"] for label, result in report["results"].items()}}
