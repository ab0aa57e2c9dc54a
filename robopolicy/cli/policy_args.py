"""Policies of the command line: a checkpoint, the scripted `expert` of the task, or `random` actions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from robopolicy.cli.options import reject_unused
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import (
    Actor,
    ExpertActor,
    NoisyActor,
    PolicyActor,
    RandomActor,
    check_compatible,
)
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry, WorldOptions, get_task, make_sim, observation_options
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.manifest import Manifest
from robopolicy.training.world_sims import load_worlds, make_env
from robopolicy.worldmodel.backend import SimInitialStates
from robopolicy.worldmodel.imagined import ImaginedPolicy, ShootingConfig, VideoDynamics


@dataclass(frozen=True)
class PolicyEntry:
    """A policy, expert or random actor with its label."""

    label: str  # short name for tables and captions
    make: Callable[[], Policy | Actor]  # experts have episode state, so every simulator requires a new one
    spec: PolicySpec | None = None  # None for experts and random actions, which use no observations


def load_policy_entries(names: Sequence[str], task: str | None, device: str) -> tuple[list[PolicyEntry], TaskEntry]:
    """Load policies and determine their task: `task`, or the common one of the checkpoints.

    Raises:
        UserError: A checkpoint is invalid, the task is unknown or ambiguous, or it has no expert.
    """
    loaded = {name: load_policy(name, device) for name in names if name not in ("expert", "random")}
    tasks = sorted({manifest.task for _, manifest in loaded.values()})
    if task is None and len(tasks) != 1:
        found = f"The checkpoints were trained on {' and '.join(tasks)}" if tasks else f"{names[0]} has no task"
        raise UserError(f"{found}; pass --task (see 'robopolicy list tasks').")
    entry = get_task(task or tasks[0])
    labels = short_names(names)
    return [_policy_entry(name, label, entry, loaded) for name, label in zip(names, labels, strict=True)], entry


def with_planning(policy_entries: list[PolicyEntry], args: argparse.Namespace, entry: TaskEntry) -> list[PolicyEntry]:
    """Let the policies select chunks in the world model of `--plan-with`, if passed.

    Raises:
        UserError: It belongs to another task, failed its tests, predicts no success, or lacks observations of a policy.
    """
    if not args.plan_with:
        reject_unused(args, "without --plan-with", "--candidates", "--plan-horizon", "--rounds")
        return policy_entries
    if all(policy_entry.spec is None for policy_entry in policy_entries):
        raise UserError(f"--plan-with requires a policy, and {policy_entries[0].label} samples no chunks; omit it.")
    config = ShootingConfig(candidates=args.candidates, depth=args.plan_horizon, rounds=args.rounds)
    model, manifest = load_worlds(args.plan_with, args.device)
    if manifest.task != entry.name:
        raise UserError(f"The world model was trained on {manifest.task}, not on {entry.name}.")
    manifest.require_success(judge=False)
    sim = make_sim(entry.name, SimOptions(num_envs=1, cameras=model.spec.cameras, image_size=model.spec.size))
    with closing(SimInitialStates(sim, model.spec)):
        shapes = {key: tuple(item.shape) for key, item in sim.spec.observation.items()}
    dynamics = VideoDynamics(model, model.judge, shapes)

    def wrapped(policy_entry: PolicyEntry) -> PolicyEntry:
        base = policy_entry.make()
        if not isinstance(base, Policy):
            return policy_entry
        policy = ImaginedPolicy(base, dynamics, config, dynamics.observation)
        return replace(policy_entry, make=lambda: policy, spec=policy.spec)

    return [wrapped(policy_entry) for policy_entry in policy_entries]


def sim_options(
    args: argparse.Namespace, policy_entries: Sequence[PolicyEntry], num_envs: int, device: str = "cpu", judge: str = ""
) -> SimOptions:
    """Return simulator options with the images and point clouds of all policies."""
    specs = [policy_entry.spec for policy_entry in policy_entries if policy_entry.spec is not None]
    views = observation_options([spec.observation for spec in specs])
    world = WorldOptions(judge=judge)
    return SimOptions(num_envs=num_envs, backend=args.backend, device=device, reward=args.reward, world=world, **views)


def open_sim(entry: TaskEntry, options: SimOptions, policy_entries: Sequence[PolicyEntry]) -> VectorSim:
    """Build a simulator that is compatible with all policies; a missing package raises a UserError with its extra."""
    try:
        sim = make_env(entry.name, options)
    except ImportError as error:
        extra = entry.requires or options.backend
        raise UserError(
            f"Task {entry.name} requires the package '{error.name}'; run: pip install 'robopolicy[{extra}]'."
        ) from error
    try:
        for policy_entry in policy_entries:
            if policy_entry.spec is not None:
                check_compatible(policy_entry.spec, sim.spec)
    except UserError:
        sim.close()
        raise
    return sim


def _policy_entry(name: str, label: str, entry: TaskEntry, loaded: dict[str, tuple[Policy, Manifest]]) -> PolicyEntry:
    if name == "random":
        return PolicyEntry(label, RandomActor)
    if name != "expert":
        policy, _ = loaded[name]
        return PolicyEntry(label, lambda: policy, policy.spec)
    make_expert = entry.require_expert()
    return PolicyEntry(label, lambda: ExpertActor(make_expert()))


def parse_noise(name: str) -> tuple[str, float]:
    """Split `POLICY+NOISE` into policy and noise, a fraction of half the action range; invalid noise: UserError."""
    policy, plus, text = name.rpartition("+")
    try:
        noise = float(text) if plus else 0.0
    except ValueError:
        noise = -1.0
    if not 0 <= noise < float("inf"):
        raise UserError(f"The noise of POLICY+NOISE must be a number of 0 or more, got '{name}'.")
    return (policy, noise) if plus else (name, 0.0)


def noisy_policy_entries(names: Sequence[str], task: str, device: str) -> list[PolicyEntry]:
    """Load policies with optional action noise, `POLICY+NOISE`."""
    parsed = [parse_noise(name) for name in names]
    unique = list(dict.fromkeys(name for name, _ in parsed))
    found = dict(zip(unique, load_policy_entries(unique, task, device)[0], strict=True)) if unique else {}
    return [_noisy(found[name], noise) for name, noise in parsed]


def _noisy(policy_entry: PolicyEntry, noise: float) -> PolicyEntry:
    if not noise:
        return policy_entry

    def make() -> Actor:
        base = policy_entry.make()
        return NoisyActor(PolicyActor(base) if isinstance(base, Policy) else base, noise)

    return replace(policy_entry, label=f"{policy_entry.label}+{noise:g}", make=make)


def check_different(names: Sequence[str]) -> None:
    """Raise a UserError if a policy is named twice, also by another spelling of its path."""
    if len({os.path.realpath(name) for name in names}) < len(names):
        raise UserError(f"Pass different policies, got {' '.join(names)}.")


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten the paths of checkpoints to distinct names: `runs/lift_bc/checkpoints/best` becomes `lift_bc/best`."""
    short = ["/".join([p for p in Path(name).parts if p not in ("runs", "checkpoints")][-2:]) for name in names]
    return short if len(set(short)) == len(short) else [str(Path(name)) for name in names]
