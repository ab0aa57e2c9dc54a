"""Every head with every algorithm: one update from files where the method allows it, a reason where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.compatibility import ALLOWED, HEADS, Outcome, try_pair, workplace
from robopolicy.algorithms.registry import ALGORITHMS

PACKAGES = {"dcg_map_elites": "ribs", "ts_ddr": "clarabel"}  # of optional extras


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace() as folder:
        yield folder


def test_the_matrix_knows_every_algorithm() -> None:
    assert set(ALLOWED) == set(ALGORITHMS)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_updates_what_it_allows_and_refuses_the_rest_with_a_reason(name: str, place: Path) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    found: dict[str, Outcome] = {head: try_pair(place, name, head) for head in HEADS}
    assert {head for head, outcome in found.items() if outcome.reason is None} == ALLOWED[name]
    for head, outcome in found.items():
        assert all(math.isfinite(value) for value in outcome.metrics.values())
        if outcome.reason is not None:
            assert f"'{HEADS[head][0]}'" in outcome.reason, outcome.reason
            assert len(outcome.reason.splitlines()) == 1
