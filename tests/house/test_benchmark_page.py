"""Pages show what is committed under benchmarks/results, and no other measured intervals."""

import re
from pathlib import Path

import pytest
from source_tree import project_files, read

from benchmarks.studies import STUDIES
from docs import generate_numbers, table_charts
from docs.generate_benchmarks import CHARTS, PAGE, SECTIONS, charts, render
from docs.measured import record
from docs.study_pages import caption, summary

INTERVAL = re.compile(r"\d ?%? \[[+-]?[\d.,]+ ?%?, [+-]?[\d.,]+ ?%?\]")  # an estimate with its interval
GENERATED = ("docs/benchmarks.md", "docs/methods/", "benchmarks/")
PAGES = [path for path in project_files() if path.suffix == ".md" and not path.as_posix().startswith(GENERATED)]


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "Run `python -m docs.generate_benchmarks`."


def test_every_measured_study_has_a_chart():
    assert {file.stem for file in CHARTS.glob("*.png")} == charts()


def test_a_benchmark_has_one_section():
    names = [name for section in SECTIONS.values() for name in section]
    assert len(names) == len(set(names)) and set(STUDIES) <= set(names)


def test_measured_numbers_of_pages_are_up_to_date():
    found: list[str] = []
    for path in PAGES:
        page = read(path)
        blocks = [match[2] for match in generate_numbers.BLOCK.finditer(page)]
        assert (path.as_posix() in generate_numbers.PAGES) == bool(blocks), path
        assert page == generate_numbers.render(page), f"{path}: run `python -m docs.generate_numbers`."
        found += blocks
    assert sorted(found) == sorted(generate_numbers.BLOCKS)


def test_a_grid_shows_intervals_seeds_and_the_reach_of_the_null_arm():
    common = {"measure": "success", "published": None, "baseline": None, "verdict": None, "seeds": "1", "low": None}
    entries = [
        {**common, "method": m, "task": t, "estimate": 0.5} for m in ("flow", "tuned") for t in ("lift", "drawer")
    ]
    entries[2] |= {"baseline": "flow", "verdict": "ahead", "seeds": "5 of 8"}
    entries[2] |= {"estimate": 0.97, "low": 0.921, "high": 0.99}
    null = {"table": 0.01, "tables": 500}
    record = {"entries": entries, "null": null, "null_covers": [7, 14]}
    assert "| `tuned` | `flow` | 97% [92, 99] (5 of 8) **ahead** | 50% (1) |" in summary(record)
    assert "the second is planned" in caption(record) and "covers 7 of 14" in caption(record)
    values = {**record, "entries": [{**entry, "baseline": None, "verdict": None} for entry in entries]}
    assert "null arm" not in caption(values).lower()  # nothing is compared


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_measured_intervals_are_not_typed_by_hand(page: Path):
    found = INTERVAL.findall(generate_numbers.BLOCK.sub("", read(page)))
    assert not found, f"{page}: {found}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0.40x [0.36, 0.43]", (0.4, 0.36, 0.43)),
        ("98.0% [93.0%, 99.4%]", (98.0, 93.0, 99.4)),
        ("5,545 [5,046, 6,166]", (5545.0, 5046.0, 6166.0)),
        ("1549 [1395, 1865]", (1549.0, 1395.0, 1865.0)),
        ("-0.3", (-0.3, None, None)),
        (0.649, (0.649, None, None)),
    ],
)
def test_charts_read_numbers_and_intervals_of_tables(text: object, wanted: tuple[float | None, ...]):
    assert table_charts.value({"speed": text}, "speed") == wanted


def test_charts_refuse_cells_without_a_number():
    with pytest.raises(ValueError, match="'-' in column 'speed' is no number"):
        table_charts.value({"speed": "-"}, "speed")
    assert table_charts.value({"rate": 2, "low": 1, "high": 3}, "rate", ("low", "high")) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("name", table_charts.CHARTS)
def test_a_chart_shows_rows_of_the_committed_table(name: str):
    chart, rows = table_charts.CHARTS[name], record(name)["rows"]
    shown = table_charts.shown(chart, rows)
    assert shown and all(table_charts.value(row, each, chart.bounds) for row in shown for each in chart.values)
