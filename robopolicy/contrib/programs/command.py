"""Implement `robopolicy program`, which writes a behavior tree or Python program as a checkpoint and can improve it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, add_search_options, check_numbers, check_search
from robopolicy.errors import UserError

if TYPE_CHECKING:
    from robopolicy.contrib.programs.program_backends import Language
    from robopolicy.contrib.programs.search import ScoredProgram
    from robopolicy.evaluation.result import EvalResult
    from robopolicy.policies.base import Policy
    from robopolicy.sim.contract import VectorSim
    from robopolicy.sim.registry import TaskEntry

RECORD = "search.json"  # record of a search in the output folder

EXAMPLES = """\
examples:
  robopolicy program stages.json --skills reach=runs/reach/checkpoints/best put=runs/put/checkpoints/best --out runs/x
  robopolicy program brake.json --task toy/point_mass --out runs/better --rounds 20 --episodes 32
  robopolicy program brake.json --task toy/point_mass --out runs/better --rounds 40 --episodes 32 --resume
  robopolicy program walk.py --task text/grid --out runs/walk --rounds 10 --llm coder@http://127.0.0.1:8000/v1
  robopolicy eval runs/better

a behavior tree, FILE.json:
  {"kind": "selector", "children": [
    {"kind": "action", "control": ["3 * (state[4:6] - state[0:2])"], "until": "norm(state[4:6] - state[0:2]) < 0.3"},
    {"kind": "action", "control": ["clip(-2 * state[2:4], -1, 1)"]}]}
nodes:
  sequence, selector   children; "resume": true resumes the child that was running
  condition            "holds": FORMULA
  action               "skill": NAME or "control": [FORMULA, ...]; "until", "unless": FORMULA; "limit": DECISIONS
formulas: vector observations with [i] and [i:j], numbers, lists, + - * / < > and or not, abs clip cos exp max min norm
  sign sin sqrt sum tanh

