"""Fine-tuning: every method from the same cloned checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from numpy.typing import ArrayLike

from benchmarks.finetune.methods import BASES, DIFFUSION, FLOW, METHODS, notes
from benchmarks.finetune.tasks import MAIN, TASKS
from benchmarks.study import Cell, Contrast, Key, Score, Study
from robopolicy.evaluation.comparison import binary_outcomes

NULL_SEEDS = range(101, 106)  # further clones of the demonstrations, for the null arm


@dataclass(frozen=True)
class FineTuning(Study):
    """Demonstrations, a cloned base, fine-tuning, and 200 held-out episodes of base and result.

    The result is the best checkpoint by the run's own evaluations in other episodes. It falls back to its base if it
    falls short of it in fresh episodes, as `robopolicy train` does by default, so a result can equal its base; the
    table in `benchmarks/results` also has the last checkpoint. A verdict compares the result with its base: methods
    without a base are compared with the clone of the same demonstrations. A run that diverges counts as success, or
    return, 0.
    """

    name = "finetune"
    question = "Which fine-tuner improves a cloned policy, and by how much?"
    priority = 5
    falls_back = True
    steps: int = 0  # environment steps of the smoke test; 0: the task's number
    only: tuple[Key, ...] = ()  # cells of the smoke test; empty: all

    @property
    def tasks(self) -> list[str]:
        """Manipulation and locomotion."""
        return list(TASKS)

    @property
    def methods(self) -> list[str]:
        """Cloned bases and fine-tuners."""
        return [*BASES, *METHODS]

    def cell_keys(self) -> list[Key]:
        """Clones for the null arm, the main tasks, the others, and rows with published update ratios."""
        if self.only:
            return list(self.only)
        null: list[Key] = [
            (base.name, task, seed) for base in (FLOW, DIFFUSION) for task in TASKS for seed in NULL_SEEDS
        ]
        tuned: list[Key] = [
            (method.name, task, seed)
            for method in METHODS.values()
            for task in method.tasks
            for seed in method.seeds(task)
        ]
        return [*null, *sorted(tuned, key=_turn)]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """The method, and the base that it fine-tunes."""
        name, task = str(key[0]), str(key[1])
        base = METHODS[name].base if name in METHODS else None
        return [(name, task), *([(base.name, task)] if base else [])]

    def facts(self, key: Key, folder: Path) -> Cell:
        """Settings, and the result of the base."""
        from benchmarks.finetune.cell import facts

        name, task, seed = str(key[0]), TASKS[str(key[1])], int(key[2])
        return {} if name in BASES else facts(METHODS[name], task, seed, steps=self.steps or None)

    def run(self, key: Key, folder: Path) -> Cell:
        """Fine-tune and evaluate one method."""
        from benchmarks.finetune.cell import run_base, run_cell

        name, task, seed = str(key[0]), TASKS[str(key[1])], int(key[2])
        if name in BASES:
            return run_base(BASES[name], task, seed)
        return run_cell(METHODS[name], task, seed, folder, steps=self.steps or None)

    def is_current(self, cell: Cell) -> bool:
        """Fine-tuned cells with another preset or other settings run again."""
        from benchmarks.finetune.cell import plan

        if cell["method"] in BASES:
            return True
        method = METHODS.get(cell["method"])
        if method is None or cell.get("preset") != method.preset():
            return False
        return cell["settings"] == plan(method, TASKS[cell["task"]], self.steps or None, cell["base"])

    def scores(self, cell: Cell) -> list[Score]:
        """Success, or the return, of the result and of its base."""
        method, task, seed = cell["method"], cell["task"], cell["seed"]
        found: list[Score] = []
        if cell["base"] is not None:
            base = METHODS[method].base if method in METHODS else BASES.get(method)
            found += [Score(base.name, task, seed, _measures(cell["base"]))] if base else []
        if "finetuned" in cell:
            curve = cell.get("curve", ())
            found.append(Score(method, task, seed, _measures(cell["finetuned"]), curve=curve, cell=cell))
        return found

    def failure(self, task: str) -> dict[str, ArrayLike]:
        """No success, or no return."""
        return {TASKS[task].measure: 0.0}

    def failures(self, cell: Cell) -> list[Score]:
        """The failure of the method, and the result of its base."""
        return [*self.scores(cell), *(score for score in super().failures(cell) if score.method == cell["method"])]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Every result with its base."""
        if method in BASES or task not in TASKS:
            return ()
        base = METHODS[method].base or FLOW
        return (Contrast(base.name, TASKS[task].measure),)

    def describe(self, cell: Cell) -> str:
        """Scores before and after."""
        before, after = (_score(cell.get(stage)) for stage in ("base", "finetuned"))
        return f"{before} -> {after}"

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Last checkpoint, steps to 90 %, seconds, and network calls."""
        cells = [score.cell for score in scores if score.cell]
        if not cells:
            return {"last": "-", "steps to 90 %": "-", "seconds": "-", "updating s": "-", "network calls": "-"}
        key = "return_mean" if cells[0]["last"]["success"] is None else "success"
        last = fmean(cell["last"][key] for cell in cells)
        return {
            "last": f"{last:.1%}" if key == "success" else f"{last:.0f}",
            "steps to 90 %": _steps(cells) if key == "success" else "-",
            "seconds": round(median(cell["seconds"] for cell in cells)),
            "updating s": round(median(cell["seconds_updating"] for cell in cells), 1),
            "network calls": round(cells[0]["finetuned"]["network_calls_per_action"], 2),
        }

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Tasks, bases and budgets."""
        return notes()

    def quick(self) -> FineTuning:
        """Two methods on lift."""
        return FineTuning(steps=10_000, only=(("reinflow", "lift", 0), ("dsrl_na", "lift", 0)))


STUDY = FineTuning()


def _turn(key: Key) -> tuple[bool, int, int]:
    """Order in which cells run."""
    place = MAIN.index(str(key[1])) if key[1] in MAIN else len(MAIN)
    return METHODS[str(key[0])].published, place, int(key[2])


def _measures(summary: dict[str, Any]) -> dict[str, ArrayLike]:
    if summary["success"] is None:
        return {"return": summary["return_mean"]}
    return {"success": binary_outcomes(summary["success"], summary["n"])}


def _score(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "-"
    return f"{summary['return_mean']:.0f}" if summary["success"] is None else f"{summary['success']:.1%}"


def _steps(cells: Sequence[Cell]) -> str:
    """Median steps to the goal over seeds, and the number of seeds that reach it."""
    found = [math.inf if cell["steps_to_goal"] is None else cell["steps_to_goal"] for cell in cells]
    middle = median(found)
    text = f"{middle:,.0f}" if math.isfinite(middle) else f"> {median(cell['env_steps'] for cell in cells):,.0f}"
    return f"{text} ({sum(map(math.isfinite, found))} of {len(found)})"
