"""`robopolicy compose`: several policies as one checkpoint, with given weights or with weights found by playing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_judge_option, add_overwrite_option, check_numbers, check_search, reject_unused
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.composition.post import POST_COMPOSITION

if TYPE_CHECKING:
    from robopolicy.cli.compose_config import CompositionConfig
    from robopolicy.cli.compose_run import CompositionRequest, CompositionResult
    from robopolicy.evaluation.search.weights import SearchLog

_RENAMED = {"select": "gate_data", "maximize": "objective", "execute": "action_horizon"}
SETTINGS = ("episodes", "candidates", "divisions")  # of the search methods, by the names of the options

EXAMPLES = """\
examples:
  A and B stand for checkpoint folders such as runs/lift_flow_bc/checkpoints/best.
  robopolicy compose A B --weights 0.3 0.7 --out runs/both
  robopolicy compose A B --search grid --episodes 50 --out runs/searched
  robopolicy compose A B --operator or --search halving --out runs/mixture
  robopolicy compose A B --search grid --backend worldmodel:runs/push_world/checkpoints/best --out runs/dreamt
  robopolicy compose A B --operator and --override operator.sampler=sde --out runs/agreed
  robopolicy compose A --operator affine --override unconditioned=[0] --weights 2 -1 --out runs/guided
  robopolicy compose A B --critic runs/idql/checkpoints/best --override candidates=16 --out runs/best_of_16
  robopolicy compose A B --gate-data data/lift --override selection.top=1 --out runs/chosen
  robopolicy compose --resume runs/searched

operators:
  convex      weights >= 0 with sum 1: between the parents at every noise level
  affine      weights of any sign: the first amplified against the second (classifier-free guidance: unconditioned=[0])
  scheduled   weights that follow time: --override operator.knots=[[1,0],[0,1]] goes from the first to the second
  or          a mixture of the parents: each sample settles on what one of them would do
  and         samples that all parents find equally probable