a Python program, FILE.py, runs in a sandbox and has one function:
  def act(obs): return [3 * (obs["state"][4] - obs["state"][0]), 0.0]      robots: lists of numbers to numbers
  def act(messages): return "n" if "goal 03" in messages[0] else "e"       text tasks: messages to the next message
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "program",
        description="Write a checkpoint of a behavior tree, in which readable rules select the active policy, or of a "
        "Python program. With --rounds it is changed at random, or by a language model that gets feedback, and the "
        "best is kept: all candidates run the same seeds, and the result is compared with the original on other seeds.",
        epilog=EXAMPLES,
    )
    parser.add_argument("program", type=Path, metavar="FILE", help="behavior tree (.json) or Python program (.py)")
    parser.add_argument("--skills", nargs="+", default=[], metavar="NAME=CKPT", help="policies that a tree calls")
    parser.add_argument(
        "--default-action",
        nargs="+",
        type=float,
        default=[],
        metavar="A",
        help="action where no node acts (default: 0)",
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--task", help="task (default: the task of the skills)")
    parser.add_argument("--rounds", type=int, default=0, help="total rounds of changes (default: 0, no search)")
    parser.add_argument("--population", type=int, default=8, help="changed programs per round (default: 8)")
    parser.add_argument("--parents", type=int, default=4, help="best programs that are changed (default: 4)")
    parser.add_argument(
        "--llm",
        metavar="WHO",
        help="MODEL@URL or text-policy checkpoint that writes the programs (default: random changes)",
    )
    parser.add_argument(
        "--strategy", default="direct", help="prompting strategy of --llm: direct or pseudocode (default: direct)"
    )
    parser.add_argument("--episodes", type=int, default=32, help="episodes per program (default: 32)")
    parser.add_argument(
        "--seed", type=int, default=20_000, help="first episode seed; also seeds changes (default: 20000)"
    )
    parser.add_argument(
        "--objective",
        choices=("success", "return"),
        default="success",
        help="objective; use return where success is rare (default: success where the task defines it)",
    )
    add_search_options(parser)
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Build the policy and write its checkpoint; return 0."""
    from contextlib import closing

    from robopolicy.cli.policy_args import PolicyEntry, open_sim, sim_options
    from robopolicy.evaluation.report import aligned, table
    from robopolicy.evaluation.search.weights import check_disjoint

    counted = ("population", "parents", "episodes", "num_envs", "report_episodes")
    check_numbers(args, positive=counted, non_negative=("rounds", "seed", "report_seed"))
    searched = range(args.seed, args.seed + args.episodes)
    reported = range(args.report_seed, args.report_seed + args.report_episodes)
    check_disjoint(searched, reported)
    text, places = _text_of(args.program), _named(args.skills)
    check_search(args.out, RECORD, resume=args.resume, overwrite=args.overwrite, sources=places.values())
    if args.resume and not args.rounds:
        raise UserError("--resume needs the rounds of the search; pass --rounds, or drop --resume.")
    skills, entry = _loaded(places, args)
    policy_entries = [PolicyEntry(name, lambda skill=skill: skill, skill.spec) for name, skill in skills.items()]
    with closing(open_sim(entry, sim_options(args, policy_entries, args.num_envs, args.device), policy_entries)) as sim:
        language = _language(args, sim, skills)
        policy, best, results = language.policy(text), None, {}
        if args.rounds:
            best, results = _improve(args, sim, language, text, reported)
            policy, text = language.policy(best.program), best.program
        _write(args, sim, language.file, policy, text, best, results, places)
    if args.json:
        found = {} if best is None else {"score": best.score, "round": best.round}
        summaries = {name: result.summary() for name, result in results.items()}
        print(json.dumps({"out": str(args.out), "program": text, "search": found, "results": summaries}))
        return 0
    print(language.shown(text))
    if best is not None:
        print(f"best score on the seeds of the search: {best.score:.3g}, found in round {best.round}")
        print(aligned(*table(results)))
    for error in language.errors(policy)[:3]:  # errors on the example observation of the checkpoint
        print(f"note: The program fails on the first observation: {error}.")
    print(f"checkpoint: {args.out}")
    return 0


def _language(args: argparse.Namespace, sim: VectorSim, skills: Mapping[str, Policy]) -> Language:
    """Language of the file, from its extension."""
    from robopolicy.contrib.programs.program_backends import Python, TreeLanguage

    if args.program.suffix == ".json":
        return TreeLanguage(sim.spec, skills, tuple(args.default_action))
    if args.program.suffix != ".py":
        raise UserError(f"A program must be a behavior tree (.json) or Python (.py), got {args.program}.")
    if skills or args.default_action:
        raise UserError("--skills and --default-action are for behavior trees; drop them for a Python program.")
    return Python(sim.spec)


def _improve(
    args: argparse.Namespace, sim: VectorSim, language: Language, start: str, reported: range
) -> tuple[ScoredProgram, dict[str, EvalResult]]:
    """The best program of a search, and its comparison with the original on other episodes."""
    from robopolicy.cli.progress import progress_bars
    from robopolicy.contrib.programs.program_backends import feedback, load_llm
    from robopolicy.contrib.programs.search import ProgramSearch, refine
    from robopolicy.evaluation.search.weights import SimEvaluator, evaluate_held_out

    args.out.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        (args.out / RECORD).unlink(missing_ok=True)  # the record of a replaced search
    settings = ("seed", "episodes", "population", "parents", "objective", "reward", "backend", "llm", "strategy")
    request = {
        "program": start,
        "skills": dict(_named_texts(args.skills)),
        "task": sim.spec.task,
        **{name: getattr(args, name) for name in settings},
    }
    write = None if args.llm is None else load_llm(args.llm, args.device)
    proposer = language.proposer(write, args.strategy)
    numbers = {"population": args.population, "parents": args.parents, "seed": args.seed}
    refusals = 50 if write is None else args.population  # an answer of a model is expensive, a random change is cheap
    search = ProgramSearch([start], proposer, refusals=refusals, **numbers)
    evaluator = SimEvaluator(sim, measure=args.objective)
    seeds = range(args.seed, args.seed + args.episodes)
    with progress_bars() as add_bar:
        advance = add_bar("program", 1 + args.rounds * args.population)

        def evaluate(programs: Sequence[str]) -> list[tuple[float, str]]:
            found: list[tuple[float, str]] = []
            for program in programs:
                policy = language.policy(program)
                result = evaluator(policy, seeds)
                found.append((float(result.outcomes.mean()), feedback(result, language.errors(policy))))
                advance(len(search.trials) + len(found))
            return found

        best = refine(search, evaluate, args.rounds, args.out / RECORD, request)
        trial = {"as written": language.policy(start), "improved": language.policy(best.program)}
        return best, evaluate_held_out(trial, SimEvaluator(sim), reported)


def _write(
    args: argparse.Namespace,
    sim: VectorSim,
    name: str,
    policy: Policy,
    text: str,
    best: ScoredProgram | None,
    results: Mapping[str, EvalResult],
    places: Mapping[str, Path],
) -> None:
    """Write the checkpoint, the program as text and the record of the search, atomically."""
    import shutil

    import torch

    from robopolicy.atomic import atomic_folder
    from robopolicy.spec import HIDDEN_STATE
    from robopolicy.training.checkpoint import save_checkpoint
    from robopolicy.training.manifest import record_parent

    spec, first = policy.spec, sim.reset(args.seed)
    shown = [key for key in spec.observation if key != HIDDEN_STATE]
    sample = {key: first[key].cpu()[:, None].repeat_interleave(spec.obs_horizon, 1) for key in shown}
    if spec.hidden_dim:
        sample[HIDDEN_STATE] = torch.zeros(sim.num_envs, 1, spec.hidden_dim)
    training: dict[str, Any] = {"program": args.program.name}
    if best is not None:
        training["search"] = {"score": best.score, "round": best.round, "rounds": args.rounds}
        training["evaluation"] = results["improved"].summary()
    called = policy.config_dict().get("skills", {})
    parents = [record_parent(place, args.out) for skill, place in places.items() if skill in called]
    with atomic_folder(args.out) as folder:
        task = sim.spec.task
        save_checkpoint(folder, policy.cpu(), task=task, obs_sample=sample, training=training, parents=parents)
        (folder / name).write_text(text, encoding="utf-8")
        if best is not None:
            shutil.copyfile(args.out / RECORD, folder / RECORD)


def _loaded(places: Mapping[str, Path], args: argparse.Namespace) -> tuple[dict[str, Policy], TaskEntry]:
    """Load the skills and their task."""
    from robopolicy.sim.registry import get_task
    from robopolicy.training.checkpoint import load_policy

    loaded = {name: load_policy(place, args.device) for name, place in places.items()}
    tasks = sorted({manifest.task for _, manifest in loaded.values()})
    if args.task is None and len(tasks) != 1:
        found = f"the skills were trained on {' and '.join(tasks)}" if tasks else "the program names none"
        raise UserError(f"The task is ambiguous: {found}; pass --task (see 'robopolicy list tasks').")
    return {name: policy for name, (policy, _) in loaded.items()}, get_task(args.task or tasks[0])


def _named(skills: Sequence[str]) -> dict[str, Path]:
    return {name: Path(place) for name, place in _named_texts(skills)}


def _named_texts(skills: Sequence[str]) -> list[tuple[str, str]]:
    """Parse `NAME=CKPT` to pairs."""
    pairs = [(name, place) for name, _, place in (text.partition("=") for text in skills)]
    names = [name for name, _ in pairs]
    for name, place in pairs:
        if not name.isidentifier() or not place or names.count(name) > 1:
            raise UserError(f"--skills takes NAME=CKPT with distinct names, got '{name}={place}'.")
    return pairs


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; pass a behavior tree (.json) or Python (.py).") from error
