"""Table of a study: scores over training seeds, verdicts with Holm's correction, the null arm, published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import made_by_text, print_result, write_result
from benchmarks.study import ALL, Cell, Contrast, Published, Score, Study, failed
from robopolicy.evaluation.comparison import (
    MIN_SEEDS,
    NullRate,
    SeedRuns,
    TableVerdict,
    judge,
    null_rate,
)
from robopolicy.evaluation.intervals import Interval, student_mean

Part = tuple[str, str, str]  # task, baseline, measure
TESTS = {True: "a t-test paired over common seeds, which share data or an initial policy", False: "Welch's t-test"}
CURVE_POINTS = 21
PROTOCOL = (
    "Intervals (95 %) and tests count training seeds. A verdict compares a method with the baseline of its row by "
    "{test}, with Holm's correction over the table, from at least {seeds} seeds per side. Level: no difference found."
)

UNFINISHED = "Seeds `3 of 5`: the other planned cells have no result."
DIVERGED = "Seeds `5, 2 diverged`: runs that diverged count with the score of a failure."


@dataclass(frozen=True)
class Entry:
    """One method on one task, in one measure."""

    method: str
    task: str
    measure: str
    runs: SeedRuns
    score: Interval  # mean over seeds
    contrast: Contrast | None
    verdict: TableVerdict | None  # None without a contrast
    published: Published | None
    scores: tuple[Score, ...]

    bounds: tuple[float, float]  # of the measure
    planned: int  # seeds

    @property
    def seeds(self) -> str:
        """Number of seeds, of planned ones if they are more, and of runs that diverged if there are any."""
        count = f"{self.score.n} of {self.planned}" if self.planned > self.score.n else str(self.score.n)
        return f"{count}, {self.runs.diverged} diverged" if self.runs.diverged else count

    @property
    def reproduced(self) -> bool | None:
        """Whether the published score was reached; None with too few seeds, or where every score reaches it."""
        if self.published is None or self.score.n < MIN_SEEDS:
            return None
        if self.published.reached_at <= self.bounds[0]:
            return None
        return self.score.estimate >= self.published.reached_at

    def curve(self) -> list[list[float]]:
        """Mean score while training with its interval, as rows of position, mean, low and high.

        The curves of the seeds are interpolated to common positions within the range that all of them cover. There is
        none where a seed has no curve, as a run that diverged: a mean of the others would flatter the method.
        """
        curves = [np.asarray(score.curve, float) for score in self.scores if len(score.curve) > 1]
        if len(curves) < len(self.scores):
            return []
        first = max((curve[0, 0] for curve in curves), default=0.0)
        last = min((curve[-1, 0] for curve in curves), default=0.0)
        if first >= last:
            return []
        grid = np.linspace(first, last, CURVE_POINTS)
        means = np.stack([np.interp(grid, curve[:, 0], curve[:, 1]) for curve in curves])  # (seeds, points)
        shown = [student_mean(column).within(*self.bounds) for column in means.T]
        return [[float(x), each.estimate, each.low, each.high] for x, each in zip(grid, shown, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        published = self.published and {**self.published.interval.to_dict(), "source": self.published.source}
        return {
            "method": self.method,
            "task": self.task,
            "measure": self.measure,
            **self.score.to_dict(),
            "seeds": self.seeds,
            "by_seed": self.runs.means,
            "diverged": self.runs.diverged,
            "baseline": None if self.contrast is None else self.contrast.baseline,
            **({"verdict": None} if self.verdict is None else self.verdict.to_dict()),
            "published": published,
            "reproduced": self.reproduced,
            "curve": self.curve(),
        }


@dataclass(frozen=True)
class StudyTable:
    """All entries of a study and the null arm of its verdicts."""

    study: Study
    scores: tuple[Score, ...]
    entries: tuple[Entry, ...]
    null: NullRate | None
    covered: tuple[int, int]  # comparisons with a null arm, and all
    made_by: str  # sentence about the processors and versions of the cells
    missing: tuple[str, ...]  # planned methods without a score
    unrecorded: tuple[int, int]  # cells without the settings of their training, and all; zeros: the study records none

    def rows(self) -> list[dict[str, object]]:
        """One row per entry."""
        return [self._row(entry) for entry in self.entries]

    def figures(self) -> dict[str, Any]:
        """The same numbers for programs."""
        return {
            "question": self.study.question,
            "curve_unit": self.study.curve_unit,
            "seeds": sorted({score.seed for score in self.scores}),
            "null": None if self.null is None else self.null.to_dict(),
            "null_covers": self.covered,
            "entries": [entry.to_dict() for entry in self.entries],
        }

    def protocol(self) -> list[str]:
        """Sentences about intervals, verdicts and the null arm."""
        missing = [UNFINISHED] if any(entry.planned > entry.score.n for entry in self.entries) else []
        missing += [DIVERGED] if any(entry.runs.diverged for entry in self.entries) else []
        return [PROTOCOL.format(test=TESTS[self.study.paired], seeds=MIN_SEEDS), *missing, self.null_note()]

    def notes(self) -> list[str]:
        """Sentences of the study, its missing methods, and how its cells were made."""
        lines = self.study.notes(self.scores)
        if self.missing:
            lines.append(f"No cell has run yet: {', '.join(f'`{name}`' for name in self.missing)}.")
        without, cells = self.unrecorded
        if without:
            lines.append(f"{without} of {cells} cells have no recorded settings, so changed defaults do not show.")
        return [*lines, *([self.made_by] if self.made_by else [])]

    def null_note(self) -> str:
        """Sentence about the null arm."""
        if self.null is None:
            return f"Null arm: missing; it needs {2 * MIN_SEEDS} runs of a baseline."
        some, every = self.covered
        return str(self.null) + ("" if some == every else f" It covers {some} of {every} comparisons.")

    def _row(self, entry: Entry) -> dict[str, object]:
        show = self._formatter(entry.measure)
        verdict, published = entry.verdict, entry.published
        comparison = verdict.comparison if verdict else None
        p = verdict.p_adjusted if verdict else None
        return {
            "task": entry.task,
            "method": entry.method,
            "measure": entry.measure,
            "seeds": entry.seeds,
            "score [95 %]": show(entry.score, ""),
            "baseline": entry.contrast.baseline if entry.contrast else "-",
            "difference [95 %]": show(comparison.difference, "+") if comparison else "-",
            "p (Holm)": "-" if p is None else f"{p:.2g}",
            "verdict": "-" if verdict is None else ": ".join(filter(None, (verdict.verdict, verdict.reason))),
            "published": "-" if published is None else show(published.interval, ""),
            **self._details(entry),
        }

    def _details(self, entry: Entry) -> dict[str, object]:
        """Further columns, from the runs that ended; empty where all diverged."""
        ended = [score for score in entry.scores if not score.diverged]
        if ended:
            return self.study.details(ended)
        others = ([s for s in other.scores if not s.diverged] for other in self.entries)
        known = next(filter(None, others), None)
        return dict.fromkeys(self.study.details(known), "-") if known else {}

    def _formatter(self, measure: str) -> Callable[[Interval, str], str]:
        def show(interval: Interval, sign: str) -> str:
            percent = measure in self.study.percent
            large = max(abs(interval.estimate), abs(interval.low), abs(interval.high)) >= 100
            spec = f"{sign}.1%" if percent else f"{sign},.0f" if large else f"{sign}.3g"
            return f"{interval:{spec}}"

        return show


def tabulate(study: Study, cells: Sequence[Cell]) -> StudyTable:
    """The table of finished cells."""
    ended, diverged = ([c for c in cells if bool(c.get("diverged")) == value] for value in (False, True))
    lost = [score for cell in diverged for score in study.failures(cell)]
    unique = {(s.method, s.task, s.seed): s for s in (*lost, *study.all_scores(ended))}
    scores = tuple(s for s in unique.values() if s.method in study.methods and s.task in study.tasks)
    every = (*pooled(study, scores), *scores) if study.pooled else scores
    found = {(task, method): list[Score]() for task in (ALL, *study.tasks) for method in study.methods}
    for score in every:
        found[score.task, score.method].append(score)
    groups = {group: sorted(members, key=lambda score: score.seed) for group, members in found.items() if members}
    contrasts = {(*group, c.measure): c for group in groups for c in study.contrasts(group[1], group[0])}
    runs = {
        (*group, measure): _runs(members, measure)
        for group, members in groups.items()
        for measure in _measures(group, members, contrasts)
    }
    pairs, lower = {}, set()
    for key, contrast in contrasts.items():
        other = runs.get((key[0], contrast.baseline, key[2])) or _other(groups, key, contrast)
        if other is not None and key in runs:
            pairs[key] = (runs[key] if study.falls_back else _with_reason(runs[key], other), other)
            lower |= set() if contrast.larger else {key}
    verdicts = judge(pairs, paired=study.paired, lower_is_better=lower)
    entries = tuple(
        Entry(
            method=method,
            task=task,
            measure=measure,
            runs=found,
            score=study.interval(measure, found.outcomes),
            contrast=contrasts.get((task, method, measure)),
            verdict=verdicts.get((task, method, measure)),
            published=study.published(method, task),
            scores=tuple(groups[task, method]),
            bounds=study.bounds(measure),
            planned=study.planned(method, task),
        )
        for (task, method, measure), found in runs.items()
    )
    parts = [(key[0], contrasts[key].baseline, key[2]) for key in pairs]
    null = {part: _runs(groups[part[:2]], part[2]) for part in parts}
    large = [part for part in parts if len(null[part].outcomes) >= 2 * MIN_SEEDS]
    rate = null_rate(null, {part: large.count(part) for part in large}, paired=study.paired)
    planned = [method for method in study.methods if any(study.planned(method, task) for task in study.tasks)]
    return StudyTable(
        study,
        scores,
        entries,
        null=rate,
        covered=(len(large), len(parts)),
        made_by=made_by_text(cells) if cells else "",
        missing=tuple(method for method in planned if not any(method == entry.method for entry in entries)),
        unrecorded=unrecorded(study, cells),
    )


def write_study(study: Study, cells: Sequence[Cell], *, keep: bool = True) -> StudyTable:
    """Print the table, and with `keep` write it to `benchmarks/results` unless it is empty."""
    table = tabulate(study, cells)
    print_result(study.name, table.rows(), table.figures(), cells=cells)
    if keep and table.entries:
        command = f"python -m benchmarks.{study.name}"
        lost = failed(study)
        ended = [f"Failed, without a result: {', '.join(lost)}."] if lost else []
        protocol, notes = table.protocol(), [*table.notes(), *ended]
        rows, figures = table.rows(), table.figures()
        write_result(study.name, rows, figures, command=command, protocol=protocol, notes=notes, cells=cells)
        for name, further in study.tables(cells).items():
            write_result(name, further, {}, command=command, cells=cells)
    return table


def unrecorded(study: Study, cells: Sequence[Cell]) -> tuple[int, int]:
    """Number of cells that do not record the settings of their training, and of all; zeros if the study records none.

    Cells of a training that is not ours have none to record.
    """
    if not any(study.trainings(key) for key in study.cell_keys()):
        return 0, 0
    without = [c for c in cells if "configs" not in c and ("key" not in c or study.trainings(tuple(c["key"])))]
    return len(without), len(cells)


def pooled(study: Study, scores: Sequence[Score]) -> list[Score]:
    """Mean normalised score over all tasks, for every method and seed that has all tasks of the study."""
    by_run: dict[tuple[str, int], dict[str, Score]] = {}
    for score in scores:
        by_run.setdefault((score.method, score.seed), {})[score.task] = score
    return [
        Score(
            method=method,
            task=ALL,
            seed=seed,
            measures={"score": float(np.mean([_normalised(study, each) for each in found.values()]))},
            diverged=any(each.diverged for each in found.values()),
            reason=next((each.reason for each in found.values() if each.reason), ""),
        )
        for (method, seed), found in by_run.items()
        if len(found) == len(study.tasks)
    ]


def _normalised(study: Study, score: Score) -> float:
    (outcomes,) = score.measures.values()
    return study.normalised(score.task, float(np.mean(np.asarray(outcomes))))


def _measures(group: tuple[str, str], members: Sequence[Score], contrasts: dict[Part, Contrast]) -> list[str]:
    """Measures of a row: the ones of its contrasts, or the first one of a baseline."""
    named = [key[2] for key in contrasts if key[:2] == group]
    ended = [score for score in members if not score.diverged]
    return named or [next(iter((ended or members)[0].measures))]


def _runs(members: Sequence[Score], measure: str) -> SeedRuns:
    """Runs of a row in one measure; a run that diverged has no value of a measure without a score of failures."""
    known = [score for score in members if measure in score.measures or score.diverged]
    reasons = [score.reason for score in known if score.reason]
    return SeedRuns(
        {score.seed: score.measures.get(measure, math.nan) for score in known},
        sum(score.diverged for score in known),
        reasons[0] if 2 * len(reasons) > len(known) else "",
    )


def _other(groups: dict[tuple[str, str], list[Score]], key: Part, contrast: Contrast) -> SeedRuns | None:
    """Runs of a baseline whose own row shows another measure."""
    members = groups.get((key[0], contrast.baseline))
    found = None if members is None else _runs(members, key[2])
    return found if found is not None and found.outcomes else None


def _with_reason(method: SeedRuns, baseline: SeedRuns) -> SeedRuns:
    """The method, marked as not applicable where it has exactly the outcomes of its baseline on all common seeds."""
    common_seeds = method.outcomes.keys() & baseline.outcomes.keys()
    same = all(np.array_equal(np.asarray(method.outcomes[s]), np.asarray(baseline.outcomes[s])) for s in common_seeds)
    varied = any(method.noise.values()) or len(set(method.means.values())) > 1  # not all episodes end alike
    if method.reason or not common_seeds or not same or not varied:
        return method
    return SeedRuns(method.outcomes, method.diverged, "every outcome equals the baseline's")
