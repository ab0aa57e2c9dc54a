"""Studies: a declaration of cells and contrasts, from which come the queue's jobs, the table and its verdicts.

A study names its cells and how one runs. Everything else is common to all studies: cells that survive interruptions,
intervals and tests over training seeds, Holm's correction, the null arm, published numbers, and the command line.

Cells are compared with today's settings by `current`; whoever changes what a method computes deletes its cells.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from inspect import cleandoc
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from numpy.typing import ArrayLike

from benchmarks import common
from benchmarks.study_settings import changed, recorded
from robopolicy.errors import UserError
from robopolicy.evaluation.comparison import Outcomes, seed_interval
from robopolicy.evaluation.intervals import Interval
from robopolicy.training.guards import TrainingDiverged
from robopolicy.training.queue import Job, QueueFolder, QueueReport, locked, run_queue

Key = tuple[str | int, ...]  # of a cell; the last part is the training seed
Cell = dict[str, Any]
WORK = Path("runs/queue")
LOWEST_PRIORITY = 19  # niceness: the queue leaves the machine to everything else
ALL = "all tasks"  # task of scores that are means over the tasks


@dataclass(frozen=True)
class Score:
    """Outcomes of one method on one task with one training seed."""

    method: str
    task: str
    seed: int
    measures: Mapping[str, ArrayLike]  # measure -> outcomes of the episodes, or one number
    diverged: bool = False
    reason: str = ""  # why the method could not act in this cell, found while it ran
    curve: Sequence[tuple[float, float]] = ()  # steps and score while training
    cell: Cell = field(default_factory=dict)


@dataclass(frozen=True)
class Contrast:
    """A comparison of the table."""

    baseline: str  # method
    measure: str
    larger: bool = True  # whether larger is better


@dataclass(frozen=True)
class Published:
    """A published score at the same setting."""

    value: float
    source: str  # key in `docs/references.bib`
    low: float | None = None  # published interval
    high: float | None = None
    margin: float | None = None  # how far below counts as reproduction; None: 10 % of a value without an interval

    @property
    def interval(self) -> Interval:
        """The published value and its interval, which is often not stated."""
        low, high = (math.nan if bound is None else bound for bound in (self.low, self.high))
        return Interval(self.value, low, high, 0)

    @property
    def reached_at(self) -> float:
        """Lowest score that counts as reproduction."""
        default = 0.1 * abs(self.value) if self.low is None else 0.0
        return (self.value if self.low is None else self.low) - (default if self.margin is None else self.margin)


class Study(ABC):
    """One question, its cells and its contrasts. Instances are pickled, so their fields are plain values."""

    name: ClassVar[str]  # of the table, and of the folder of its cells
    question: ClassVar[str]
    priority: ClassVar[int] = 10  # of its cells in the queue; lower starts first
    curve_unit: ClassVar[str] = "environment steps"  # of the horizontal axis of learning curves
    percent: ClassVar[frozenset[str]] = frozenset({"success", "accuracy"})  # measures that are shown in percent
    paired: ClassVar[bool] = True  # whether runs of one seed share data or an initial policy
    falls_back: ClassVar[bool] = False  # whether a run can end with its baseline, so that equal outcomes are a result
    pooled: ClassVar[bool] = False  # verdicts over all tasks together, from `normalised` scores

    @property
    def description(self) -> str:
        """What the study measures: the docstring of its class."""
        return cleandoc(type(self).__doc__ or "")

    @property
    @abstractmethod
    def tasks(self) -> list[str]:
        """Tasks of the table, in its order."""

    @property
    @abstractmethod
    def methods(self) -> list[str]:
        """Rows of a task, in their order."""

    @abstractmethod
    def cell_keys(self) -> list[Key]:
        """Keys of all cells, the null arm included, in the order in which they run."""

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """Rows (method, task) to which a cell adds its seed; studies override it whose keys have other names."""
        return [(str(key[0]), str(key[1]))]

    def planned(self, method: str, task: str) -> int:
        """Number of seeds that a row is to have.

        Raises:
            ValueError: The study has no such method or task, or a key names a row that does not exist.
        """
        seeds: dict[tuple[str, str], set[str | int]] = {(m, t): set() for m in self.methods for t in self.tasks}
        for key in self.cell_keys():
            for row in self.rows(key):
                if row not in seeds:
                    raise ValueError(f"{self.name} has no row {row}, which its cell {key} names.")
                seeds[row].add(key[-1])
        tasks = self.tasks if task == ALL else [task]
        if method not in self.methods or not set(tasks) <= set(self.tasks):
            raise ValueError(f"{self.name} has no row {(method, task)}.")
        return len(set.intersection(*(seeds[method, each] for each in tasks)))

    def facts(self, key: Key, folder: Path) -> Cell:
        """Names and settings of a cell, and what it knows before its training: all that is left if this diverges.

        Without facts, a cell whose training diverges fails.
        """
        return {}

    @abstractmethod
    def run(self, key: Key, folder: Path) -> Cell:
        """Run one cell in a folder that survives interruptions; returns what is not among its facts."""

    def trainings(self, key: Key) -> Mapping[str, Sequence[str]]:
        """Arguments of `robopolicy train` whose algorithms and policies a cell records, by run."""
        return {}

    @abstractmethod
    def scores(self, cell: Cell) -> list[Score]:
        """What a cell says about methods."""

    def failure(self, task: str) -> dict[str, ArrayLike]:
        """Measures of a run that diverged; all others have no value."""
        return {"success": 0.0}

    def failures(self, cell: Cell) -> list[Score]:
        """What a cell says about methods if its training diverged."""
        *_, seed = cell["key"]
        return [Score(m, task, seed, self.failure(task), diverged=True) for m, task in self.rows(tuple(cell["key"]))]

    def all_scores(self, cells: Sequence[Cell]) -> list[Score]:
        """Scores of all cells; studies override it whose scores need several cells."""
        return [score for cell in cells for score in self.scores(cell)]

    @abstractmethod
    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Comparisons of a method on a task; empty for a baseline."""

    @abstractmethod
    def describe(self, cell: Cell) -> str:
        """One line about a finished cell."""

    @abstractmethod
    def quick(self) -> Study:
        """The same study with a few small cells, as a smoke test."""

    def cell_name(self, key: Key) -> str:
        """Place of a cell under `benchmarks/results/cells`."""
        return f"{self.name}/{'-'.join(map(str, key))}"

    def is_current(self, cell: Cell) -> bool:
        """Whether a finished cell has the settings of the study; `current` also compares its trainings."""
        return True

    def bounds(self, measure: str) -> tuple[float, float]:
        """Lowest and highest possible value of a measure, beyond which no interval reaches."""
        return (0.0, 1.0) if measure in self.percent else (-math.inf, math.inf)

    def interval(self, measure: str, outcomes: Outcomes) -> Interval:
        """Mean of a measure over the seeds with its 95 % interval."""
        return seed_interval(outcomes).within(*self.bounds(measure))

    def normalised(self, task: str, value: float) -> float:
        """A mean outcome on a scale that tasks share."""
        return value

    def published(self, method: str, task: str) -> Published | None:
        """Published score of a method on a task."""
        return None

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Further columns of a row, from the scores of its method."""
        return {}

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Lines below the table."""
        return []

    def tables(self, cells: Sequence[Cell]) -> Mapping[str, Sequence[common.Row]]:
        """Further tables by name."""
        return {}


