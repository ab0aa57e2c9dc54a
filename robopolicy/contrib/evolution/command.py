"""`robopolicy evolve`: gradient-free search over the weights of a checkpoint in episodes of the simulator."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, check_numbers
from robopolicy.errors import UserError

if TYPE_CHECKING:
    from robopolicy.contrib.evolution.evolution import Space
    from robopolicy.policies.base import Policy
    from robopolicy.sim.contract import Observation, VectorSim
    from robopolicy.text.rollouts.protocols import AskTellOptimizer

MAX_NUMBERS = 1000  # for CMA-ES, whose covariance is quadratic in size

EXAMPLES = """\
examples:
  robopolicy evolve runs/lift_flow_bc/checkpoints/best --out runs/lift_evolved
  robopolicy evolve runs/lift_flow_bc/checkpoints/best --out runs/lift_ga --search deep_ga --numbers all --sigma 0.01
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "evolve",
        description="Optimise some parameters of a policy's network for the success rate in simulated episodes, or "
        "for the return if a task has no success criterion; the result is compared with the policy on other episodes.",
        epilog=EXAMPLES,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="checkpoint folder of the policy")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    search = "cmaes, deep_ga (only mutations) or archive (for noisy fitness) (default: cmaes)"
    parser.add_argument("--search", choices=("cmaes", "deep_ga", "archive"), default="cmaes", help=search)
    numbers = "rows: a factor per row of the matrices; singular: their singular values; all (default: rows)"
    parser.add_argument("--numbers", choices=("rows", "singular", "all"), default="rows", help=numbers)
    text = "prefixes of parameter names, e.g. actor (default: only the last matrix)"
    parser.add_argument("--parameters", nargs="+", metavar="NAME", help=text)
    parser.add_argument("--generations", type=int, default=20, help="generations (default: 20)")
    parser.add_argument("--population", type=int, default=16, help="candidates per generation (default: 16)")
    parser.add_argument("--sigma", type=float, default=0.1, help="standard deviation of mutations (default: 0.1)")
    parser.add_argument("--episodes", type=int, default=32, help="episodes per candidate (default: 32)")
    parser.add_argument("--seed", type=int, default=20_000, help="first episode seed (default: 20000)")
    parser.add_argument("--report-episodes", type=int, default=100, help="episodes of the comparison (default: 100)")
    parser.add_argument("--report-seed", type=int, default=30_000, help="first seed of the comparison (default: 30000)")
    parser.add_argument("--backend", default="auto", help="simulator, or worldmodel:FOLDER (default: from the task)")
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    parser.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")
    parser.add_argument("--device", default="cpu", help="device of policies and GPU physics (default: cpu)")
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search and write the checkpoint; returns 0."""
    import copy
    from contextlib import closing

    from robopolicy.cli.policy_args import load_policy_entries, open_sim, sim_options
    from robopolicy.cli.progress import progress_bars
    from robopolicy.contrib.evolution.evolution import evolve
    from robopolicy.evaluation.report import aligned, table
    from robopolicy.evaluation.search.weights import SimEvaluator, evaluate_held_out
    from robopolicy.policies.base import Policy

    _check(args)
    entries, entry = load_policy_entries([str(args.checkpoint)], None, args.device)
    policy = entries[0].make()
    assert isinstance(policy, Policy)
    before, space = copy.deepcopy(policy), _space(args, policy)
    optimizer = _optimizer(args, space)
    with closing(open_sim(entry, sim_options(args, entries, args.num_envs, args.device), entries)) as sim:
        evaluator = SimEvaluator(sim)
        with progress_bars() as add_bar:
            advance, done = add_bar("candidates", args.generations * args.population), [0]

            def fitness() -> float:
                result = evaluator(policy, range(args.seed, args.seed + args.episodes))
                done[0] += 1
                advance(done[0])
                return float((result.returns if result.success is None else result.success).mean())

            history = evolve(optimizer, space, fitness, args.generations)
        reported = range(args.report_seed, args.report_seed + args.report_episodes)
        results = evaluate_held_out({"before": before, "evolved": policy}, SimEvaluator(sim, probe=True), reported)
        _write(args, policy, sim, history, results["evolved"].summary())
    if args.json:
        held = {name: result.summary() for name, result in results.items()}
        print(json.dumps({"out": str(args.out), "best": history, "results": held}))
        return 0
    print(aligned(*table(results)))
    print(f"checkpoint: {args.out}")
    return 0


def _space(args: argparse.Namespace, policy: Policy) -> Space:
    """Create the search space.

    Raises:
        UserError: No parameter matches, or there are too many numbers for CMA-ES.
    """
    from robopolicy.contrib.evolution.evolution import AllOf, RowScales, SingularValues

    least = 1 if args.numbers == "all" else 2
    known = {name: value for name, value in policy.named_parameters() if value.dim() >= least}
    if args.numbers == "singular":
        known = {name: value for name, value in known.items() if value.dim() == 2}
    names = [name for name in known if name.startswith(tuple(args.parameters))] if args.parameters else [*known][-1:]
    if not names:
        prefixes = ", ".join(sorted({name.split(".")[0] for name in known}))
        raise UserError(f"No parameters match --numbers {args.numbers} and --parameters; known prefixes: {prefixes}.")
    space = {"rows": RowScales, "singular": SingularValues, "all": AllOf}[args.numbers]([known[name] for name in names])
    if args.search == "cmaes" and len(space.read()) > MAX_NUMBERS:
        raise UserError(
            f"CMA-ES searches at most {MAX_NUMBERS} numbers, got {len(space.read())}; pass --search deep_ga, "
            "other --numbers, or fewer --parameters."
        )
    return space


def _optimizer(args: argparse.Namespace, space: Space) -> AskTellOptimizer:
    from robopolicy.contrib.evolution.evolution import CMAES, Archive, DeepGA

    kind: Any = {"cmaes": CMAES, "deep_ga": DeepGA, "archive": Archive}[args.search]
    return kind(space.read(), sigma=args.sigma, population=args.population, seed=args.seed)


def _write(
    args: argparse.Namespace, policy: Policy, sim: VectorSim, history: list[float], evaluation: dict[str, Any]
) -> None:
    from robopolicy.atomic import atomic_folder
    from robopolicy.training.checkpoint import save_checkpoint
    from robopolicy.training.manifest import record_parent

    evolved = {"search": args.search, "numbers": args.numbers, "best": history}
    training, parent = {"evolved": evolved, "evaluation": evaluation}, record_parent(args.checkpoint, args.out)
    obs = {key: value.cpu() for key, value in _observed(policy, sim, args.seed).items()}
    with atomic_folder(args.out) as folder:
        save_checkpoint(folder, policy.cpu(), task=sim.spec.task, obs_sample=obs, training=training, parents=[parent])


def _observed(policy: Policy, sim: VectorSim, seed: int) -> Observation:
    """Return a few first observations of the policy, with an empty hidden state if it has one."""
    import torch

    from robopolicy.sim.chunk import ChunkedSim
    from robopolicy.spec import HIDDEN_STATE

    horizons = {"action_horizon": policy.spec.action_horizon, "obs_horizon": policy.spec.obs_horizon}
    observed = ChunkedSim(sim, **horizons).reset(seed)
    obs = {key: value[:4] for key, value in observed.items() if key in policy.spec.observation}
    if policy.spec.hidden_dim:
        obs[HIDDEN_STATE] = torch.zeros(len(next(iter(obs.values()))), 1, policy.spec.hidden_dim)
    return obs


def _check(args: argparse.Namespace) -> None:
    """Check the arguments."""
    from robopolicy.evaluation.search.weights import check_disjoint
    from robopolicy.files import check_new_folder
    from robopolicy.training.manifest import MANIFEST

    counted = ("generations", "population", "episodes", "report_episodes", "num_envs")
    check_numbers(args, positive=counted, non_negative=("seed", "report_seed"))
    if not 0 < args.sigma < float("inf"):
        raise UserError(f"--sigma must be positive, got {args.sigma}.")
    if args.population < 4:
        raise UserError(f"--population must be at least 4, got {args.population}.")
    searched = range(args.seed, args.seed + args.episodes)
    check_disjoint(searched, range(args.report_seed, args.report_seed + args.report_episodes))
    check_new_folder(args.out, "a checkpoint", MANIFEST, overwrite=args.overwrite, sources=[args.checkpoint])
