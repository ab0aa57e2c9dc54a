"""Implement `robopolicy compress`, which searches for a smaller network that imitates a policy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, add_search_options, check_numbers, check_search, reject_unused
from robopolicy.errors import UserError

if TYPE_CHECKING:
    from robopolicy.contrib.compression.architectures import ArchitectureSearch, Widths
    from robopolicy.contrib.compression.compression import TeacherData
    from robopolicy.evaluation.result import EvalResult
    from robopolicy.policies.base import Policy
    from robopolicy.sim.contract import VectorSim

RECORD = "students.json"  # scores of all students, in the output folder
SHOWN = 10  # students in the table

EXAMPLES = """\
examples:
  robopolicy compress runs/lift_flow_bc/checkpoints/best --out runs/lift_small
  robopolicy compress runs/lift_flow_bc/checkpoints/best --out runs/lift_tiny --max-parameters 20000
  robopolicy compress runs/lift_flow_bc/checkpoints/best --out runs/lift_chance --search random
  robopolicy compress runs/lift_flow_bc/checkpoints/best --out runs/lift_given --widths 64 64
  robopolicy export runs/lift_small --out bundles/lift_small
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compress",
        description="Search the hidden layers of a smaller policy: layers are removed, then shrunk. Every student is "
        "trained on the teacher's actions and evaluated on common episodes; R = score / teacher's score * C (2 - C), "
        "with C the removed fraction of parameters. The best is trained longer and compared on other episodes.",
        epilog=EXAMPLES,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint folder of the teacher")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--search", choices=("n2n", "random"), default="n2n", help="search method (default: n2n)")
    parser.add_argument("--widths", nargs="+", type=int, metavar="W", help="train one student of these widths")
    parser.add_argument("--removal-rounds", type=int, default=6, help="rounds that remove layers (default: 6)")
    parser.add_argument("--shrink-rounds", type=int, default=10, help="rounds that shrink the others (default: 10)")
    parser.add_argument("--population", type=int, default=4, help="students per round (default: 4)")
    parser.add_argument("--updates", type=int, default=1000, help="gradient steps per student (default: 1000)")
    parser.add_argument(
        "--final-updates", type=int, default=5000, help="gradient steps of the best student (default: 5000)"
    )
    parser.add_argument("--max-parameters", type=int, default=0, help="maximum parameters of a student (default: any)")
    parser.add_argument(
        "--teacher-episodes", type=int, default=100, help="teacher episodes to learn from (default: 100)"
    )
    parser.add_argument(
        "--noise", type=float, default=0.1, help="action noise of the teacher, in half ranges (default: 0.1)"
    )
    parser.add_argument("--episodes", type=int, default=32, help="episodes per student of the search (default: 32)")
    parser.add_argument("--seed", type=int, default=20_000, help="first episode seed of the search (default: 20000)")
    parser.add_argument("--teacher-seed", type=int, default=40_000, help="first teacher episode (default: 40000)")
    add_search_options(parser)
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Compress the policy and write the checkpoint; return 0."""
    from contextlib import closing

    from robopolicy.cli.policy_args import load_policy_entries, open_sim, sim_options
    from robopolicy.cli.progress import progress_bars
    from robopolicy.contrib.compression.architectures import smallest
    from robopolicy.contrib.compression.compression import (
        check_reachable,
        distil,
        parameters_of,
        record,
        student_of,
        widths_of,
    )
    from robopolicy.evaluation.report import aligned, table
    from robopolicy.evaluation.search.weights import SimEvaluator, evaluate_held_out
    from robopolicy.policies.base import Policy

    _check(args)
    policy_entries, entry = load_policy_entries([str(args.checkpoint)], None, args.device)
    teacher = policy_entries[0].make()
    assert isinstance(teacher, Policy)
    narrow = {"removes": args.search == "random" or args.removal_rounds > 0}
    narrow["shrinks"] = args.search == "random" or args.shrink_rounds > 0
    check_reachable(teacher, smallest(widths_of(teacher), **narrow), args.max_parameters)
    if args.widths is not None:
        student_of(teacher, tuple(args.widths))  # raises before any episode runs
    with closing(open_sim(entry, sim_options(args, policy_entries, args.num_envs, args.device), policy_entries)) as sim:
        with progress_bars() as add_bar:
            advance = add_bar("teacher", args.teacher_episodes)
            episodes = range(args.teacher_seed, args.teacher_seed + args.teacher_episodes)
            data = record(teacher, sim, episodes, noise=args.noise, progress=advance)
        scores: dict[Widths, float] = {}
        chosen = tuple(args.widths or ())
        if args.widths is None:
            chosen, scores, known = _search(args, sim, teacher, data)
        else:
            known = {}
        student = student_of(teacher, chosen)
        with progress_bars() as add_bar:
            advance = add_bar(f"student {_named(chosen)}", args.final_updates)
            student = distil(student, data, updates=args.final_updates, progress=advance)
        tried: dict[str, Policy] = {"teacher": teacher, "student": student}
        reported = range(args.report_seed, args.report_seed + args.report_episodes)
        results = evaluate_held_out(tried, SimEvaluator(sim, probe=True), reported)
        sizes = {name: parameters_of(policy) for name, policy in tried.items()}
        _write(args, sim.spec.task, student, data, chosen, sizes, results, scores)
    share = sizes["student"] / sizes["teacher"]
    if args.json:
        summaries = {name: result.summary() for name, result in results.items()}
        students = {_named(widths): reward for widths, reward in known.items()}
        found = {"out": str(args.out), "widths": chosen, "parameters": sizes, "rewards": students, "results": summaries}
        print(json.dumps(found))
        return 0
    for widths, reward in sorted(known.items(), key=lambda item: -item[1])[:SHOWN]:
        print(f"  {_named(widths):24s} score {scores[widths]:.3f}  R {reward:.3f}")
    print(aligned(*table(results)))
    print(f"student {_named(chosen)}: {sizes['student']} of {sizes['teacher']} parameters ({100 * share:.1f} %)")
    print(f"checkpoint: {args.out}")
    return 0


def _search(
    args: argparse.Namespace, sim: VectorSim, teacher: Policy, data: TeacherData
) -> tuple[Widths, dict[Widths, float], dict[Widths, float]]:
    """The best widths, the score of every student, and its reward without the limit."""
    from robopolicy.cli.progress import progress_bars
    from robopolicy.contrib.compression.architectures import INVALID_REWARD, compression_reward, constrained_reward
    from robopolicy.contrib.compression.compression import Scorer, distil, parameters_of, student_of

    score = Scorer(sim, range(args.seed, args.seed + args.episodes))
    own, size = score(teacher), parameters_of(teacher)
    compression_reward(0.0, own, 0.0)  # raises for a useless teacher before any training
    scores = _load_scores(args)
    known: dict[Widths, float] = {}
    rounds = args.removal_rounds + args.shrink_rounds
    search, sizes = _searcher(args, teacher), dict[Any, int]()
    with progress_bars() as add_bar:
        advance = add_bar(f"students, {args.updates} updates each", rounds * args.population * args.updates)
        for round_ in range(rounds):
            rewards: list[float] = []
            for place, widths in enumerate(search.ask(), round_ * args.population):
                try:
                    student = student_of(teacher, widths)
                except UserError:
                    rewards.append(INVALID_REWARD)
                    continue
                sizes[widths] = parameters_of(student)
                if widths not in scores:
                    progress = partial(_advanced, advance, place * args.updates)
                    scores[widths] = score(distil(student, data, updates=args.updates, progress=progress))
                    _save_scores(args, scores)
                known[widths] = compression_reward(scores[widths], own, 1 - sizes[widths] / size)
                over = 0 < args.max_parameters < sizes[widths]
                rewards.append(constrained_reward(known[widths], over, round_))
                advance((place + 1) * args.updates)
            search.tell(rewards)
    allowed = [widths for widths in known if not args.max_parameters or sizes[widths] <= args.max_parameters]
    if not allowed:
        raise UserError(f"No student has at most {args.max_parameters} parameters; allow more, or search longer.")
    return max(allowed, key=lambda widths: known[widths]), scores, known


def _advanced(advance: Callable[[int], None], before: int, done: int) -> None:
    advance(before + done)


def _searcher(args: argparse.Namespace, teacher: Policy) -> ArchitectureSearch:
    from robopolicy.contrib.compression.architectures import Controllers, ControllersConfig, RandomWidths
    from robopolicy.contrib.compression.compression import widths_of

    if args.search == "random":
        return RandomWidths(widths_of(teacher), args.population, args.seed)
    config = ControllersConfig(removal_rounds=args.removal_rounds, population=args.population)
    return Controllers(config, widths_of(teacher), args.seed)


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that determines the score of a student."""
    from robopolicy.training.manifest import MANIFEST
    from robopolicy.versions import sha256

    names = ("updates", "teacher_episodes", "teacher_seed", "noise", "episodes", "seed", "reward", "backend")
    return {"teacher": sha256(args.checkpoint / MANIFEST), **{name: getattr(args, name) for name in names}}


