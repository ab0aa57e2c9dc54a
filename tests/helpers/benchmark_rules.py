"""Checks for the rows of benchmarks."""

from contextlib import closing

from benchmarks.control.cell import settings as control_settings
from benchmarks.control.methods import METHODS
from benchmarks.control.tasks import TASKS
from benchmarks.pendulum.cell import ROWS
from benchmarks.pendulum.cell import settings as pendulum_settings
from benchmarks.pendulum.tasks import register
from robopolicy.training.build import build, resolve_config
from robopolicy.training.compose import compose_config


def check_control_row_starts(name: str) -> None:
    """A row of the control table can start with its budget."""
    config = compose_config([*control_settings(METHODS[name], TASKS["hopper"], 0), "evaluation.episodes=0"])
    parts = build(resolve_config(config))
    parts.close()
    assert parts.total_updates >= 50


def check_pendulum_row_can_be_built(name: str) -> None:
    """A row of the pendulum table builds its algorithm."""
    register()
    with closing(build(compose_config([*pendulum_settings(ROWS[name], 0, 600)]))) as parts:
        assert parts.algorithm.name == ROWS[name].algorithm