settings for --override:
  operator.sampler=ode|sde, operator.probes=N, operator.derivative=difference|exact   of 'or' and 'and'
  operator.temperature=1   of 'or'
  operator.reach=2         of 'and': largest distance of a weight from where it starts
  unconditioned=[0]        read parent 0 without its embeddings, too, as one more parent
  steps=K, action_horizon=N  denoising steps, and actions played per chunk
  corrector.steps=1, corrector.size=0.05         Langevin steps at every noise level
  guidance.strength=1, guidance.data_std=0.5, guidance.reduction=mean|min    pull of --critic on the samples
  candidates=16            play that of 16 chunks which --critic likes best
  selection.top=1, selection.least=0, selection.updates=1000     of --gate-data: at most so many policies take part, and
                           none less preferred than this share of the first
  then.NAME.KEY=VALUE      of --then NAME
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compose",
        description="Write a checkpoint that denoises with several policies at once. --search finds their weights "
        "on common episode seeds, then evaluates the result and each policy on held-out seeds. Ctrl-C keeps "
        "finished episodes. "
        "Parents may differ in head, inputs, chunk length and steps. The checkpoint holds their weights, and refers to "
        "their folders by content.",
        epilog=EXAMPLES,
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CKPT", help="checkpoint folders of one task")
    parser.add_argument("--out", type=Path, help="checkpoint folder to write")
    parser.add_argument(
        "--operator", default="convex", help="how the policies are combined, see below (default: convex)"
    )
    parser.add_argument(
        "--override", nargs="+", metavar="KEY=VALUE", default=[], help="overrides of composition settings, see below"
    )
    parser.add_argument("--critic", metavar="CKPT", help="checkpoint whose critic guides the samples or chooses one")
    parser.add_argument(
        "--then",
        nargs="+",
        default=[],
        metavar="NAME=CKPT",
        help=f"change the composition with further checkpoints; NAME is one of: {', '.join(POST_COMPOSITION)}",
    )
    parser.add_argument(
        "--gate-data",
        default="",
        metavar="DATASET",
        help="demonstrations that train the gate, which selects policies by observation",
    )
    parser.add_argument(
        "--weights", nargs="+", type=float, metavar="W", help="one per policy, sum 1 (default: equal parts)"
    )
    parser.add_argument("--search", metavar="METHOD", help="find the weights by grid, halving or bayes")
    parser.add_argument("--episodes", type=int, help="episodes per candidate of the search (default: 50)")
    parser.add_argument("--candidates", type=int, help="weights that bayes tries (default: 12)")
    parser.add_argument("--divisions", type=int, help="candidates are multiples of 1/DIVISIONS (default: 10, bayes 20)")
    parser.add_argument(
        "--objective",
        choices=("success", "return"),
        help="objective of a search; use return where success is rare (default: success where the task defines it)",
    )
    parser.add_argument("--seed", type=int, default=20_000, help="first episode seed of the search (default: 20000)")
    parser.add_argument(
        "--report-episodes", type=int, help="held-out episodes of the report (default: 200 after a search, else 0)"
    )
    parser.add_argument(
        "--report-seed", type=int, default=30_000, help="first seed of the held-out episodes (default: 30000)"
    )
    parser.add_argument("--resume", type=Path, metavar="OUT", help="resume an interrupted composition")
    parser.add_argument("--task", help="task id (default: the task of the checkpoints)")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER (default: the task's own)")
    parser.add_argument(
        "--report-backend",
        default="",
        help="simulator of the other episodes (default: --backend, or the task's own where that is a world model)",
    )
    add_judge_option(parser)
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--stochastic", action="store_true", help="act with exploration noise")
    parser.add_argument("--device", default="cpu", help="device of policies and GPU physics (default: cpu)")
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compose; 0 when the checkpoint is written."""
    from robopolicy.cli.compose_run import SEARCH_LOG, CompositionResult, load, play, write
    from robopolicy.cli.progress import hint_when_stopped

    out, request, ledger = _resumed(args) if args.resume is not None else (args.out, _requested(args), None)
    ingredients = load(out, request)
    if request.needs_rollouts:
        line = f"Finished episodes are kept; resume with: robopolicy compose --resume {out}"
        with hint_when_stopped(lambda: line if (out / SEARCH_LOG).is_file() else ""):
            outcome = play(out, request, ingredients, ledger)
    else:
        outcome = CompositionResult(ingredients.policy(request.weights), request.nominal, None, {})
    write(out, request, outcome)
    _print_result(args, out, request, outcome)
    return 0


def _requested(args: argparse.Namespace) -> CompositionRequest:
    """The request of a command line, checked as far as can be done without loading a policy."""
    from robopolicy.cli.compose_config import read_composition_config
    from robopolicy.cli.compose_run import SEARCH_LOG, CompositionRequest
    from robopolicy.cli.policy_args import short_names
    from robopolicy.evaluation.search.weights import check_disjoint
    from robopolicy.policies.composition.selection import Selection
    from robopolicy.training.manifest import read_manifest, record_parent
    from robopolicy.training.world_sims import is_world

    if args.out is None:
        raise UserError("Pass --out FOLDER for the composed checkpoint.")
    recipe = read_composition_config(args.operator, args.override)
    if args.gate_data and recipe.selection is None:
        recipe = replace(recipe, selection=Selection())
    then = _steps(args.then)
    settings = _check_options(args, recipe, then)
    sources = [Path(name) for name in (*args.checkpoints, args.critic, *then.values()) if name is not None]
    check_search(args.out, SEARCH_LOG, resume=False, overwrite=args.overwrite, sources=sources)
    tasks = list(dict.fromkeys(read_manifest(Path(name)).task for name in args.checkpoints))
    if args.task is None and len(tasks) > 1:
        raise UserError(
            f"The checkpoints were trained on {' and '.join(tasks)}; compose policies of one task, or say with --task "
            "which one they share."
        )
    request = CompositionRequest(
        parents=tuple(record_parent(Path(name), args.out) for name in args.checkpoints),
        names=tuple(short_names([*args.checkpoints, str(args.out)])),
        critic=None if args.critic is None else record_parent(Path(args.critic), args.out),
        then={name: record_parent(Path(place), args.out) for name, place in then.items()},
        gate_data=args.gate_data,
        recipe=recipe,
        weights=None if args.weights is None else tuple(args.weights),
        search=args.search,
        objective=args.objective or "success",
        settings=settings,
        seed=args.seed,
        report_episodes=args.report_episodes,
        report_seed=args.report_seed,
        task=args.task or tasks[0],
        backend=args.backend,
        report_backend=args.report_backend or ("auto" if is_world(args.backend) else args.backend),
        judge=args.judge,
        reward=args.reward,
        num_envs=args.num_envs,
        stochastic=args.stochastic,
        device=args.device,
    )
    if request.method is not None:
        seeds = request.method.plan(len(request.operands)).seeds
        check_disjoint(range(args.seed, args.seed + seeds), request.reported)
    return request


def _steps(words: Sequence[str]) -> dict[str, str]:
    """Name -> checkpoint of `--then NAME=CKPT ...`."""
    steps: dict[str, str] = {}
    for word in words:
        name, _, place = word.partition("=")
        if not place:
            raise UserError(f"--then takes NAME=CKPT, got '{word}'.")
        if name not in POST_COMPOSITION:
            raise unknown_name("step of --then", name, POST_COMPOSITION)
        if name in steps:
            raise UserError(f"--then takes every name once, got '{name}' twice.")
        steps[name] = place
    return steps


def _check_options(args: argparse.Namespace, recipe: CompositionConfig, then: Mapping[str, str]) -> dict[str, int]:
    """Refuse options that do not go together; return the settings of the search."""
    from robopolicy.policies.composition.operators import Weighted

    if args.critic is not None and not recipe.needs_critic:
        raise UserError(
            "--critic has no effect here; add --override guidance.strength=1, or --override candidates=16 to "
            "play the best of 16."
        )
    count = len(args.checkpoints)
    if count < 2 and not (count and (recipe.unconditioned or recipe.needs_critic or then)):
        raise UserError(
            f"Composing needs at least two checkpoints, got {count}; a single one can be guided or changed: see "
            "--critic, --then and --override unconditioned=[0]."
        )
    if recipe.needs_critic and args.critic is None:
        raise UserError("guidance and candidates need a critic; pass --critic CKPT.")
    for name in recipe.then:
        if name not in then:
            raise UserError(f"then.{name} has settings of a step that is not taken; pass --then {name}=CKPT.")
    if recipe.selection is not None and not args.gate_data:
        raise UserError("A selection needs demonstrations; pass --gate-data DATASET.")
    readings = len(recipe.operands(args.checkpoints))
    if args.search is not None and args.weights is not None:
        raise UserError("Pass either --weights, or --search to find them.")
    if (args.search or args.weights) and not isinstance(recipe.build_operator(), Weighted):
        raise UserError("A schedule has weights at every knot; write --override operator.knots=[[1,0],[0,1]] alone.")
    if args.search is not None and readings < 2:
        raise UserError("A search weighs at least two policies, got 1.")
    if args.weights is not None and len(args.weights) != readings:
        raise UserError(f"{readings} policies need {readings} weights, got {len(args.weights)}.")
    settings = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    given = [*settings, *(("objective",) if args.objective else ())]
    if given and args.search is None:
        raise UserError(f"--{given[0]} belongs to a search; add --search grid, halving or bayes.")
    if args.report_episodes is None:
        args.report_episodes = 0 if args.search is None else 200
    check_numbers(args, positive=("num_envs", *settings), non_negative=("seed", "report_episodes", "report_seed"))
    if args.search is None:
        reject_unused(args, "without --search", "--seed")
    if not args.report_episodes:
        reject_unused(args, "without --report-episodes", "--report-seed", "--report-backend")
        if args.search is None:
            options = ("--backend", "--judge", "--reward", "--num-envs", "--stochastic")
            reject_unused(args, "without --search or --report-episodes", *options)
    if args.report_episodes < (0 if args.search is None else 2) or args.report_episodes == 1:
        raise UserError(
            f"--report-episodes must be at least 2, got {args.report_episodes}; what a search found means little "
            "without other episodes."
        )
    return settings


def _resumed(args: argparse.Namespace) -> tuple[Path, CompositionRequest, SearchLog]:
    """The output folder, the request and the record of something interrupted."""
    from robopolicy.cli.compose_run import SEARCH_LOG, CompositionRequest
    from robopolicy.evaluation.search.weights import SearchLog
    from robopolicy.schema import from_dict
    from robopolicy.training.manifest import MANIFEST, check_parents

    if args.checkpoints or args.given - {"--resume", "--json"}:
        raise UserError("A resumed search keeps its settings; pass only --resume OUT.")
    out: Path = args.resume
    if (out / MANIFEST).is_file():
        raise UserError(f"{out} is complete; see 'robopolicy verify {out}'.")
    if not (out / SEARCH_LOG).is_file():
        raise UserError(f"{out} has no {SEARCH_LOG} to resume; pass the --out folder of an interrupted search.")
    ledger = SearchLog.open(out / SEARCH_LOG)
    request = from_dict(
        CompositionRequest,
        {
            _RENAMED.get(key, key): {_RENAMED.get(name, name): each for name, each in value.items()}
            if key == "recipe"
            else value
            for key, value in ledger.request.items()
        },
        str(out / SEARCH_LOG),
    )
    check_parents(request.sources, out)
    return out, request, ledger


def _print_result(args: argparse.Namespace, out: Path, request: CompositionRequest, outcome: CompositionResult) -> None:
    from robopolicy.cli.compose_run import PREDICTED, weights_text
    from robopolicy.evaluation.report import aligned, table
    from robopolicy.evaluation.search.search_report import search_summary, search_table

    own = request.names[-1]
    found, results, compared = outcome.found, outcome.results, outcome.compared
    if args.json:
        content = {
            "out": str(out),
            "operator": request.recipe.operator["name"],
            "weights": list(outcome.weights),
            "search": None if found is None else search_summary(found),
            "results": {name: result.summary() for name, result in results.items()},
            "predicted": {name: result.summary() for name, result in outcome.predicted.items()},
            "against": {name: comparison.to_dict() for name, comparison in compared.items()},
        }
        print(json.dumps(content))
        return
    if found is not None:
        print(aligned(*search_table(found, request.operands)))
    print(f"{request.recipe.operator['name']} composition: {weights_text(request, outcome)}")
    if results:
        print(aligned(*table(results)))
    if outcome.predicted:
        print(f"{PREDICTED}:\n{aligned(*table(outcome.predicted))}")
    for name, comparison in compared.items():
        print(comparison.sentence(name, own))
    if results:
        print(f"report: {out / 'report' / 'report.html'}")
    print(f"checkpoint: {out}")
