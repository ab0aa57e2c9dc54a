"""Which algorithm trains which policy: as its class states, and found out by trying on the toy task.

`allowed`, which the methods page prints, follows from the `heads` of the classes. `try_pair` builds one pair of tiny
networks and updates it once; the tests compare both. Themes of contrib add heads and say on which task their algorithms
are tried by `[compatibility.heads]` and `[compatibility.algorithms]` of their `theme.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.data.episodes import Episode
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.errors import UserError
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.plugins import contributed
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.schema import to_dict
from robopolicy.training.build import RunComponents, build, resolve_config
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.config import BudgetConfig, EvaluationConfig, ReplayConfig, SimConfig, TaskConfig, TrainConfig
from robopolicy.training.make_source import SOURCES

TASK = "toy/point_mass"
SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=2)
PRODUCT_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "flow": ("flow", {}),
    "shortcut": ("shortcut", {}),
    "meanflow": ("meanflow", {}),
    "diffusion": ("diffusion", {}),
    "edm": ("edm", {}),
    "consistency": ("consistency", {}),
    "act": ("act", {}),
    "autoregressive": ("autoregressive", {}),
    "mixture": ("mixture", {}),
    "squashed_mixture": ("mixture", {"squash": True}),
    "gaussian": ("gaussian", {"normalization": "minmax"}),
    "squashed_gaussian": (
        "gaussian",
        {"normalization": "minmax", "action_normalization": "minmax", "squash": True, "state_dependent_std": True},
    ),
    "recurrent_gaussian": ("gaussian", {"normalization": "minmax", "recurrent": RecurrentConfig(kind="gru", width=8)}),
}
"""Name in the matrix -> (registered policy, settings), without contrib."""

RECURRENT = {"recurrent_gaussian"}


def all_heads() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name in the matrix -> (registered policy, settings), the product's first."""
    themes = {name: (row["policy"], row["settings"]) for name, (_, row) in contributed("compatibility.heads").items()}
    return {**PRODUCT_HEADS, **themes}


def setting_of(algorithm: str) -> tuple[str, PolicySpec]:
    """The task on which an algorithm is tried, and what its policies see and do there."""
    _, row = contributed("compatibility.algorithms").get(algorithm, ("", {}))
    observation = {key: tuple(shape) for key, shape in row.get("observation", {}).items()} or SPEC.observation
    spec = replace(SPEC, observation=observation, action_dim=row.get("action_dim", SPEC.action_dim))
    return row.get("task", TASK), spec


def allowed(name: str) -> set[str]:
    """Names in the matrix of the policies that an algorithm trains, as its class states them.

    Empty for algorithms of text, which train policy=text alone.
    """
    algorithm = ALGORITHMS[name]
    able = RECURRENT if algorithm.supports_recurrent else set[str]()
    return able.union(*map(_heads_of, algorithm.heads)) & all_heads().keys()


def _heads_of(stated: str) -> set[str]:
    """The head of that name, or all that have the verb of that name."""
    verb = getattr(Policy, stated, None)
    if verb is None:
        return {stated}
    return {head for head, (name, _) in all_heads().items() if getattr(POLICIES[name], stated) is not verb} - RECURRENT


SMALL: dict[str, Any] = {"hidden": (16,), "transformer_width": 16, "transformer_layers": 1, "width": 16, "layers": 1}
SETTINGS = {
    "batch_size": 16,
    "offline_batch": 16,
    "scenarios": 8,
    "num_steps": 4,
    "utd": 0.25,
    "policy_delay": 1,
    "discriminator_delay": 1,
    "epochs": 1,
    "q_epochs": 1,
    "group_size": 2,
    "branch_points": 1,
    "branches": 3,
    "set_size": 2,
    "n_step": 4,
    "candidates": 4,
    "top": 2,
    "ascent_steps": 2,
    "edits": 2,
    "augmentations": 2,
    "cells": 16,
    "ga_offspring": 3,
    "pg_offspring": 2,
    "actors": 2,
    "population": 8,
    "critic_steps": 2,
    "pg_steps": 2,
    "episodes_per_round": 2,
}


@dataclass(frozen=True)
class Outcome:
    """What came of one pair."""

    reason: str | None  # why it was refused; None if it ran
    metrics: Mapping[str, float]  # of the update


