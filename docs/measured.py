"""What we measured of an algorithm: its rows of a committed benchmark table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from docs.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LABELS = ("method", "learner", "head")  # the column that says whose row it is; a table without one is about one alone


SHOWN = ("task", "method", "measure", "seeds", "score [95 %]", "baseline", "difference [95 %]", "verdict", "published")


def measured(benchmark: str, names: Sequence[str], results: Path = RESULTS) -> str:
    """The rows of `names` in the table of `benchmark` as Markdown; empty if it was not run or has none."""
    rows = rows_of(benchmark, names, results)
    if not rows:
        return ""
    found = record(benchmark, results)
    task = f" on {found['task']}" if "task" in found else ""
    columns = [column for column in rows[0] if "entries" not in found or column in SHOWN]
    cells = [[_text(row[column]) for column in columns] for row in rows]
    return f"- **Our result**, by `python -m benchmarks.{benchmark}`{task}:\n\n{table(columns, cells)}"


def rows_of(benchmark: str, names: Sequence[str], results: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of `names` and their variants in the committed table of a benchmark."""
    rows = record(benchmark, results).get("rows", [])
    return [row for row in rows if any(_is_of(row, name) for name in names)]


def entries_of(benchmark: str, name: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """The entries of `name` and its variants in the committed result of a study."""
    return [entry for entry in record(benchmark, results).get("entries", []) if _is_of(entry, name)]


def recipes_measured(names: Sequence[str], results: Path = RESULTS) -> list[str]:
    """Lines about some recipes from the text benchmark, one per recipe and task.

    Accuracy [%] on held-out problems before and after, the baseline's, and the verdict.
    """
    entries = record("text", results).get("entries", [])
    accuracy = {(entry["task"], entry["method"]): f"{100 * entry['estimate']:.1f}" for entry in entries}
    found: list[str] = []
    for entry in entries:
        if entry["method"] in names and entry["verdict"]:
            before, after, other = (
                accuracy[entry["task"], method] for method in ("(imitation)", entry["method"], entry["baseline"])
            )
            found.append(
                f"`{entry['method']}` on {entry['task']}: accuracy {before} -> {after} % "
                f"(`{entry['baseline']}` {other} %): {entry['verdict']}"
            )
    return found


@cache
def record(benchmark: str, results: Path = RESULTS) -> dict[str, Any]:
    """A committed result; empty if it was not run."""
    file = results / f"{benchmark}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _is_of(row: dict[str, Any], name: str) -> bool:
    """Whether `row` shows `name`, or a variant that is written `name-variant`."""
    label = next((str(row[column]) for column in LABELS if column in row), name)
    return label == name or label.startswith(f"{name}-")


def _text(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1000 else str(value)
