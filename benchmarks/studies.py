"""The studies of the queue, imported when they are needed."""

from __future__ import annotations

from importlib import import_module

from benchmarks.study import Study

STUDIES = (
    *("finetune", "few_step", "takeover", "offline", "ogbench", "pixels", "mjlab_finetune", "parts", "first_step"),
    *("control", "control_million", "pendulum", "her", "composition", "worldmodel", "text"),
)
"""Names of packages with a module `study`."""


def load_study(name: str) -> Study:
    """The study of a package `benchmarks.NAME`."""
    return import_module(f"benchmarks.{name}.study").STUDY