def policy_of(head: str, spec: PolicySpec = SPEC) -> Policy:
    """A tiny policy of one of `all_heads`, its normalisers fitted."""
    name, settings = all_heads()[head]
    known = POLICIES[name].config_class.__dataclass_fields__
    small = {key: value for key, value in SMALL.items() if key in known}
    policy = make_policy(name, POLICIES[name].config_class(**(small | settings)), spec)
    policy.fit_normalizer(statistics_of(spec))
    return policy


def statistics_of(spec: PolicySpec) -> dict[str, dict[str, list[float]]]:
    """Made-up statistics of whatever a policy of `spec` sees and does."""
    sizes = {key: 1 if key.startswith("stock.") else shape[0] for key, shape in spec.observation.items()}
    seen = {"min": -2.0, "max": 2.0, "mean": 0.0, "std": 1.0}
    done = {"min": -1.0, "max": 1.0, "mean": 0.0, "std": 0.5}
    statistics = {key: {name: [value] * size for name, value in seen.items()} for key, size in sizes.items()}
    statistics = {key: {**values, "count": [100.0]} for key, values in statistics.items()}
    return {**statistics, "action": {name: [value] * spec.action_dim for name, value in done.items()}}


@contextmanager
def workplace(algorithms: Iterable[str]) -> Iterator[Path]:
    """A folder with a small dataset and, for the tasks of some algorithms, a checkpoint of every head."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        torch.manual_seed(0)
        for owner in sorted({_owner(name) for name in algorithms}):
            task, spec = setting_of(owner)
            for head in all_heads():
                policy = policy_of(head, spec)  # a recurrent one adds its memory to what it sees
                obs = {key: torch.randn(4, 1, *shape) for key, shape in policy.spec.observation.items()}
                save_checkpoint(place / owner / head, policy, task=task, obs_sample=obs)
        _write_dataset(place / "data")
        yield place


def _owner(algorithm: str) -> str:
    """The algorithm itself where it is tried on a task of its own, else the empty name."""
    return algorithm if algorithm in contributed("compatibility.algorithms") else ""


def try_pair(place: Path, algorithm: str, head: str) -> Outcome:
    """Build `algorithm` around `head` from files in `place` and let it play and learn once."""
    try:
        with opened(place, algorithm, head) as parts:
            return Outcome(None, parts.algorithm.update(parts.source.next(parts.algorithm)))
    except UserError as error:
        return Outcome(str(error), {})


@contextmanager
def opened(place: Path, algorithm: str, head: str, device: str = "cpu") -> Iterator[RunComponents]:
    """`algorithm` around `head` from files in `place`, ready to play and learn on `device`.

    Raises:
        UserError: They do not go together.
    """
    kind = ALGORITHMS[algorithm]
    config_class = kind.config_class
    default = config_class()
    chosen = {key: value for key, value in SETTINGS.items() if getattr(default, key, 0)}  # what is off stays off
    learns_from_data = kind.data_source == "dataset" or kind.needs_dataset
    replay = (
        ReplayConfig(capacity=2000, learning_starts=60) if SOURCES[kind.data_source].uses_replay else ReplayConfig()
    )
    config = TrainConfig(
        algorithm={"name": algorithm, **to_dict(config_class(**chosen))},
        task=TaskConfig(name=setting_of(algorithm)[0]),
        sim=SimConfig(num_envs=4),
        budget=BudgetConfig(updates=4),
        replay=replay,
        evaluation=EvaluationConfig(episodes=0),
        init_from=str(place / _owner(algorithm) / head),
        dataset=str(place / "data") if learns_from_data else "",
        device=device,
    )
    parts = build(resolve_config(config))
    try:
        yield parts
    finally:
        parts.close()


def _write_dataset(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with LeRobotWriter(folder, control_dt=0.1) as writer:
        for seed in range(3):
            ends = np.zeros(12, bool)
            ends[-1] = True
            writer.add(
                Episode(
                    {
                        "state": rng.normal(size=(12, 6)).astype(np.float32),
                        "action": rng.uniform(-1, 1, (12, 2)).astype(np.float32),
                        "reward": ends.astype(np.float32),
                        "terminated": ends,
                        "success": ends,
                    },
                    TASK,
                    seed,
                )
            )
