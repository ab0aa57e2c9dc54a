"""The page of benchmarks shows what is committed under benchmarks/results."""

from docs.generate_benchmarks import CHARTS, PAGE, SECTIONS, render, tasks


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(), "Run `python -m docs.generate_benchmarks`."


def test_every_task_of_the_fine_tuners_has_a_chart():
    assert len(list(CHARTS.glob("finetune_*.png"))) == len(tasks())


def test_a_benchmark_has_one_section():
    names = [name for section in SECTIONS.values() for name in section]
    assert len(names) == len(set(names))
