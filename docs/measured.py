"""What we measured of an algorithm: its rows of a committed benchmark table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LABELS = ("method", "learner", "head")  # the column, if a table has one, that says whose row it is


def measured(benchmark: str, names: Sequence[str], results: Path = RESULTS) -> str:
    """The rows of `names` in the table of `benchmark` as Markdown; empty if it was not run or has none."""
    file = results / f"{benchmark}.json"
    if not benchmark or not file.is_file():
        return ""
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    mine = [row for row in rows if any(_is_of(row, name) for name in names)]
    return table(list(mine[0]), [[_text(value) for value in row.values()] for row in mine]) if mine else ""


def _is_of(row: dict[str, Any], name: str) -> bool:
    """Whether `row` shows `name`, or a variant that is written `name-variant`."""
    label = next((str(row[column]) for column in LABELS if column in row), "")
    return label == name or label.startswith(f"{name}-")


def _text(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, float) and abs(value) >= 1000 else str(value)
