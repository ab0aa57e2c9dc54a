"""Tests of datasets that fit a task by shape but belong to another task: the run warns and continues."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from robopolicy.data.episodes import Episodes
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.training import build as builder
from robopolicy.training.build import build, resolve_config
from robopolicy.training.compose import compose_config


def build_with(data: Path, change: Callable[[Episodes], Episodes], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the warnings of an imitation run on the changed dataset."""
    episodes = change(read_lerobot(data).without_closing_frames())
    builder.load_episodes.cache_clear()
    monkeypatch.setattr(builder, "read_dataset", lambda _, **options: _Read(episodes))
    settings = ["task=point_mass", "policy=flow", "policy.hidden=[8]", f"dataset={data}", "budget.updates=1"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        build(resolve_config(compose_config([*settings, "algorithm=bc", "evaluation.episodes=2"]))).close()
    return [str(warning.message) for warning in found if warning.category is UserWarning]


class _Read:
    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes

    def without_closing_frames(self) -> Episodes:
        return self.episodes


def test_dataset_of_the_task_or_of_unknown_tasks_gives_no_warning(
    demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not build_with(demonstrations, lambda data: data, monkeypatch)
    named = lambda data: replace(data, tasks=("go to the goal",) * len(data.tasks))  # noqa: E731
    assert not build_with(demonstrations, named, monkeypatch)
    mixed = lambda data: replace(data, tasks=("manipulation/lift", *data.tasks[1:]))  # noqa: E731
    assert not build_with(demonstrations, mixed, monkeypatch)


def test_dataset_of_another_task_gives_a_warning(demonstrations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = lambda data: replace(data, tasks=("manipulation/lift",) * len(data.tasks))  # noqa: E731
    (line,) = build_with(demonstrations, other, monkeypatch)
    assert "was recorded on manipulation/lift, and this run uses toy/point_mass" in line


def test_actions_beyond_the_bounds_give_a_warning(demonstrations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = lambda data: replace(data, arrays={**data.arrays, "action": data.arrays["action"] + 5.0})  # noqa: E731
    (line,) = build_with(demonstrations, wild, monkeypatch)
    assert "100% of the actions" in line and "exceed the bounds of toy/point_mass" in line
