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

    def planned(self, method: str, task: str) -> int:
        """Every cell has a cloned policy."""
        return len(self.seeds) + (len(self.null_seeds) if method == BASE else 0)

    def run(self, key: Key, folder: Path) -> Cell:
        """Train and evaluate the policies of a seed."""
        seed, data, tuned = int(key[2]), folder / "data", folder / "finetuned"
        if not data.exists():
            size = ("--episodes", str(self.demonstrations), "--seed", str(100_000 + 1_000 * seed))
            run_command("collect", self.task, *size, *self.collecting, "--out", str(data))
        common = (f"seed={seed}", "threads=1", *self.settings)
        words = (f"experiment={self.cloning}", f"dataset={data}", f"budget.updates={self.cloning_updates}")
        start = train_to_end(folder / "base", *words, *common)
        if key[0] == BASE:
            return {"seed": seed, "base": self.evaluate(start)}
        words = (f"experiment={self.tuning}", f"init_from={start}", f"budget.updates={self.tuning_updates}")
        last = train_to_end(tuned, *words, *common)
        report = read_report(tuned)
        return {
            "seed": seed,
            "base": self.evaluate(start),
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

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """The fine-tuned policy with the cloned one."""
        return (Contrast(BASE, self.measure),) if method == TUNED else ()

    def describe(self, cell: Cell) -> str:
        """The measure before and after."""
        return " -> ".join(self.short(cell[stage]) for stage in ("base", "finetuned") if stage in cell)