def keys_named(keys: Sequence[Key], names: Sequence[str]) -> list[Key]:
    """The keys of cells with these names, without the name of the study; all without names."""
    return [key for key in keys if not names or "-".join(map(str, key)) in names]


def jobs(study: Study, cells: Path | None = None) -> list[Job]:
    """Jobs of all cells of a study, stored in the folder `cells` (default: the committed results)."""
    cells = cells or common.RESULTS / "cells"
    keys = study.cell_keys()
    spent: dict[Key, list[float]] = {}
    for key in keys:
        cell = _load(study, key, cells)
        if cell is not None and "seconds" in cell:
            spent.setdefault(key[:-1], []).append(cell["seconds"])
    return [
        Job(
            study.cell_name(key),
            partial(_run, study, key, cells),
            partial(_is_finished, study, key, cells),
            priority=study.priority,
            seconds=median(spent[key[:-1]]) if key[:-1] in spent else None,
            describe=partial(_describe, study, key, cells),
        )
        for key in keys
    ]


def finished(study: Study, cells: Path | None = None) -> list[Cell]:
    """All finished cells of a study, also of seeds that it no longer plans."""
    folder = (cells or common.RESULTS / "cells") / study.name
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [cell for cell in found if current(study, cell)]


def current(study: Study, cell: Cell) -> bool:
    """Whether a finished cell has the settings of today, defaults included if it recorded them; others run again."""
    if not study.is_current(cell):
        return False
    return "configs" not in cell or not changed(cell["configs"], study.trainings(tuple(cell["key"])))


