"""What every registered algorithm states about itself: read without importing it, and true."""

from __future__ import annotations

import pytest

from docs.compatibility import HEADS
from docs.references import references
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.policies.base import Policy
from robopolicy.training.make_source import SOURCES


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_class_states_where_it_learns_from_what_it_trains_and_its_paper(name: str) -> None:
    algorithm = ALGORITHMS[name]
    for attribute in ("name", "data_source", "heads", "reference"):
        assert attribute in vars(algorithm), f"{algorithm.__name__} states no {attribute}"
        assert ALGORITHMS.attribute(name, attribute) == getattr(algorithm, attribute)
    assert algorithm.name == name
    assert algorithm.data_source in SOURCES
    assert algorithm.reference in references()
    assert algorithm.heads
    for head in algorithm.heads:
        assert head in HEADS or head == "text" or callable(getattr(Policy, head)), head


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_source_says_what_it_provides_and_whether_in_whole_episodes(name: str) -> None:
    assert SOURCES.summary(name).endswith(".")
    assert isinstance(SOURCES[name].whole_episodes, bool)