def _save_scores(args: argparse.Namespace, scores: Mapping[Widths, float]) -> None:
    from robopolicy.atomic import write_text

    args.out.mkdir(parents=True, exist_ok=True)
    rows = [{"widths": list(widths), "score": score} for widths, score in scores.items()]
    write_text(args.out / RECORD, json.dumps({"request": _request(args), "students": rows}) + "\n")


def _load_scores(args: argparse.Namespace) -> dict[Widths, float]:
    """Scores of the students that were trained before an interruption."""
    if not args.resume:
        return {}
    from robopolicy.files import parse_json

    file: Path = args.out / RECORD
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        known, rows = dict(content["request"]), content["students"]
        scores = {tuple(row["widths"]): float(row["score"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); drop --resume, or choose another folder.") from error
    other = [key for key, value in _request(args).items() if known.get(key) != value]
    if other:
        raise UserError(f"{file} has another {other[0]}; pass the original settings, or choose another folder.")
    return scores


def _write(
    args: argparse.Namespace,
    task: str,
    student: Policy,
    data: TeacherData,
    widths: Widths,
    sizes: Mapping[str, int],
    results: Mapping[str, EvalResult],
    scores: Mapping[Widths, float],
) -> None:
    """Write the checkpoint and the record of the search, atomically."""
    import shutil

    from robopolicy.atomic import atomic_folder
    from robopolicy.training.checkpoint import save_checkpoint
    from robopolicy.training.manifest import record_parent

    training = {
        "compressed": {"widths": list(widths), "parameters": dict(sizes), "students": len(scores)},
        "evaluation": results["student"].summary(),
    }
    obs = {key: value[:4] for key, value in data.obs.items()}
    teacher = record_parent(args.checkpoint, args.out)
    with atomic_folder(args.out) as folder:
        save_checkpoint(folder, student.cpu(), task=task, obs_sample=obs, training=training, parents=[teacher])
        if scores:
            shutil.copyfile(args.out / RECORD, folder / RECORD)


def _named(widths: Widths) -> str:
    return "x".join(map(str, widths)) or "linear"


def _check(args: argparse.Namespace) -> None:
    """Raise `UserError` for invalid numbers and folders."""
    from robopolicy.evaluation.search.weights import check_disjoint

    counted = ("population", "updates", "final_updates", "teacher_episodes", "episodes", "report_episodes", "num_envs")
    others = ("removal_rounds", "shrink_rounds", "max_parameters", "seed", "report_seed", "teacher_seed")
    check_numbers(args, positive=counted, non_negative=others)
    if args.widths is not None:
        options = ("search", "removal-rounds", "shrink-rounds", "population", "updates", "max-parameters")
        options = (*options, "episodes", "seed", "resume")
        reject_unused(args, "with --widths, which disable the search", *(f"--{option}" for option in options))
    if args.widths is None and not args.removal_rounds + args.shrink_rounds:
        raise UserError("A search needs rounds; pass --removal-rounds or --shrink-rounds, or --widths.")
    if not 0 <= args.noise < float("inf"):
        raise UserError(f"--noise must be 0 or larger, got {args.noise}.")
    spans = [
        range(start, start + count)
        for start, count in (
            (args.seed, args.episodes),
            (args.report_seed, args.report_episodes),
            (args.teacher_seed, args.teacher_episodes),
        )
    ]
    check_disjoint(spans[0], spans[1])
    check_disjoint(spans[2], spans[1])
    check_search(args.out, RECORD, resume=args.resume, overwrite=args.overwrite, sources=[args.checkpoint])
