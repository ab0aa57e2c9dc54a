"""Fixtures: decisions in every layout, inputs of point-mass runs, and checkpoints for the algorithm rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from batches import decisions, shift
from point_mass_fixtures import clone, demonstrations, make_policy
from theme_names import names_of

from docs.compatibility import workplace
from robopolicy.algorithms.registry import ALGORITHMS

__all__ = ["clone", "decisions", "demonstrations", "make_policy", "shift"]


@pytest.fixture(scope="class")
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A dataset, and a checkpoint of every head for the algorithms of the theme that the rule class tests."""
    with workplace(names_of(ALGORITHMS, request.cls.theme)) as folder:
        yield folder
