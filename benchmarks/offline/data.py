"""The dataset: one fifth of its episodes steers to the goal, two fifths to the opposite point, two fifths anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.study import shared
from robopolicy.data.collect import collect
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.evaluation.actors import RandomExpert
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASK = "toy/point_mass"
FIRST_SEED = 100_000  # of the episodes


@dataclass(frozen=True)
class Behaviour:
    """Behaviour policy of a part of the data."""

    name: str
    episodes: int
    noise: float  # fraction of the action range
    make: Callable[[], Any]


def opposite(sim: VectorSim, obs: Observation) -> Tensor:
    """Steer to the point opposite of the goal."""
    state = obs["state"].clone()  # (N, 6) position, velocity, goal
    state[:, 4:] *= -1
    return get_task(TASK).require_expert()()(sim, {"state": state})


BEHAVIOURS = (
    Behaviour("expert", 120, 0.3, lambda: get_task(TASK).require_expert()()),
    Behaviour("opposite", 240, 0.3, lambda: opposite),
    Behaviour("random", 240, 0.0, lambda: RandomExpert()),
)


def dataset(folder: Path) -> Path:
    """The dataset with executed, noisy actions and shaped rewards, collected unless it exists."""
    with shared(folder):
        if not folder.exists():
            _collect(folder)
    return folder


def _collect(folder: Path) -> None:
    """Write the episodes; an interrupted collection leaves no dataset."""
    seed = FIRST_SEED
    with (
        closing(make_sim(TASK, SimOptions(num_envs=16, reward="shaped"))) as sim,
        LeRobotWriter(folder, control_dt=sim.spec.control_dt) as writer,
    ):
        for part in BEHAVIOURS:
            settings: dict[str, Any] = {"noise": part.noise, "only_success": False, "behaviour": part.name}
            seed += collect(sim, part.make(), writer, episodes=part.episodes, seed=seed, **settings).attempts
