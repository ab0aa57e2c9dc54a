"""`robopolicy compose`: combine several policies in one checkpoint, with given or searched weights."""

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
SETTINGS = ("episodes", "candidates", "divisions")  # options of the search methods

EXAMPLES = """\
examples:
  A and B stand for checkpoint folders such as runs/lift_flow_bc/checkpoints/best.
  robopolicy compose A B --weights 0.3 0.7 --out runs/both
  robopolicy compose A B --search grid --episodes 50 --out runs/searched
  robopolicy compose A B --operator or --search halving --out runs/mixture
  robopolicy compose A B --search grid --backend worldmodel:runs/push_world/checkpoints/best --out runs/predicted
  robopolicy compose A B --operator and --override operator.sampler=sde --out runs/agreed
  robopolicy compose A --operator affine --override unconditioned=[0] --weights 2 -1 --out runs/guided
  robopolicy compose A B --critic runs/idql/checkpoints/best --override candidates=16 --out runs/best_of_16
  robopolicy compose A B --gate-data data/lift --override selection.top=1 --out runs/chosen
  robopolicy compose --resume runs/searched

operators:
  convex      weights >= 0 with sum 1: interpolates the parents at every noise level
  affine      weights of any sign: amplifies the first against the second (classifier-free guidance: unconditioned=[0])
  scheduled   weights that depend on time: --override operator.knots=[[1,0],[0,1]] goes from the first to the second
  or          a mixture of the parents: each sample follows one of them
  and         samples that all parents find equally probable

settings for --override:
  operator.sampler=ode|sde, operator.probes=N, operator.derivative=difference|exact   of 'or' and 'and'
  operator.temperature=1   of 'or'
  operator.reach=2         of 'and': largest distance of a weight from its initial value
  unconditioned=[0]        also use parent 0 without its embeddings, as an additional parent
  steps=K, action_horizon=N  denoising steps, and actions executed per chunk
  corrector.steps=1, corrector.size=0.05         Langevin steps at every noise level
  guidance.strength=1, guidance.data_std=0.5, guidance.reduction=mean|min    guidance of the samples by --critic
  candidates=16            execute the chunk with the highest value of --critic out of 16
  selection.top=1, selection.least=0, selection.updates=1000     of --gate-data: maximum number of selected policies,
                           and their minimum preference as a fraction of the first
  then.NAME.KEY=VALUE      of --then NAME
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compose",
        description="Write a checkpoint that denoises with several policies at once. --search finds their weights "
        "on common episode seeds, then evaluates the result and each policy on held-out seeds. Ctrl-C keeps finished "
        "episodes. Parents may differ in head, inputs, chunk length and steps. The checkpoint contains their weights "
        "and identifies their folders by content hashes.",
        epilog=EXAMPLES,
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CKPT", help="checkpoint folders of one task")
    parser.add_argument("--out", type=Path, help="checkpoint folder to write")
    parser.add_argument("--operator", default="convex", help="composition operator, see below (default: convex)")
    text = "overrides of composition settings, see below"
    parser.add_argument("--override", nargs="+", metavar="KEY=VALUE", default=[], help=text)
    parser.add_argument("--critic", metavar="CKPT", help="checkpoint whose critic guides the samples or selects one")
    text = f"change the composition with further checkpoints; NAME is one of: {', '.join(POST_COMPOSITION)}"
    parser.add_argument("--then", nargs="+", default=[], metavar="NAME=CKPT", help=text)
    text = "demonstrations that train the gate, which selects policies by observation"
    parser.add_argument("--gate-data", default="", metavar="DATASET", help=text)
    text = "one weight per policy, sum 1 (default: equal weights)"
    parser.add_argument("--weights", nargs="+", type=float, metavar="W", help=text)
    parser.add_argument("--search", metavar="METHOD", help="find the weights by grid, halving or bayes")
    parser.add_argument("--episodes", type=int, help="episodes per candidate of the search (default: 50)")
    parser.add_argument("--candidates", type=int, help="weights that bayes evaluates (default: 12)")
    parser.add_argument("--divisions", type=int, help="candidates are multiples of 1/DIVISIONS (default: 10, bayes 20)")
    text = "objective of a search; use return if success is rare (default: success if the task defines it)"
    parser.add_argument("--objective", choices=("success", "return"), help=text)
    parser.add_argument("--seed", type=int, default=20_000, help="first episode seed of the search (default: 20000)")
    text = "held-out episodes of the report (default: 200 after a search, else 0)"
    parser.add_argument("--report-episodes", type=int, help=text)
    text = "first seed of the held-out episodes (default: 30000)"
    parser.add_argument("--report-seed", type=int, default=30_000, help=text)
    parser.add_argument("--resume", type=Path, metavar="OUT", help="resume an interrupted composition")
    parser.add_argument("--task", help="task id (default: the task of the checkpoints)")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER (default: the task's own)")
    text = "simulator of the report (default: --backend, or the task's own if that is a world model)"
    parser.add_argument("--report-backend", default="", help=text)
    add_judge_option(parser)
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--stochastic", action="store_true", help="act with exploration noise")
    parser.add_argument(
        "--device", default="auto", help="device of policies and GPU physics (default: the GPU, if any)"
    )
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write a composed checkpoint; return 0."""
    from robopolicy.cli.compose_run import (
        SEARCH_LOG,
        CompositionResult,
        composed_metadata,
        load_parts,
        search_and_evaluate,
        write,
    )
    from robopolicy.cli.progress import hint_when_stopped

    out, request, log = _load_request(args) if args.resume is not None else (args.out, _build_request(args), None)
    metadata = composed_metadata(request, out)  # before anything is loaded
    parts = load_parts(out, request)
    if request.needs_rollouts:
        line = f"Finished episodes are kept; resume with: robopolicy compose --resume {out}"
        with hint_when_stopped(lambda: line if (out / SEARCH_LOG).is_file() else ""):
            outcome = search_and_evaluate(out, request, parts, log)
    else:
        policy, accuracy = parts.policy(request.weights), parts.gate_accuracy
        outcome = CompositionResult(policy, request.nominal, None, {}, gate_accuracy=accuracy)
    write(out, request, outcome, metadata)
    _print_result(args, out, request, outcome)
    return 0


