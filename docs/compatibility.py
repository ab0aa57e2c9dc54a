"""Which algorithm trains which policy: as its class states, and found out by trying on the toy task.

`ALLOWED`, which the methods page prints, follows from the `heads` of the classes. `try_pair` builds one pair of tiny
networks and updates it once; the tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.schema import to_plain
from robopolicy.training.build import Parts, build, complete
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.config import BudgetConfig, EvaluationConfig, ReplayConfig, SimConfig, TaskConfig, TrainConfig

TASK = "toy/point_mass"
SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, execute=2)
TASKS = {"hdpo": "differentiable/newsvendor", "ts_ddr": "differentiable/reservoir"}
"""Algorithm -> its task, where that must be one of known dynamics."""

SPECS = {
    "dcg_map_elites": replace(SPEC, observation={**SPEC.observation, "descriptor": (2,)}),
    "stock_ac": replace(SPEC, observation={**SPEC.observation, "stock.0.99": (2,)}),
    "hdpo": replace(SPEC, observation={"inventory": (1,)}, action_dim=1),
    "ts_ddr": replace(SPEC, observation={"state": (2,), "disturbance": (2,), "clock": (1,)}),
}
"""Algorithm -> what its policies see and do, where that is not the state of the point mass."""

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "flow": ("flow", {}),
    "shortcut": ("shortcut", {}),
    "meanflow": ("meanflow", {}),
    "diffusion": ("diffusion", {}),
    "edm": ("edm", {}),
    "consistency": ("consistency", {}),
    "autoregressive": ("autoregressive", {}),
    "mixture": ("mixture", {}),
    "squashed_mixture": ("mixture", {"squash": True}),
    "sequence": ("sequence", {"normalization": "minmax"}),
    "swaddled": ("swaddled", {"normalization": "minmax"}),
    "gaussian": ("gaussian", {"normalization": "minmax"}),
    "squashed_gaussian": (
        "gaussian",
        {"normalization": "minmax", "action_normalization": "minmax", "squash": True, "state_dependent_std": True},
    ),
    "recurrent_gaussian": ("gaussian", {"normalization": "minmax", "recurrent": RecurrentConfig(kind="gru", width=8)}),
}
"""Name in the matrix -> (registered policy, settings)."""

RECURRENT = {"recurrent_gaussian"}


def trained_heads(name: str) -> set[str]:
    """Keys of `HEADS` of the policies that an algorithm trains, as its class states them."""
    algorithm = ALGORITHMS[name]
    able = RECURRENT if algorithm.may_remember else set[str]()
    return able.union(*map(_heads_of, algorithm.heads)) & HEADS.keys()


def _heads_of(stated: str) -> set[str]:
    """The head of that name, or all that have the verb of that name."""
    verb = getattr(Policy, stated, None)
    if verb is None:
        return {stated}
    return {head for head, (name, _) in HEADS.items() if getattr(POLICIES[name], stated) is not verb} - RECURRENT


ALLOWED: dict[str, set[str]] = {name: trained_heads(name) for name in ALGORITHMS}
"""Algorithm -> keys of the policies it trains; empty for algorithms of text, which train policy=text alone."""

SMALL: dict[str, Any] = {"hidden": (16,), "transformer_width": 16, "transformer_layers": 1, "width": 16, "layers": 1}
SETTINGS = {
    "batch_size": 16,
    "offline_batch": 16,
    "scenarios": 8,
    "decisions": 4,
    "utd": 0.25,
    "actor_delay": 1,
    "discriminator_delay": 1,
    "epochs": 1,
    "q_epochs": 1,
    "group_size": 2,
    "forks": 1,
    "vines": 3,
    "members": 2,
    "n_step": 4,
    "candidates": 4,
    "top": 2,
    "ascent_steps": 2,
    "edits": 2,
    "cells": 16,
    "mutants": 3,
    "climbers": 2,
    "actors": 2,
    "population": 8,
    "critic_steps": 2,
    "climb_steps": 2,
}


@dataclass(frozen=True)
class Outcome:
    """What came of one pair."""

    reason: str | None  # why it was refused; None if it ran
    metrics: Mapping[str, float]  # of the update


def policy_of(head: str, spec: PolicySpec = SPEC) -> Policy:
    """A tiny policy of one of `HEADS`, its normalisers fitted."""
    name, settings = HEADS[head]
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
def workplace() -> Iterator[Path]:
    """A folder with a checkpoint of every head and a small dataset."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        torch.manual_seed(0)
        for owner, spec in {"": SPEC, **SPECS}.items():
            for head in HEADS:
                policy = policy_of(head, spec)  # a recurrent one adds its memory to what it sees
                obs = {key: torch.randn(4, 1, *shape) for key, shape in policy.spec.observation.items()}
                save_checkpoint(place / owner / head, policy, task=TASKS.get(owner, TASK), obs_sample=obs)
        _write_dataset(place / "data")
        yield place


def try_pair(place: Path, algorithm: str, head: str) -> Outcome:
    """Build `algorithm` around `head` from files in `place` and let it play and learn once."""
    try:
        with opened(place, algorithm, head) as parts:
            return Outcome(None, parts.algorithm.update(parts.source.next(parts.algorithm)))
    except UserError as error:
        return Outcome(str(error), {})


@contextmanager
def opened(place: Path, algorithm: str, head: str, device: str = "cpu") -> Iterator[Parts]:
    """`algorithm` around `head` from files in `place`, ready to play and learn on `device`.

    Raises:
        UserError: They do not go together.
    """
    kind = ALGORITHMS[algorithm]
    config_class = kind.config_class
    default = config_class()
    chosen = {key: value for key, value in SETTINGS.items() if getattr(default, key, 0)}  # what is off stays off
    learns_from_data = kind.data_source == "dataset" or kind.needs_dataset
    config = TrainConfig(
        algorithm={"name": algorithm, **to_plain(config_class(**chosen))},
        task=TaskConfig(name=TASKS.get(algorithm, TASK)),
        sim=SimConfig(num_envs=4),
        budget=BudgetConfig(updates=4),
        replay=ReplayConfig(capacity=2000, warmup_steps=60),
        evaluation=EvaluationConfig(episodes=0),
        init_from=str(place / (algorithm if algorithm in SPECS else "") / head),
        dataset=str(place / "data") if learns_from_data else "",
        device=device,
    )
    parts = build(complete(config))
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
