"""`robopolicy eval`: success and return with intervals on fixed seeds, for one policy or a comparison of two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.display import add_display_option, open_display
from robopolicy.cli.options import (
    add_overwrite_option,
    add_rollout_options,
    check_numbers,
    check_overwrite,
    reject_unused,
)
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.cli.policy_args import PolicyEntry
    from robopolicy.evaluation.actors import Actor
    from robopolicy.evaluation.latency import LatencyResult
    from robopolicy.evaluation.result import EvalResult
    from robopolicy.policies.base import Policy
    from robopolicy.sim.contract import VectorSim
    from robopolicy.sim.registry import SimOptions, TaskEntry
    from robopolicy.text.evaluation import SampledRollouts
    from robopolicy.viewer.display import Display

EXAMPLES = """\
examples:
  robopolicy eval runs/lift_reinflow/checkpoints/best --episodes 200
  robopolicy eval runs/lift_flow_bc/checkpoints/best runs/lift_reinflow/checkpoints/best --out runs/eval_lift
  robopolicy eval runs/lift_seed*/checkpoints/best --jobs 8 --video 0
  robopolicy eval expert --task manipulation/lift --episodes 200 --video 0
  robopolicy eval random runs/hopper_ppo/checkpoints/best --task locomotion/hopper --json
  robopolicy eval runs/hopper_ppo/checkpoints/best --action-repeats 1 2 4 8 16
  robopolicy eval runs/lift_reinflow/checkpoints/best --latency 0 50 150 --chunk-blending ensemble
  robopolicy eval runs/push_bc/checkpoints/best --plan-with runs/push_world/checkpoints/best --candidates 8
  robopolicy eval runs/text_grpo/checkpoints/last --samples 16
  robopolicy eval runs/my_arm_flow_bc_seed0/checkpoints/best --dataset data/my_arm_test
"""

ACTION_REPEATS = "Score by control steps per decision"
LATENCY = "Score by inference latency"
PASS_AT_K = "Probability that one of k answers is correct, estimated from {} samples at temperature 1"


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        description="Evaluate policies on fixed episode seeds and report success (Wilson interval) and return "
        "(bootstrap). Two policies are compared on each seed. The results do not depend on --num-envs or --jobs.",
        epilog=EXAMPLES,
    )
    text = "checkpoint folder, 'expert' or 'random'"
    parser.add_argument("policies", nargs="+", metavar="CKPT", help=text)
    add_rollout_options(parser)
    text = "compare predicted actions with recorded actions of this dataset, without a simulator"
    parser.add_argument("--dataset", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--episodes", type=int, default=100, help="episodes per policy (default: 100)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--out", type=Path, help="report folder (default: the next free one of runs/eval, runs/eval_2)")
    text = "episodes to record as video, from the first seeds; 0 for none (default: 4)"
    parser.add_argument("--video", type=int, default=4, help=text)
    text = "also evaluate with one decision every M control steps; two or more increasing numbers, e.g. 1 2 4 8"
    parser.add_argument("--action-repeats", nargs="+", type=int, default=[], metavar=("M M", "M"), help=text)
    text = "also evaluate with this inference latency in milliseconds; earlier chunks are executed meanwhile"
    parser.add_argument("--latency", nargs="+", type=float, default=[], metavar="MS", help=text)
    text = "with --latency, how overlapping chunks are blended: replace, hold, ensemble or rtc (default: replace)"
    parser.add_argument("--chunk-blending", default="replace", help=text)
    text = "policies evaluated at a time, each in a process (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, help=text)
    text = "with --jobs, use the Ray cluster of RAY_ADDRESS, or start one on this machine"
    parser.add_argument("--ray", action="store_true", help=text)
    text = "steps of an episode whose success counts: any or last, as on Fetch (default: any)"
    parser.add_argument("--success-step", choices=("any", "last"), default="any", help=text)
    text = "answers per prompt for pass@k on text tasks; 0 for none (default: 8)"
    parser.add_argument("--samples", type=int, default=8, help=text)
    add_display_option(parser)
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate and write the report; return 0."""
    if args.dataset is not None:
        from robopolicy.cli.eval_dataset import eval_dataset

        return eval_dataset(args)
    with open_display(args) as display:
        return _eval(args, display)