def _build_request(args: argparse.Namespace) -> CompositionRequest:
    """Build the request of a command line and check it without loading a policy."""
    from robopolicy.cli.compose_config import read_composition_config
    from robopolicy.cli.compose_run import SEARCH_LOG, CompositionRequest
    from robopolicy.cli.policy_args import short_names
    from robopolicy.evaluation.search.weights import check_disjoint
    from robopolicy.policies.composition.selection import Selection
    from robopolicy.training.manifest import read_manifest, record_parent
    from robopolicy.training.world_sims import is_world

    if args.out is None:
        raise UserError("Pass --out FOLDER for the composed checkpoint.")
    config = read_composition_config(args.operator, args.override)
    if args.gate_data and config.selection is None:
        config = replace(config, selection=Selection())
    then = _parse_steps(args.then)
    settings = _check_options(args, config, then)
    sources = [Path(name) for name in (*args.checkpoints, args.critic, *then.values()) if name is not None]
    check_search(args.out, SEARCH_LOG, resume=False, overwrite=args.overwrite, sources=sources)
    tasks = list(dict.fromkeys(read_manifest(Path(name)).task for name in args.checkpoints))
    if args.task is None and len(tasks) > 1:
        raise UserError(
            f"The checkpoints were trained on {' and '.join(tasks)}; compose policies of one task, or pass the common "
            "task with --task."
        )
    request = CompositionRequest(
        parents=tuple(record_parent(Path(name), args.out) for name in args.checkpoints),
        names=tuple(short_names([*args.checkpoints, str(args.out)])),
        critic=None if args.critic is None else record_parent(Path(args.critic), args.out),
        then={name: record_parent(Path(path), args.out) for name, path in then.items()},
        gate_data=args.gate_data,
        composition=config,
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


def _parse_steps(texts: Sequence[str]) -> dict[str, str]:
    """Parse `--then NAME=CKPT ...` into checkpoints by name."""
    steps: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not path:
            raise UserError(f"--then takes NAME=CKPT, got '{text}'.")
        if name not in POST_COMPOSITION:
            raise unknown_name("step of --then", name, POST_COMPOSITION)
        if name in steps:
            raise UserError(f"--then takes every name once, got '{name}' twice.")
        steps[name] = path
    return steps


def _check_options(args: argparse.Namespace, config: CompositionConfig, then: Mapping[str, str]) -> dict[str, int]:
    """Raise a UserError for incompatible options; return the settings of the search."""
    from robopolicy.policies.composition.operators import Weighted

    if args.critic is not None and not config.needs_critic:
        raise UserError(
            "--critic has no effect here; add --override guidance.strength=1, or --override candidates=16 to "
            "execute the best of 16 chunks."
        )
    count = len(args.checkpoints)
    if count < 2 and not (count and (config.unconditioned or config.needs_critic or then)):
        raise UserError(
            f"A composition requires at least two checkpoints, got {count}; a single one can be guided or changed: see "
            "--critic, --then and --override unconditioned=[0]."
        )
    if config.needs_critic and args.critic is None:
        raise UserError("guidance and candidates require a critic; pass --critic CKPT.")
    for name in config.then:
        if name not in then:
            raise UserError(f"then.{name} sets a step that is not used; pass --then {name}=CKPT.")
    if config.selection is not None and not args.gate_data:
        raise UserError("A selection requires demonstrations; pass --gate-data DATASET.")
    operands = len(config.operands(args.checkpoints))
    if args.search is not None and args.weights is not None:
        raise UserError("Pass either --weights, or --search to find them.")
    if (args.search or args.weights) and not isinstance(config.build_operator(), Weighted):
        raise UserError("A schedule has weights at every knot; pass only --override operator.knots=[[1,0],[0,1]].")
    if args.search is not None and operands < 2:
        raise UserError("A search requires at least two policies, got 1.")
    if args.weights is not None and len(args.weights) != operands:
        raise UserError(f"{operands} policies require {operands} weights, got {len(args.weights)}.")
    settings = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    passed = [*settings, *(("objective",) if args.objective else ())]
    if passed and args.search is None:
        raise UserError(f"--{passed[0]} belongs to a search; add --search grid, halving or bayes.")
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
            f"--report-episodes must be at least 2, got {args.report_episodes}; a search requires held-out results."
        )
    return settings


