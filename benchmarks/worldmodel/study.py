"""Policies of graded quality: their values and order in a learned world model, and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Row
from benchmarks.study import Cell, Contrast, Key, Score, Study
from benchmarks.worldmodel.table import (
    CORRELATIONS,
    METRICS,
    SIGNED,
    gap,
    grouped,
    policy_rows,
    seconds_per_episode,
    success,
)
from benchmarks.worldmodel.tasks import ABLATIONS, EVERY_TASK, SMALL, TASKS
from robopolicy.evaluation.comparison import Outcomes
from robopolicy.evaluation.intervals import Interval, correlation_mean

SEEDS = (2, 4, 5)  # recordings and state network were chosen with seeds 0, 1 and 3
MODEL = "world model"


@dataclass(frozen=True)
class WorldModel(Study):
    """Pearson's correlation of predicted and true success over the policies, with new recordings for every seed.

    Every policy has 100 held-out starts in the simulator and in the world model, and 50 of its real episodes are
    replayed in the world model. The recordings contain none of the ranked policies.
    """

    name = "worldmodel"
    question = "Does a learned world model order policies correctly?"
    priority = 15
    percent = frozenset()
    small: bool = False  # three policies of one small world, as a smoke test

    @property
    def tasks(self) -> list[str]:
        """Worlds, and ablations of them."""
        return [SMALL.name] if self.small else [*TASKS, *ABLATIONS]

    @property
    def methods(self) -> list[str]:
        """The world model."""
        return [MODEL]

    def cell_keys(self) -> list[Key]:
        """Every policy of the tasks, seed by seed, then of the ablations with one seed."""
        if self.small:
            return [(SMALL.name, policy, 0) for policy in SMALL.policies]
        full: list[Key] = [
            (name, policy, seed) for seed in SEEDS for name, task in TASKS.items() for policy in task.policies
        ]
        return full + [(name, policy, SEEDS[0]) for name, task in ABLATIONS.items() for policy in task.policies]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """The task; it has a cell per policy."""
        return [(MODEL, str(key[0]))]

    def run(self, key: Key, folder: Path) -> Cell:
        """Evaluate one policy in the simulator and in the world model."""
        from benchmarks.worldmodel.cell import run_cell

        return run_cell(EVERY_TASK[str(key[0])], str(key[1]), int(key[2]))

    def scores(self, cell: Cell) -> list[Score]:
        """A single policy has no order."""
        return []

    def all_scores(self, cells: Sequence[Cell]) -> list[Score]:
        """Agreement with the simulator, of every task and seed with all its policies."""
        found: list[Score] = []
        for task, seeds in grouped(cells).items():
            for seed, members in seeds.items():
                if len(members) < len(EVERY_TASK[task].policies):
                    continue
                sides = [np.array([success(cell, side) for cell in members]) for side in ("real", "predicted")]
                agreement = {name: metric(*sides) for name, metric in METRICS.items()}
                found.append(Score(MODEL, task, seed, agreement, cell={**agreement, "members": members}))
        return found

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """No comparison: the table states values."""
        return ()

    def interval(self, measure: str, outcomes: Outcomes) -> Interval:
        """Correlations have an interval within [-1, 1]."""
        if measure in CORRELATIONS:
            return correlation_mean([float(np.asarray(values).mean()) for values in outcomes.values()])
        return super().interval(measure, outcomes)

    def bounds(self, measure: str) -> tuple[float, float]:
        """Correlations and differences of success rates are from -1 to 1, other metrics from 0 to 1."""
        return (-1.0, 1.0) if measure in SIGNED else (0.0, 1.0)

    def is_current(self, cell: Cell) -> bool:
        """Cells of other recordings or another training run again."""
        task = EVERY_TASK.get(cell["task"])
        return task is not None and all(cell.get(name) == value for name, value in task.facts().items())

    def describe(self, cell: Cell) -> str:
        """True and predicted success."""
        return f"real {success(cell, 'real'):.2f}, predicted {success(cell, 'predicted'):.2f}"

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Other metrics with their intervals, the sensitivity to actions, and the time of an episode."""
        seeds = {score.seed: score.cell["members"] for score in scores}
        others = [name for name in METRICS if name != "pearson"]
        return {
            "policies": len(next(iter(seeds.values()))),
            **{name: f"{self.interval(name, {s.seed: s.cell[name] for s in scores})}" for name in others},
            "gap": gap(seeds),
            "s/episode, real / model": seconds_per_episode([cell for each in seeds.values() for cell in each]),
        }

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Meaning of the further columns."""
        found = [
            "`mmrv` is the mean maximum violation of the order, 0 for none; `pairs` is the share of pairs in the true "
            "order; `regret` is the success lost by the policy that the model prefers. `bias` is predicted minus true "
            "success, mean over the policies; `best policy` is the same of the truly best one. `gap` is the loss of "
            "PSNR, one frame ahead, if actions are shuffled.",
        ]
        ablations = [
            "`lift-*` are ablations: fewer recordings (`few`), none of clones or replays, none after success "
            "(`to-success`), no noise on the past (`exact-past`), a state network of one step (`one-step`), and a "
            "success head without calibration (`uncalibrated`). They are to be compared on common seeds.",
        ]
        return found + ablations if any("-" in score.task for score in scores) else found

    def tables(self, cells: Sequence[Cell]) -> Mapping[str, Sequence[Row]]:
        """One row per policy."""
        return {"worldmodel_policies": policy_rows(cells)}

    def quick(self) -> WorldModel:
        """Three policies of one small world."""
        return WorldModel(small=True)


STUDY = WorldModel()
