"""`robopolicy ope`: estimate returns of policies from logged episodes (off-policy evaluation)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import EVALUATION_SEED, check_numbers, reject_unused
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.cli.policy_args import PolicyEntry
    from robopolicy.data.episodes import Episodes
    from robopolicy.evaluation.ope import Estimates
    from robopolicy.policies.base import Policy
    from robopolicy.sim.registry import TaskEntry

EXAMPLES = """\
examples:
  robopolicy ope runs/lift_reinflow/checkpoints/best --logs data/lift_mixed
  robopolicy ope runs/ppo/checkpoints/best --logs data/hopper --behavior-policy runs/sac/checkpoints/last --stochastic
  robopolicy ope runs/a/checkpoints/best runs/b/checkpoints/best --logs data/lift_mixed --play 100
  robopolicy ope runs/*/checkpoints/best --logs data/hopper_random --behavior-policy random --stochastic
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ope",
        description="Off-policy evaluation: estimate the discounted return of policies from a dataset that another "
        "policy collected (collect --keep-failures), by every applicable estimator.",
        epilog=EXAMPLES,
    )
    parser.add_argument("policies", nargs="+", metavar="CKPT", help="checkpoint folders")
    parser.add_argument(
        "--logs", type=Path, required=True, metavar="DATASET", help="dataset with rewards, in any format"
    )
    text = "behavior policy of the logs: a checkpoint with --stochastic, or random; required for importance weights"
    parser.add_argument("--behavior-policy", metavar="CKPT", help=text)
    parser.add_argument("--stochastic", action="store_true", help="evaluate the policies with exploration noise")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount per control step (default: 0.99)")
    text = "gradient steps of fitted Q-evaluation (default: 4000)"
    parser.add_argument("--steps", type=int, default=4_000, help=text)
    parser.add_argument("--play", type=int, default=0, metavar="N", help="also run N episodes to compare (default: 0)")
    text = f"with --play: seed of the first episode (default: {EVALUATION_SEED})"
    parser.add_argument("--play-seed", type=int, default=EVALUATION_SEED, help=text)
    parser.add_argument("--task", help="with --play: task id (default: the task of the checkpoints)")
    parser.add_argument("--backend", default="auto", help="with --play: simulator backend (default: the task's own)")
    parser.add_argument("--reward", default="sparse", help="with --play: sparse or shaped, as in the logs")
    parser.add_argument("--num-envs", type=int, default=16, help="with --play: environments together (default: 16)")
    parser.add_argument("--device", default="auto", help="device of policies and critics (default: the GPU, if any)")
    parser.add_argument("--seed", type=int, default=0, help="seed of critics, resamples and decisions (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the estimates of every policy; return 0."""
    from robopolicy.cli.policy_args import load_policy_entries
    from robopolicy.data.formats import read_dataset
    from robopolicy.errors import UserError
    from robopolicy.evaluation.ope import FQEConfig, OPEConfig, estimate, score_class
    from robopolicy.evaluation.report import aligned

    check_numbers(args, positive=("steps", "num_envs"), non_negative=("seed", "play", "play_seed"))
    if not args.play:
        reject_unused(args, "without --play", "--num-envs", "--reward", "--play-seed")
        if args.behavior_policy != "random":
            reject_unused(args, "without --play", "--backend")
    if {"expert", "random"} & set(args.policies) or len(set(args.policies)) < len(args.policies):
        raise UserError(f"Pass different checkpoint folders, got {' '.join(args.policies)}.")
    policy_entries, entry = load_policy_entries(args.policies, args.task, args.device)
    behaviour = _behavior_policy(args, entry, policy_entries)
    keys = {key for policy_entry in policy_entries if policy_entry.spec for key in policy_entry.spec.observation}
    episodes = read_dataset(
        args.logs, task=entry.name, reward=args.reward, images=any(key.startswith("image.") for key in keys)
    )
    _check_logs(args, episodes, policy_entries, entry)
    fqe = FQEConfig(steps=args.steps)
    config = OPEConfig(gamma=args.gamma, deterministic=not args.stochastic, fqe=fqe, seed=args.seed)
    found: dict[str, Estimates] = {}
    policies: dict[str, Any] = {policy_entry.label: policy_entry.make() for policy_entry in policy_entries}
    for number, policy_entry in enumerate(policy_entries, 1):
        label = policy_entry.label
        announce = _progress(f"{label} ({number} of {len(policies)})" if len(policies) > 1 else label)
        rollouts = _rollouts(args, policy_entry, entry) if args.play else None
        if rollouts is not None:
            announce(f"{counted(args.play, 'episode')} in the simulator")
        options = {"behaviour": behaviour, "rollouts": rollouts, "config": config, "announce": announce}
        found[label] = estimate(policies[label], episodes, **options)
    portfolios = _portfolios(found) if args.play and len(found) > 1 else None
    joint = None
    if behaviour is not None and len(found) > 1 and all(item["pdis"].effective is not None for item in found.values()):
        announce = _progress("all policies")
        joint = score_class(policies, episodes, behaviour, config)
        announce("comparison on the same decisions")
    if args.json:
        content = {"logs": str(args.logs), "gamma": args.gamma, "policies": {k: v.to_dict() for k, v in found.items()}}
        content |= {"class": joint.to_dict()} if joint else {}
        print(json.dumps(content | ({"sharpe_ratio": portfolios} if portfolios else {})))
        return 0
    for label, estimates in found.items():
        print(f"{label} on {counted(episodes.num_episodes, 'logged episode')}, discount {args.gamma:g}")
        print(aligned(*estimates.table()))
        for note in estimates.notes:
            print(f"note: {note}")
    if joint is not None:
        print(f"All policies on the same decisions, weighted per decision:\n{aligned(*joint.table())}")
        if joint.best is None:
            print(f"best: not named, because fewer than two policies have {config.minimum_size:g} effective episodes")
        else:
            print(f"best: {joint.best}; its regret is at most {joint.regret:.3g} in 95 % of the resamples")
    if portfolios is not None:
        print(f"SharpeRatio@k of the policies and the logs' behaviour:\n{aligned(*portfolios)}")
    return 0


def _progress(label: str) -> Callable[[str], None]:
    """Return a function that prints which part of the work on `label` is done, with the time since this call."""
    start = time.monotonic()
    return lambda part: print(f"{label}: {part} done after {time.monotonic() - start:.0f} s", file=sys.stderr)


def _check_logs(
    args: argparse.Namespace, episodes: Episodes, policy_entries: list[PolicyEntry], entry: TaskEntry
) -> None:
    """Compare the logs with the policies, and with the simulator if the policies are run in it."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.data.compatibility import check_dataset, check_dataset_for_policy, warn_of_other_task

    for policy_entry in policy_entries:
        assert policy_entry.spec is not None
        check_dataset_for_policy(episodes, policy_entry.spec, f"dataset {args.logs}")
    if not args.play:
        return warn_of_other_task(episodes, entry.name, str(args.logs))
    with closing(open_sim(entry, sim_options(args, policy_entries, 1, args.device), policy_entries)) as sim:
        check_dataset(episodes, sim.spec, str(args.logs))


def _behavior_policy(args: argparse.Namespace, entry: TaskEntry, policy_entries: list[PolicyEntry]) -> Policy | None:
    """Load the behavior policy of the logs, if it is known."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.evaluation.ope import UniformPolicy
    from robopolicy.training.checkpoint import load_policy

    if args.behavior_policy != "random":
        return load_policy(args.behavior_policy, args.device)[0] if args.behavior_policy else None
    assert policy_entries[0].spec is not None
    with closing(open_sim(entry, sim_options(args, policy_entries, 1, args.device), policy_entries)) as sim:
        low, high = sim.spec.action_low.cpu().numpy(), sim.spec.action_high.cpu().numpy()
        return UniformPolicy(policy_entries[0].spec.observation, low, high)


def _rollouts(args: argparse.Namespace, policy_entry: PolicyEntry, entry: TaskEntry) -> Episodes:
    """Roll out a policy for comparison."""
    from contextlib import closing

    from robopolicy.cli.policy_args import open_sim, sim_options
    from robopolicy.data.collect import EpisodeList, collect
    from robopolicy.data.episodes import Episodes
    from robopolicy.evaluation.actors import PolicyExpert

    sink, policy = EpisodeList(), policy_entry.make()
    options = sim_options(args, [policy_entry], min(args.num_envs, args.play), args.device)
    with closing(open_sim(entry, options, [policy_entry])) as sim:
        actor = PolicyExpert(policy, deterministic=not args.stochastic)  # type: ignore[arg-type]
        collect(sim, actor, sink, episodes=args.play, seed=args.play_seed, only_success=False)
        return Episodes.from_list(sink, sim.spec.control_dt)


def _portfolios(found: dict[str, Estimates]) -> tuple[list[str], list[list[str]]]:
    """Compute SharpeRatio@k of every estimator that has a value for all policies."""
    from robopolicy.evaluation.ope import sharpe_table
    from robopolicy.evaluation.ope.estimates import NAMES

    def values(name: str) -> dict[str, float]:
        rows = {label: estimates[name].interval for label, estimates in found.items()}
        return {label: interval.estimate for label, interval in rows.items() if interval is not None}

    logged = next(iter(values("behaviour").values()))
    candidates = {name: values(name) for name in NAMES if name not in ("behaviour", "played")}
    whole = {NAMES[name]: v | {"the logs": logged} for name, v in candidates.items() if len(v) == len(found)}
    return sharpe_table(whole, values("played") | {"the logs": logged}, "the logs")
