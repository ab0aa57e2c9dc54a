"""The studies of the queue, imported when they are needed."""

from __future__ import annotations

from importlib import import_module

from benchmarks.study import Study

STUDIES = ("finetune", "control", "control_million", "pendulum", "composition", "worldmodel", "text", "ogbench", "her")
"""Names of packages with a module `study`."""


def load_study(name: str) -> Study:
    """The study of a package `benchmarks.NAME`."""
    return import_module(f"benchmarks.{name}.study").STUDY
