"""Offline learning from data of mixed quality: seven learners on one point-mass dataset, without interaction.

    python -m benchmarks.offline --quick            # three learners, one seed, few updates, nothing written
    python -m benchmarks.offline                    # everything missing; about half a CPU minute a cell, 10 in all
    python -m benchmarks.offline --seeds 0 1 2 --jobs 2

600 episodes: one fifth steers to the goal, two fifths steer to the opposite point, two fifths act at random. The data
holds the executed, noisy actions and the shaped reward: minus a tenth of the distance, plus 1 at the goal.
Every learner sees the same dataset and trains a squashed Gaussian of the same size with chunks of two actions; seeds
differ in weights and minibatches. The last checkpoints are evaluated on the same 200 held-out episodes.

Settings are the defaults with small networks and batches for all, and these exceptions: squared error replaces the
likelihood in imitation, because many actions are on their bounds; IQL has its published settings for stitching; Cal-QL
has its weight for dense rewards, fewer samples and the other learners' actor learning rate; the critics of the three
TD3 variants have LayerNorm. Reward and data (more of it, a larger good share) were chosen on seed 0, so that the
learners differ. The task is small: the table shows that the parts work and the effect of the regularisers, not which
learner is best.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.finetune.bases import HELD_OUT, held_out
from benchmarks.parallel import run_cells
from benchmarks.study import train_to_end
from benchmarks.themes import contributed
from robopolicy.data.collect import collect
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.evaluation.actors import RandomExpert
from robopolicy.evaluation.intervals import student_mean, wilson
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASK = "toy/point_mass"
WORK = Path("runs/offline")
DATA = WORK / "mixed"
OFFLINE = ("replay.offline_updates={updates}", "algorithm.critic.hidden=[128,128]")
IMITATION = "policy.imitation=mse"  # many actions are on their bounds, where the tanh density ends
METHODS: dict[str, tuple[str, ...]] = {
    "bc": (IMITATION,),
    "iql": (*OFFLINE, IMITATION, "algorithm.beta=10", "algorithm.implicit.expectile=0.9"),
    "cal_ql": (
        *(*OFFLINE, "algorithm.lr=3e-4", "algorithm.candidates=4"),
        *("algorithm.conservative.weight=1", "algorithm.conservative.samples=4"),
    ),
    "td3_bc": (*OFFLINE, "algorithm.critic.layer_norm=true"),
    **{name: tuple(settings) for name, settings in contributed("offline", "methods").items()},
}
"""Algorithm -> settings in addition to the shared ones; `{updates}` is the budget.

Contrib themes add entries by `[offline.methods]`: name -> settings.
"""

Key = tuple[str, int]  # method, seed


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


def make_dataset() -> None:
    """Collect the dataset unless it exists."""
    if DATA.exists():
        return
    unfinished = DATA.with_name(f"{DATA.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    seed = 100_000
    with (
        closing(make_sim(TASK, SimOptions(num_envs=16, reward="shaped"))) as sim,
        LeRobotWriter(unfinished, control_dt=sim.spec.control_dt) as writer,
    ):
        for part in BEHAVIOURS:
            settings: dict[str, Any] = {"noise": part.noise, "only_success": False, "behaviour": part.name}
            seed += collect(sim, part.make(), writer, episodes=part.episodes, seed=seed, **settings).attempts
    unfinished.rename(DATA)


def run(key: Key, updates: int) -> dict[str, Any]:
    """Run one cell."""
    torch.set_num_threads(1)
    method, seed = key
    own = [setting.format(updates=updates) for setting in METHODS[method]]
    folder = WORK / f"{method}-{seed}-{updates}"
    last = train_to_end(
        folder,
        *(f"task={TASK}", "task.reward=shaped", f"dataset={DATA}", f"algorithm={method}", "policy=squashed_gaussian"),
        *("algorithm.batch_size=128", "policy.hidden=[128,128]", "chunk.horizon=2", "chunk.action_horizon=2", *own),
        *("evaluation.episodes=0", f"budget.updates={updates}", f"checkpoint_every={updates}", f"seed={seed}"),
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    result = held_out(last, TASK)
    assert result.success is not None
    return {
        "method": method,
        "seed": seed,
        "updates": updates,
        "success": result.success.astype(int).tolist(),
        "steps": result.lengths.astype(int).tolist(),
        "seconds": round(report["seconds"], 1),
    }


def rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """One row per method, seeds pooled."""
    table: list[dict[str, object]] = []
    for method in METHODS:
        found = [cell for cell in cells if cell["method"] == method]
        if not found:
            continue
        success = np.concatenate([cell["success"] for cell in found])
        steps = [float(np.mean(cell["steps"])) for cell in found]
        row: dict[str, object] = {
            "method": method,
            "seeds": len(found),
            "success [95 %]": f"{wilson(int(success.sum()), len(success)):.1%}",
            "by seed": " ".join(f"{np.mean(cell['success']):.0%}" for cell in found),
            "steps per episode [95 %]": f"{student_mean(steps):.1f}" if len(steps) > 1 else f"{steps[0]:.1f}",
            "ms per update": round(1000 * float(np.mean([c["seconds"] / c["updates"] for c in found])), 1),
        }
        table.append(row)
    return table


def _name(key: Key) -> str:
    return f"offline/{key[0]}-point_mass-{key[1]}"


def _progress(cell: dict[str, Any]) -> str:
    return f"{np.mean(cell['success']):.1%} in {cell['seconds']:.0f} s"


def main() -> None:
    """Run every missing cell, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="three learners, one seed, few updates, no results written"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    arguments = parser.parse_args()
    keys = [(method, seed) for seed in arguments.seeds for method in arguments.methods]
    if arguments.quick:
        keys = [("bc", 0), ("iql", 0), ("td3_bc", 0)]
    cells = run_cells(
        keys,
        partial(run, updates=200 if arguments.quick else 4000),
        name=_name,
        progress=_progress,
        jobs=arguments.jobs,
        keep=not arguments.quick,
        prepare=lambda missing: make_dataset() if missing else None,
    )
    if not arguments.quick:  # the table shows all finished cells
        cells = finished_cells(_name((method, seed)) for seed in range(100) for method in METHODS)
    figures = {"task": "point mass, mixed data", "held_out": HELD_OUT, "cells": cells}
    print_result("offline", rows(cells), figures)
    if not arguments.quick:
        write_result("offline", rows(cells), figures, command="python -m benchmarks.offline")


if __name__ == "__main__":
    main()
