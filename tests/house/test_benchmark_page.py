"""The page of benchmarks shows what is committed under benchmarks/results."""

from benchmarks.studies import STUDIES
from docs.generate_benchmarks import CHARTS, PAGE, SECTIONS, render, studies


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "Run `python -m docs.generate_benchmarks`."


def test_every_measured_study_has_a_chart():
    assert {file.stem for file in CHARTS.glob("*.png")} == set(studies())


def test_a_benchmark_has_one_section():
    names = [name for section in SECTIONS.values() for name in section]
    assert len(names) == len(set(names)) and set(STUDIES) <= set(names)
