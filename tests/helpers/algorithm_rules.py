"""Rules that every registered algorithm and every source of data obeys."""

from __future__ import annotations

import math
from pathlib import Path

from docs.compatibility import Outcome, all_heads, allowed, try_pair
from docs.references import references
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.policies.base import Policy
from robopolicy.training.make_source import SOURCES


def check_states_what_it_is(name: str) -> None:
    """Class attributes say where an algorithm learns from, what it trains and its paper, also before it is imported."""
    algorithm = ALGORITHMS[name]
    for attribute in ("name", "data_source", "heads", "reference"):
        assert attribute in vars(algorithm), f"{algorithm.__name__} states no {attribute}"
        assert ALGORITHMS.attribute(name, attribute) == getattr(algorithm, attribute)
    assert algorithm.name == name
    assert algorithm.data_source in SOURCES
    assert algorithm.reference in references()
    assert algorithm.heads
    for head in algorithm.heads:
        assert head in all_heads() or head == "text" or callable(getattr(Policy, head)), head


def check_updates_what_it_allows(name: str, place: Path) -> None:
    """An algorithm updates every head that it allows, and refuses all others with one line."""
    found: dict[str, Outcome] = {head: try_pair(place, name, head) for head in all_heads()}
    assert {head for head, outcome in found.items() if outcome.reason is None} == allowed(name)
    for head, outcome in found.items():
        assert all(math.isfinite(value) for value in outcome.metrics.values())
        if outcome.reason is not None:
            assert f"'{all_heads()[head][0]}'" in outcome.reason, outcome.reason
            assert len(outcome.reason.splitlines()) == 1


def check_source_says_what_it_provides(name: str) -> None:
    """A source of data says in one sentence what it provides, and whether in whole episodes."""
    assert SOURCES.summary(name).endswith(".")
    assert isinstance(SOURCES[name].whole_episodes, bool)
