"""Methods and tasks of the study, its plan of cells, and published success rates."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

DOMAINS = ("scene", "puzzle-3x3", "cube-double")


@dataclass(frozen=True)
class Task:
    """One single task of OGBench."""

    domain: str  # environment, as in the ids of tasks and in the names of files
    number: int

    @property
    def id(self) -> str:
        """Id of the task."""
        return f"ogbench/{self.domain}-singletask-task{self.number}-v0"


TASKS = {f"{domain}-task{number}": Task(domain, number) for domain in DOMAINS for number in range(1, 6)}
DEFAULT_TASKS = ("puzzle-3x3-task4", "scene-task2")  # the default tasks of OGBench
SCENE_AND_PUZZLE = tuple(name for name, task in TASKS.items() if task.domain != "cube-double")


@dataclass(frozen=True)
class Method:
    """One row: a preset with the settings of a published protocol."""

    preset: str  # part of the name of the presets
    protocol: str  # table of `published.toml`
    settings: tuple[str, ...] = ()  # on top of the preset
    updates: int = 100_000

    @property
    def source(self) -> str:
        """Key of its paper in `docs/references.bib`."""
        return published_curves()[self.protocol]["source"]


QC_CRITICS = ("algorithm.critic.members=2", "algorithm.rho=0")  # two critics and their mean, as in the QC paper
_AT_100K = {
    "qc_ifql": Method("ifql", "qc", (*QC_CRITICS, "algorithm.implicit.expectile=0.9")),
    "qc_fql": Method("fql", "qc", QC_CRITICS),
    "qc": Method("qc", "qc"),
    "ifql": Method("ifql", "qam"),
    "fql": Method("fql", "qam"),
    "dsrl": Method("dsrl", "qam"),
}
METHODS = {
    **_AT_100K,
    **{f"{name}_200k": replace(method, updates=200_000) for name, method in _AT_100K.items()},
}
PLAN = (  # methods, tasks and seeds, most important first; hours of a cell on one core with bfloat16 instructions
    (("qc_ifql", "qc_fql"), DEFAULT_TASKS, (0,)),  # 1.7, 3.1
    (("qc_ifql", "qc_fql"), DEFAULT_TASKS, (1, 2, 3, 4)),
    (("ifql",), DEFAULT_TASKS, (0,)),  # 4.4
    (("qc_ifql", "qc_fql", "ifql"), SCENE_AND_PUZZLE, (0,)),
    (("fql", "dsrl"), DEFAULT_TASKS, (0,)),  # 7.4, 15.8
    (("qc_ifql_200k", "qc_fql_200k"), DEFAULT_TASKS, (0,)),  # 3.4, 6.2
)


@cache
def published_curves() -> dict[str, Any]:
    """Content of `published.toml`."""
    return tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))


def published_success(method: Method, task: str) -> tuple[float, float, float] | None:
    """Published success [%] after as many updates and its interval; None if there is none."""
    curves = published_curves()[method.protocol].get(method.preset, {}).get(TASKS[task].domain, {})
    found = curves.get(f"task{TASKS[task].number}", {}).get(str(method.updates))
    return None if found is None else tuple(found)
