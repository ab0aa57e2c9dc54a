"""Pages show what is committed under benchmarks/results, and no other measured intervals."""

import re
from pathlib import Path

import pytest
from source_tree import project_files, read

from benchmarks.studies import STUDIES
from docs import generate_numbers
from docs.generate_benchmarks import CHARTS, PAGE, SECTIONS, charts, render

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


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_measured_intervals_are_not_typed_by_hand(page: Path):
    found = INTERVAL.findall(generate_numbers.BLOCK.sub("", read(page)))
    assert not found, f"{page}: {found}"