def failed(study: Study, work: Path = WORK) -> list[str]:
    """Planned cells that failed in this folder of unfinished cells, each with its error."""
    place = QueueFolder(work)
    return [f"`{job.name}` ({place.failure(job)})" for job in jobs(study) if place.state(job) == "failed"]


def selected(jobs: Sequence[Job], patterns: Sequence[str]) -> list[Job]:
    """Jobs whose cell name matches one of the patterns, such as `ppo-hopper-*`; all without patterns.

    Raises:
        UserError: A pattern matches no cell.
    """
    for pattern in patterns:
        if not any(fnmatch(job.name.partition("/")[2], pattern) for job in jobs):
            raise UserError(f"No cell matches {pattern}; python -m benchmarks.queue --list prints their names.")
    return [job for job in jobs if not patterns or any(fnmatch(job.name.partition("/")[2], p) for p in patterns)]


def run_jobs(jobs: Sequence[Job], *, parallel: int, work: Path = WORK, retry_failed: bool = False) -> QueueReport:
    """Run the missing jobs at the lowest priority."""
    return run_queue(jobs, work, parallel=parallel, niceness=LOWEST_PRIORITY, retry_failed=retry_failed)


def train_to_end(folder: Path, *settings: str) -> Path:
    """Last checkpoint of the run `folder` with `settings`, started, resumed or complete.

    An interrupted run with other settings is deleted and starts again.

    Raises:
        UserError: The settings are invalid, or the run failed.
    """
    from robopolicy.training.build import resolve_config
    from robopolicy.training.compose import compose_config
    from robopolicy.training.many_runs import check_settings, run_to_end

    config = resolve_config(compose_config([*settings, f"out={folder.parent}", f"name={folder.name}"]))
    try:
        check_settings(config)
    except UserError:
        shutil.rmtree(folder)
    return run_to_end(config) / "checkpoints" / "last"


def read_report(run: Path) -> dict[str, Any]:
    """Report of a complete run: environment steps, seconds and counters."""
    return json.loads((run / "report.json").read_text(encoding="utf-8"))


def learning_curve(run: Path, *measures: str, by: str = "train/env_steps") -> list[tuple[int, float]]:
    """Environment steps, or `by`, and the first known of `measures`, such as `success`, of each evaluation of a run."""
    points: list[tuple[int, float]] = []
    steps = 0
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps = int(row.get(by, steps))
        score = next((row[f"eval/{measure}"] for measure in measures if f"eval/{measure}" in row), math.nan)
        if not math.isnan(score):
            points.append((steps, score))
    return points


def shared(folder: Path) -> AbstractContextManager[bool]:
    """Lock of an input of several cells: one process makes it while the others wait."""
    return locked(folder.with_name(f".{folder.name}.shared"))


def train_once(folder: Path, *settings: str) -> Path:
    """`train_to_end` of a run that several cells share."""
    with shared(folder):
        return train_to_end(folder, *settings)


def run_command(*words: str) -> None:
    """Run `robopolicy WORDS`.

    Raises:
        RuntimeError: The command failed.
    """
    from robopolicy.cli.main import main as robopolicy

    if robopolicy(list(words)) != 0:
        raise RuntimeError(f"robopolicy {' '.join(words)} failed.")


def _load(study: Study, key: Key, cells: Path) -> Cell | None:
    path = cells / f"{study.cell_name(key)}.json"
    if not path.exists():
        return None
    cell = json.loads(path.read_text(encoding="utf-8"))
    return cell if current(study, cell) else None


def _is_finished(study: Study, key: Key, cells: Path) -> bool:
    return _load(study, key, cells) is not None


def _run(study: Study, key: Key, cells: Path, folder: Path) -> None:
    common.save_json(cells / f"{study.cell_name(key)}.json", run_cell(study, key, folder))


def run_cell(study: Study, key: Key, folder: Path) -> Cell:
    """A complete cell: its facts and results, or the message of a training that diverged.

    Raises:
        TrainingDiverged: The study states no facts of its cells.
    """
    facts, configs, start = study.facts(key, folder), recorded(study.trainings(key)), time.perf_counter()
    try:
        results = study.run(key, folder)
    except TrainingDiverged as error:
        if not facts:
            raise
        results = {"diverged": str(error), "seconds": round(time.perf_counter() - start, 1)}
    stored = {"configs": configs} if configs else {}
    return {"key": list(key), **facts, **results, **stored, "made_on": common.made_on()}


def _describe(study: Study, key: Key, cells: Path) -> str:
    cell = _load(study, key, cells)
    return "" if cell is None else cell.get("diverged") or study.describe(cell)
