"""Training from scratch: every learner against Stable-Baselines3, at equal environment steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from numpy.typing import ArrayLike

from benchmarks.control.methods import FAMILIES, METHODS, OFF_POLICY, ON_POLICY, Method, notes
from benchmarks.control.tasks import TASKS, ControlTask
from benchmarks.study import ALL, Cell, Contrast, Key, Score, Study, keys_named

SEEDS = range(5)
NULL_SEEDS = range(100, 105)  # further runs of the baselines, for the null arm


@dataclass(frozen=True)
class Control(Study):
    """Mean return of the last policy in 50 held-out episodes with deterministic actions.

    Verdicts compare the mean over the tasks, on the scale of D4RL's reference returns: 0 for random actions, 1 for an
    expert. A run that diverges has the score 0. Five seeds and small budgets find only large differences.
    """

    name = "control"
    question = "How do the learners from scratch compare with Stable-Baselines3 at small budgets?"
    pooled = True
    paired = False
    steps: tuple[tuple[str, int], ...] = ()  # environment steps by family, in place of the families' own
    only: tuple[str, ...] = ()  # cells `METHOD-TASK-SEED` of the smoke test; empty: all

    @property
    def learners(self) -> Mapping[str, Method]:
        """Baselines and learners by name."""
        return METHODS

    @property
    def robots(self) -> Mapping[str, ControlTask]:
        """Tasks by name."""
        return TASKS

    @property
    def tasks(self) -> list[str]:
        """Robots."""
        return list(self.robots)

    @property
    def methods(self) -> list[str]:
        """Baselines and learners."""
        return list(self.learners)

    def seeds(self, method: Method, task: str) -> Sequence[int]:
        """Training seeds of a learner on a task."""
        return (*SEEDS, *NULL_SEEDS) if method.is_baseline else (*SEEDS,)

    def cell_keys(self) -> list[Key]:
        """Every learner on every task, and more seeds of the baselines."""
        every = (
            (method, task, seed) for seed in (*SEEDS, *NULL_SEEDS) for task in self.robots for method in self.learners
        )
        chosen = [(m, task, seed) for m, task, seed in every if seed in self.seeds(self.learners[m], task)]
        return keys_named(chosen, self.only)

    def facts(self, key: Key, folder: Path) -> Cell:
        """Learner, robot, seed and budget."""
        name, task, seed = key
        family = self._method(str(name)).family
        return {"method": name, "family": family.name, "task": task, "seed": seed, "env_steps": family.env_steps}

    def trainings(self, key: Key) -> Mapping[str, Sequence[str]]:
        """Settings of our learners."""
        from benchmarks.control.cell import settings

        method = self._method(str(key[0]))
        return {} if method.is_baseline else {"run": settings(method, self.robots[str(key[1])], int(key[2]))}

    def run(self, key: Key, folder: Path) -> Cell:
        """Train and evaluate one learner."""
        from benchmarks.control.cell import run_cell

        name, task, seed = key
        return run_cell(self._method(str(name)), self.robots[str(task)], int(seed), folder)

    def scores(self, cell: Cell) -> list[Score]:
        """The return of the learner."""
        measures: dict[str, ArrayLike] = {"return": cell["return"]}
        return [Score(cell["method"], cell["task"], cell["seed"], measures, curve=cell["curve"], cell=cell)]

    def failure(self, task: str) -> dict[str, ArrayLike]:
        """The return of random actions, which has the score 0."""
        return {"return": self.robots[task].random}

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Every learner with the baseline of its family, over all tasks."""
        found = self.learners[method]
        compared = task == ALL and found.family.baseline and not found.is_baseline
        return (Contrast(found.family.baseline, "score"),) if compared else ()

    def normalised(self, task: str, value: float) -> float:
        """A return between 0 (random) and 1 (expert)."""
        return self.robots[task].score(value)

    def is_current(self, cell: Cell) -> bool:
        """Cells with another budget run again."""
        method = self.learners.get(cell["method"])
        return method is not None and cell["env_steps"] == self._method(cell["method"]).family.env_steps

    def describe(self, cell: Cell) -> str:
        """Return."""
        return f"return {cell['return']:.0f}"

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Family and seconds of training."""
        cells = [score.cell for score in scores if score.cell]
        return {
            "family": self.learners[scores[0].method].family.name,
            "seconds": round(median(cell["seconds"] for cell in cells)) if cells else "-",
        }

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Budgets, learners without a row, and notes on rows."""
        budgets = [f"{family.name}: {family.env_steps:,} environment steps." for family in FAMILIES]
        return [*budgets, *notes()]

    def quick(self) -> Control:
        """Hopper with two learners and two baselines."""
        few = ((ON_POLICY.name, 16_384), (OFF_POLICY.name, 2_000))
        return Control(few, tuple(f"{name}-hopper-0" for name in ("sb3_ppo", "ppo", "sb3_sac", "sac")))

    def _method(self, name: str) -> Method:
        method, steps = self.learners[name], dict[str, Any](self.steps)
        if method.family.name not in steps:
            return method
        return replace(method, family=replace(method.family, env_steps=steps[method.family.name]))


STUDY = Control()
