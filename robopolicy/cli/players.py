"""Who plays in `eval` and `play`: a checkpoint, the task's scripted `expert`, or `random` actions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import Actor, ExpertActor, RandomActor, check_compatible
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry, get_task, make_sim, views_of
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.manifest import Manifest


@dataclass(frozen=True)
class Player:
    """One competitor."""

    label: str  # short name for tables and captions
    make: Callable[[], Policy | Actor]  # experts remember their episodes, so every simulator gets a new one
    spec: PolicySpec | None = None  # None for experts and random actions, which need no observations


def load_players(names: Sequence[str], task: str | None, device: str) -> tuple[list[Player], TaskEntry]:
    """Load the competitors and find their task: `task`, or the one their checkpoints were trained on.

    Raises:
        UserError: A checkpoint is bad, no task is known, two checkpoints disagree on it, or it has no expert.
    """
    loaded = {name: load_policy(name, device) for name in names if name not in ("expert", "random")}
    trained = sorted({manifest.task for _, manifest in loaded.values()})
    if task is None and len(trained) != 1:
        found = f"the checkpoints were trained on {' and '.join(trained)}" if trained else f"{names[0]} has no task"
        raise UserError(f"Which task? {found}; pass --task (see 'robopolicy list tasks').")
    entry = get_task(task or trained[0])
    labels = short_names(names)
    return [_player(name, labels[i], entry, loaded) for i, name in enumerate(names)], entry


def sim_options(args: argparse.Namespace, players: Sequence[Player], num_envs: int, device: str = "cpu") -> SimOptions:
    """Options for the simulator of all players, with the images and point clouds that their policies see."""
    views = views_of([player.spec.observation for player in players if player.spec is not None])
    return SimOptions(num_envs=num_envs, backend=args.backend, device=device, reward=args.reward, **views)


def open_sim(entry: TaskEntry, options: SimOptions, players: Sequence[Player]) -> VectorSim:
    """Build the simulator that all players fit, and say what to install where its extra is missing."""
    try:
        sim = make_sim(entry.name, options)
    except ImportError as error:
        extra = entry.requires or options.backend
        raise UserError(
            f"Task {entry.name} needs the package '{error.name}'; run: pip install 'robopolicy[{extra}]'."
        ) from error
    try:
        for player in players:
            if player.spec is not None:
                check_compatible(player.spec, sim.spec)
    except UserError:
        sim.close()
        raise
    return sim


def _player(name: str, label: str, entry: TaskEntry, loaded: dict[str, tuple[Policy, Manifest]]) -> Player:
    if name == "random":
        return Player(label, RandomActor)
    if name != "expert":
        policy, _ = loaded[name]
        return Player(label, lambda: policy, policy.spec)
    make_expert = entry.need_expert()
    return Player(label, lambda: ExpertActor(make_expert()))


def short_names(names: Sequence[str]) -> list[str]:
    """Short and distinct names of checkpoint folders: `runs/lift_bc/checkpoints/best` becomes `lift_bc/best`."""
    short = ["/".join([p for p in Path(name).parts if p not in ("runs", "checkpoints")][-2:]) for name in names]
    return short if len(set(short)) == len(short) else [str(Path(name)) for name in names]
