"""Evidence for a published source, computed from committed results: never written by hand.

A pointer `BENCHMARK/ROW` names the rows of a source in the table of a benchmark; variants `ROW-VARIANT` belong to it. A
recipe of a source is a row of the study of text recipes by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs.measured import RESULTS, entries_of, rows_of

TEXT = "text"
EVIDENCE = {
    "reproduced": "reaches every published score that was measured, over at least five seeds, and is not behind",
    "ahead": "ahead of its baseline more often than behind, corrected for all comparisons of the table",
    "level": "no difference to its baseline was found, or as often ahead as behind",
    "behind": "behind its baseline more often than ahead",
    "none": "no verdict: not measured, too few seeds, or its mechanism could not act",
}


def pointers(benchmarks: Sequence[str], recipes: Sequence[str], text_rows: Sequence[str]) -> list[str]:
    """All pointers of a source: those it names, and its recipes that are rows of the study of texts."""
    return [*benchmarks, *(f"{TEXT}/{name}" for name in recipes if name in text_rows)]


def evidence(places: Sequence[str], results: Path = RESULTS) -> str:
    """Evidence of the entries that pointers name, a key of `EVIDENCE`."""
    entries = [entry for place in places for entry in entries_of(*_parts(place), results)]
    reached = [entry["reproduced"] for entry in entries if entry["reproduced"] is not None]
    verdicts = [entry["verdict"] for entry in entries]
    ahead, behind = verdicts.count("ahead"), verdicts.count("behind")
    if reached and all(reached) and not behind:
        return "reproduced"
    if ahead == behind == verdicts.count("level") == 0:
        return "none"
    return "ahead" if ahead > behind else "behind" if behind > ahead else "level"


def exists(place: str, results: Path = RESULTS) -> bool:
    """Whether the benchmark of a pointer has its row: in the committed result, or planned in the study."""
    benchmark, name = _parts(place)
    if rows_of(benchmark, [name], results):
        return True
    from benchmarks.studies import STUDIES, load_study

    return benchmark in STUDIES and name in load_study(benchmark).methods


def _parts(place: str) -> tuple[str, str]:
    benchmark, _, name = place.partition("/")
    return benchmark, name