def _load_request(args: argparse.Namespace) -> tuple[Path, CompositionRequest, SearchLog]:
    """Load output folder, request and log of an interrupted search."""
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
    log = SearchLog.open(out / SEARCH_LOG)
    content = {_RENAMED.get(key, key): value for key, value in log.request.items()}
    settings = content.pop("recipe", None) or content.get("composition", {})  # "recipe": of version 0.1.0
    content["composition"] = {_RENAMED.get(key, key): value for key, value in settings.items()}
    request = from_dict(CompositionRequest, content, str(out / SEARCH_LOG))
    check_parents(request.sources, out)
    return out, request, log


def _print_result(args: argparse.Namespace, out: Path, request: CompositionRequest, outcome: CompositionResult) -> None:
    from robopolicy.cli.compose_run import PREDICTED, gate_text, weights_text
    from robopolicy.evaluation.report import aligned, table
    from robopolicy.evaluation.search.search_report import search_summary, search_table

    own = request.names[-1]
    found, results, compared = outcome.found, outcome.results, outcome.compared
    if args.json:
        content = {
            "out": str(out),
            "operator": request.composition.operator["name"],
            "weights": list(outcome.weights),
            "gate_accuracy": outcome.gate_accuracy,
            "search": None if found is None else search_summary(found),
            "results": {name: result.summary() for name, result in results.items()},
            "predicted": {name: result.summary() for name, result in outcome.predicted.items()},
            "against": {name: comparison.to_dict() for name, comparison in compared.items()},
        }
        print(json.dumps(content))
        return
    if found is not None:
        print(aligned(*search_table(found, request.operands)))
    print(f"{request.composition.operator['name']} composition: {weights_text(request, outcome)}")
    if (gate := gate_text(request, outcome)) is not None:
        print(f"gate: {gate}")
    if results:
        print(aligned(*table(results)))
    if outcome.predicted:
        print(f"{PREDICTED}:\n{aligned(*table(outcome.predicted))}")
    for name, comparison in compared.items():
        print(comparison.sentence(name, own))
    if results:
        print(f"report: {out / 'report' / 'report.html'}")
    print(f"checkpoint: {out}")