def _eval(args: argparse.Namespace, display: Display | None) -> int:
    from robopolicy.atomic import atomic_folder
    from robopolicy.cli.policy_args import check_different, load_policy_entries, with_planning
    from robopolicy.evaluation.frequency import check_action_repeats, frequency_facts, frequency_table
    from robopolicy.evaluation.latency import check_latencies, latency_facts, latency_table, require_continuation
    from robopolicy.evaluation.report import Report, aligned, all_notes, table, to_dict, write_report
    from robopolicy.evaluation.result import compare
    from robopolicy.files import check_new_folder, next_free_path
    from robopolicy.text.evaluation import pass_at_k_facts, pass_at_k_legend, pass_at_k_table

    check_numbers(args, positive=("episodes", "num_envs", "jobs"), non_negative=("seed", "video", "samples"))
    check_different(args.policies)
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
        reject_unused(args, f"on {entry.name}, which is not a text task", "--samples")
    else:
        unused = "--action-repeats", "--latency", "--reward", "--camera", "--display"
        reject_unused(args, f"on {entry.name}, a text task", *unused)
    for policy_entry in policy_entries if args.chunk_blending == "rtc" else ():
        require_continuation(policy_entry.make(), policy_entry.label)
    limits = _limit_episodes(args, policy_entries, entry)
    with atomic_folder(args.out) as folder:
        # Recording is first, because it fails for an unknown camera.
        video, strip, notes = _record_video(args, policy_entries, entry, folder)
        results, repeated, delayed = _evaluate(args, policy_entries, entry, latencies, notes, display)
        sampled = _sample(args, policy_entries, entry)
        tables = {ACTION_REPEATS: frequency_table(repeated)} if repeated else {}
        tables |= {f"{LATENCY} (chunk blending '{args.chunk_blending}')": latency_table(delayed)} if delayed else {}
        tables |= {PASS_AT_K.format(args.samples): pass_at_k_table(sampled)} if sampled else {}
        pairable = len(results) == 2 and all(result.seeded and result.n > 1 for result in results.values())
        report = Report(
            title=f"{' vs '.join(results)} on {entry.name}",
            results=results,
            comparison=compare(*results.values()) if pairable else None,
            video=video,
            strip=strip,
            notes=limits + notes + ([pass_at_k_legend(sampled)] if sampled else []),
            facts=_facts(args, entry),
            tables=tables,
            extra=(frequency_facts(repeated) if repeated else {})
            | (latency_facts(delayed) if delayed else {})
            | (pass_at_k_facts(sampled) if sampled else {}),
        )
        write_report(folder, report)
    if args.json:
        print(json.dumps({"out": str(args.out), **_without_episodes(to_dict(report))}))
        return 0
    last = args.seed + args.episodes - 1
    seeds = f"seed {last}" if last == args.seed else f"seeds {args.seed} to {last}"
    print(f"{entry.name}, {counted(args.episodes, 'episode')}, {seeds}")
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
    """Raise a UserError for options that would have no effect."""
    check_overwrite(args, "--out", "--display")
    if not args.latency:
        reject_unused(args, "without --latency", "--chunk-blending")
    if not args.video:
        reject_unused(args, "without a video", "--camera")
    if args.jobs > 1:
        reject_unused(args, "with --jobs", "--action-repeats", "--latency", "--display")
    else:
        reject_unused(args, "without --jobs", "--ray")


def _evaluate(
    args: argparse.Namespace,
    policy_entries: list[PolicyEntry],
    entry: TaskEntry,
    latencies: list[float],
    notes: list[str],
    display: Display | None,
) -> tuple[dict[str, EvalResult], dict[str, dict[int, EvalResult]], dict[str, dict[float, LatencyResult]]]:
    """Return the results by policy, by action repeats and by latency; `notes` receives remarks about them."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim
    from robopolicy.cli.progress import progress_bars
    from robopolicy.evaluation.frequency import frequency_curve
    from robopolicy.evaluation.latency import latency_curve

    if args.jobs > 1:
        return _evaluate_in_parallel(args, policy_entries, notes), {}, {}
    results: dict[str, EvalResult] = {}
    repeated: dict[str, dict[int, EvalResult]] = {}
    delayed: dict[str, dict[float, LatencyResult]] = {}
    episodes = _episodes(args)
    options = _sim_options(args, policy_entries, min(args.num_envs, args.episodes))
    with closing(open_sim(entry, options, policy_entries)) as sim, progress_bars() as add_bar:
        if display is not None:
            from robopolicy.viewer.display_process import FrameStream

            display.begin(FrameStream(f"eval in {entry.name}", sim.spec.control_dt))
        for policy_entry in policy_entries:
            progress = add_bar(f"eval {policy_entry.label}", args.episodes)
            label = policy_entry.label
            results[label], found = _evaluate_one(args, policy_entry, sim, progress, display)
            notes += found
            if args.action_repeats:
                repeated[label] = frequency_curve(policy_entry.make(), sim, args.action_repeats, **episodes)
            if latencies:
                delayed[label] = latency_curve(
                    policy_entry.make(), sim, latencies, blending=args.chunk_blending, **episodes
                )
    return results, repeated, delayed


def _sim_options(args: argparse.Namespace, policy_entries: list[PolicyEntry], num_envs: int) -> SimOptions:
    from dataclasses import replace

    from robopolicy.cli.policy_args import sim_options

    options = sim_options(args, policy_entries, num_envs, args.device, args.judge)
    return replace(options, success_step=args.success_step)


def _limit_episodes(args: argparse.Namespace, policy_entries: list[PolicyEntry], entry: TaskEntry) -> list[str]:
    """Reduce the episodes of a text task to its different problems; returns a note about it."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options

    if "text" not in entry.backends:
        return []
    with closing(open_sim(entry, sim_options(args, policy_entries, 1, judge=args.judge), policy_entries)) as sim:
        count = sim.spec.num_problems or args.episodes
    if args.episodes <= count:
        return []
    args.episodes = count
    return [f"{entry.name} has {counted(count, 'held-out problem')}; each is evaluated once."]


