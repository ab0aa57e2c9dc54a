"""Studies of one task: a policy cloned from demonstrations, before and after fine-tuning with ReinFlow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import ArrayLike

from benchmarks.study import Cell, Contrast, Key, Score, Study, read_report, run_command, train_to_end

SEEDS = range(1, 6)  # the presets were chosen with seed 0
NULL_SEEDS = range(6, 11)  # further clones, for the null arm
BASE, TUNED = "flow", "reinflow"


@dataclass(frozen=True)
class BeforeAfter(Study):
    """Collect demonstrations, clone them, fine-tune the clone, and evaluate both policies on held-out episodes."""

    task: ClassVar[str]
    label: ClassVar[str]  # of the task in the table
    measure: ClassVar[str]
    collecting: ClassVar[Sequence[str]]  # further words of `robopolicy collect`
    cloning: ClassVar[str]  # experiment
    tuning: ClassVar[str]  # experiment
    settings: ClassVar[Sequence[str]]  # of both trainings
    priority = 20
    demonstrations: int = 40
    cloning_updates: int = 2500
    tuning_updates: int = 30
    seeds: tuple[int, ...] = tuple(SEEDS)
    null_seeds: tuple[int, ...] = tuple(NULL_SEEDS)

    @abstractmethod
    def evaluate(self, checkpoint: Path) -> dict[str, Any]:
        """Held-out result of a policy."""

    @abstractmethod
    def outcomes(self, result: Mapping[str, Any]) -> ArrayLike:
        """Outcomes of the episodes of a held-out result, or their mean."""

    @abstractmethod
    def short(self, result: Mapping[str, Any]) -> str:
        """A held-out result in a few characters."""

    @property
    def tasks(self) -> list[str]:
        """The task."""
        return [self.label]

    @property
    def methods(self) -> list[str]:
        """The cloned policy, and the fine-tuned one."""
        return [BASE, TUNED]

    def cell_keys(self) -> list[Key]:
        """One cell per seed; cells of the null arm have only a cloned policy."""
        tuned: list[Key] = [(TUNED, self.label, seed) for seed in self.seeds]
        return tuned + [(BASE, self.label, seed) for seed in self.null_seeds]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """Every cell has a cloned policy."""
        return [(method, self.label) for method in dict.fromkeys((BASE, str(key[0])))]

    def facts(self, key: Key, folder: Path) -> Cell:
        """The seed, and the result of its clone."""
        seed, data = int(key[2]), folder / "data"
        if not data.exists():
            size = ("--episodes", str(self.demonstrations), "--seed", str(100_000 + 1_000 * seed))
            run_command("collect", self.task, *size, *self.collecting, "--out", str(data))
        words = (f"experiment={self.cloning}", f"dataset={data}", f"budget.updates={self.cloning_updates}")
        return {"seed": seed, "base": self.evaluate(train_to_end(folder / "base", *words, *self._common(seed)))}

    def run(self, key: Key, folder: Path) -> Cell:
        """Fine-tune the clone of a seed, and evaluate the result."""
        if key[0] == BASE:
            return {}
        tuned, start = folder / "finetuned", folder / "base" / "checkpoints" / "last"
        words = (f"experiment={self.tuning}", f"init_from={start}", f"budget.updates={self.tuning_updates}")
        last = train_to_end(tuned, *words, *self._common(int(key[2])))
        report = read_report(tuned)
        return {
            "finetuned": self.evaluate(last),
            "env_steps": report["env_steps"],
            "seconds": round(report["seconds"], 1),
        }

    def scores(self, cell: Cell) -> list[Score]:
        """The measure before and after."""
        found = {BASE: cell["base"], TUNED: cell.get("finetuned")}
        return [
            Score(method, self.label, cell["seed"], {self.measure: self.outcomes(result)}, cell=cell)
            for method, result in found.items()
            if result is not None
        ]

    def failure(self, task: str) -> dict[str, ArrayLike]:
        """No success, or no return."""
        return {self.measure: 0.0}

    def failures(self, cell: Cell) -> list[Score]:
        """The failure of fine-tuning, and the result of the clone."""
        return [*self.scores(cell), *(score for score in super().failures(cell) if score.method == TUNED)]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """The fine-tuned policy with the cloned one."""
        return (Contrast(BASE, self.measure),) if method == TUNED else ()

    def describe(self, cell: Cell) -> str:
        """The measure before and after."""
        return " -> ".join(self.short(cell[stage]) for stage in ("base", "finetuned") if stage in cell)

    def _common(self, seed: int) -> tuple[str, ...]:
        """Settings of both trainings."""
        return (f"seed={seed}", "threads=1", *self.settings)
