"""Methods, domains and tasks of the study, and the published success rates of each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TASKS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Domain:
    """One environment of OGBench with its five single tasks."""

    name: str  # as in the ids of the tasks and in the names of files
    preset: str  # part of the name of the presets

    def task(self, number: int) -> str:
        """Id of a single task."""
        return f"ogbench/{self.name}-singletask-task{number}-v0"


@dataclass(frozen=True)
class Method:
    """One row: a preset with the settings of a published protocol."""

    name: str
    preset: str  # part of the name of the presets
    protocol: str  # table of `published.toml`
    settings: tuple[str, ...] = ()  # on top of the preset

    @property
    def curve(self) -> str:
        """Name of its published curve."""
        return self.name.removeprefix("qc_")


QC_CRITICS = ("algorithm.critic.members=2", "algorithm.rho=0")  # two critics and their mean, as in the QC paper
METHODS = {
    method.name: method
    for method in (
        Method("fql", "fql", "qam"),
        Method("ifql", "ifql", "qam"),
        Method("dsrl", "dsrl", "qam"),
        Method("qc", "qc", "qc"),
        Method("qc_fql", "fql", "qc", QC_CRITICS),
        Method("qc_ifql", "ifql", "qc", (*QC_CRITICS, "algorithm.implicit.expectile=0.9")),
    )
}
DOMAINS = {
    domain.name: domain
    for domain in (
        Domain("scene", "scene"),
        Domain("puzzle-3x3", "puzzle_3x3"),
        Domain("cube-double", "cube_double"),
    )
}


@cache
def protocols() -> dict[str, Any]:
    """Content of `published.toml`."""
    return tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))


def published(method: Method, domain: str, task: int, updates: int) -> tuple[float, float, float] | None:
    """Published success [%] after `updates` and its interval; None if there is none."""
    curves = protocols()[method.protocol].get(method.curve, {}).get(domain, {})
    found = curves.get(f"task{task}", {}).get(str(updates))
    return None if found is None else tuple(found)