def _episodes(args: argparse.Namespace) -> dict[str, Any]:
    return {"episodes": args.episodes, "seed": args.seed, "deterministic": not args.stochastic}


def _evaluate_one(
    args: argparse.Namespace,
    policy_entry: PolicyEntry,
    sim: VectorSim,
    progress: Callable[[int], None] | None = None,
    display: Display | None = None,
) -> tuple[EvalResult, list[str]]:
    """Return the result of a policy and remarks about it."""
    from robopolicy.evaluation.harness import evaluate
    from robopolicy.training.world_sims import abstention_notes

    policy, label = policy_entry.make(), policy_entry.label
    _pop_notes(policy)  # of the video
    if display is None:
        result = evaluate(policy, sim, progress=progress, **_episodes(args))
    else:
        from robopolicy.viewer.displayed_sim import DisplayedSim

        shown = DisplayedSim(sim, display, label)
        result = evaluate(policy, shown, progress=progress, on_chunk=shown.predict, **_episodes(args))
        shown.flush()
    return result, [*abstention_notes(label, sim), *(f"{label}: {note}" for note in _pop_notes(policy))]


def _evaluate_in_parallel(
    args: argparse.Namespace, policy_entries: list[PolicyEntry], notes: list[str]
) -> dict[str, EvalResult]:
    """Evaluate every policy in a process of its own; `notes` receives remarks about them."""
    from functools import partial

    from robopolicy.cli.progress import progress_bars
    from robopolicy.device import usable_device
    from robopolicy.training.parallel import parallel_map

    labels = {name: entry.label for name, entry in zip(args.policies, policy_entries, strict=True)}
    found: dict[str, tuple[EvalResult, list[str]]] = {}
    gpu = usable_device(args.device).type != "cpu"
    with progress_bars() as add_bar:
        progress = add_bar("eval policies", len(labels))
        evaluate = partial(evaluate_alone, args, labels)
        for name, future in parallel_map(evaluate, list(labels), jobs=args.jobs, ray=args.ray, gpu=gpu):
            found[name] = future.result()
            progress(len(found))
    for name in labels:
        notes += found[name][1]
    return {label: found[name][0] for name, label in labels.items()}


def evaluate_alone(args: argparse.Namespace, labels: Mapping[str, str], name: str) -> tuple[EvalResult, list[str]]:
    """Load and evaluate a policy of the command line in a worker process; see `_evaluate_one`."""
    from contextlib import closing
    from dataclasses import replace

    from robopolicy.cli.policy_args import load_policy_entries, open_sim, with_planning

    policy_entries, entry = load_policy_entries([name], args.task, args.device)
    policy_entries = [replace(item, label=labels[name]) for item in with_planning(policy_entries, args, entry)]
    options = _sim_options(args, policy_entries, min(args.num_envs, args.episodes))
    with closing(open_sim(entry, options, policy_entries)) as sim:
        return _evaluate_one(args, policy_entries[0], sim)


def _pop_notes(policy: Policy | Actor) -> list[str]:
    """Return the remarks of a policy about its decisions since the last call."""
    from robopolicy.policies.base import Policy

    return policy.notes() if isinstance(policy, Policy) else []


def _sample(
    args: argparse.Namespace, policy_entries: list[PolicyEntry], entry: TaskEntry
) -> dict[str, SampledRollouts]:
    """Sample several answers of every text policy per prompt; empty for other tasks."""
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
    """Record the episodes; return video, still image and notes."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim
    from robopolicy.evaluation.video import record, rendering_problem, write_strip, write_video

    count = min(args.video, args.episodes)
    if count == 0:
        return None, None, []
    options = _sim_options(args, policy_entries, count)
    with closing(open_sim(entry, options, policy_entries)) as sim:
        sim.reset(args.seed)
        problem = rendering_problem(sim)
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
        "success": f"at {'the last' if args.success_step == 'last' else 'any'} step",
        "policies": ", ".join(args.policies),
        **({"best of": f"{args.candidates} chunks, predicted in {args.plan_with}"} if args.plan_with else {}),
        **{name: versions()[name] for name in ("robopolicy", "torch", "mujoco")},
    }


def _without_episodes(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report without the per-episode lists, which are in the file."""
    return {**report, "results": {label: result["summary"] for label, result in report["results"].items()}}
