"""Compositions of two parents against the better of them, on tasks where both fail at times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.composition.cell import ITSELF, OPERATORS, PARENTS, SEARCHED, Settings, run_cell
from benchmarks.composition.tasks import TASKS
from benchmarks.study import Cell, Contrast, Key, Score, Study

SEEDS = range(5)
NULL_SEEDS = range(5, 10)  # further parents, for the null arm
BETTER = "better parent"  # of a seed, by the episodes of the search
PAIR, ALONE = "pair", "parents"  # kinds of cells
SUCCESS = "success"
SAME_PATH = 0.05  # disagreement of the parents below which a composition can change nothing
FULL = Settings()
QUICK = Settings(search_episodes=10, divisions=2, episodes=32, updates=200, rounds=5)


@dataclass(frozen=True)
class Compositions(Study):
    """Two parents, and compositions with fixed weights or with weights from a grid search with 50 episodes each.

    A cell is one task with one seed. The parents, their compositions, and a composition of the first parent with
    itself, trained again with another seed, run 200 episodes that neither training nor search uses. Meta-World has 50
    starts per task, so its held-out seeds repeat starts of the demonstrations; only the noise of the policies is new.
    """

    name = "composition"
    question = "Is a composition better than its parents?"
    curve_unit = "weight of the first parent"
    settings: Settings = FULL
    only: tuple[str, ...] = ()  # tasks of the smoke test, with one seed; empty: all

    @property
    def tasks(self) -> list[str]:
        """Pairs of different observations, heads, data, and training."""
        return list(TASKS)

    @property
    def methods(self) -> list[str]:
        """The parents and the compositions."""
        return [BETTER, *PARENTS, ITSELF, *OPERATORS]

    def cell_keys(self) -> list[Key]:
        """Seed by seed; the null arm last."""
        if self.only:
            return [(PAIR, task, 0) for task in self.only]
        pairs: list[Key] = [(PAIR, task, seed) for seed in SEEDS for task in TASKS]
        return pairs + [(ALONE, task, seed) for seed in NULL_SEEDS for task in TASKS]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """All rows of a task for a pair; only the parents in the null arm."""
        shown = self.methods if key[0] == PAIR else [BETTER, *PARENTS]
        return [(method, str(key[1])) for method in shown]

    def run(self, key: Key, folder: Path) -> Cell:
        """Train the parents, search and evaluate."""
        kind, task, seed = key
        return run_cell(TASKS[str(task)], int(seed), self.settings, folder, composed=kind == PAIR)

    def scores(self, cell: Cell) -> list[Score]:
        """Success of the held-out episodes."""
        better = PARENTS[int(np.argmax(cell["searched"]))]
        agree = max(cell.get("disagreement", [1.0])) < SAME_PATH
        reason = "the parents agree along the path" if agree else ""
        found = {BETTER: cell["held_out"][better], **cell["held_out"]}
        return [
            Score(
                method,
                cell["task"],
                cell["seed"],
                {SUCCESS: np.array(outcomes, float)},
                reason=reason if method in OPERATORS else "",
                curve=[(weight, float(np.mean(each))) for weight, each in cell.get("curves", {}).get(method, ())],
                cell=cell,
            )
            for method, outcomes in found.items()
        ]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Compositions with the better parent; the first parent with itself is compared with the first parent."""
        if method == ITSELF:
            return (Contrast(PARENTS[0], SUCCESS),)
        return (Contrast(BETTER, SUCCESS),) if method in OPERATORS else ()

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Weights and time of a composition, and the episodes that it gains and loses."""
        method, cells = scores[0].method, [score.cell for score in scores]
        gained, lost = (sum(column) for column in zip(*(_gained(cell, method) for cell in cells), strict=True))
        found = [cell.get("latency", {}).get("ratio", {}) for cell in cells]
        ratios = [ratio[method] for ratio in found if method in ratio]
        return {
            "weight of the first": " ".join(f"{cell['weights'][method][0]:.1f}" for cell in cells)
            if method in SEARCHED
            else "-",
            "gained / lost": f"{gained} / {lost}" if method in OPERATORS else "-",
            "time / parents": f"{median(ratios):.2f}" if ratios else "-",
        }

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Names of the parents, and their disagreement along the path of a sample."""
        lines: list[str] = []
        for task in TASKS:
            paths = [s.cell["disagreement"] for s in scores if s.task == task and s.method == OPERATOR]
            if paths:
                path, parents = np.mean(paths, 0), " and ".join(parent.label for parent in TASKS[task].parents)
                lines.append(
                    f"{task}: {parents}; their velocities differ by {path[0]:.0%} at noise and {path[-1]:.0%} at the "
                    "chunk, relative to the mean velocity."
                )
        return lines

    def describe(self, cell: Cell) -> str:
        """Success of all policies."""
        return ", ".join(f"{name} {np.mean(outcomes):.0%}" for name, outcomes in cell["held_out"].items())

    def quick(self) -> Compositions:
        """One small cell."""
        return Compositions(QUICK, ("lift",))


OPERATOR = next(iter(OPERATORS))  # whose scores carry the cells of pairs


def _gained(cell: Cell, method: str) -> tuple[int, int]:
    """Episodes in which only `method` succeeded, and in which it failed although both parents succeeded."""
    first, second = (np.array(cell["held_out"][parent], bool) for parent in PARENTS)
    found: Any = np.array(cell["held_out"].get(method, cell["held_out"][PARENTS[0]]), bool)
    return int((found & ~first & ~second).sum()), int((~found & first & second).sum())


STUDY = Compositions()
