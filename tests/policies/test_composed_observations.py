"""Compositions of parents that see different things, of which critics and actors need all statistics."""

from typing import Any

import pytest
from composed_rules import check_what_any_parent_knows_serves_critics_and_actors


@pytest.mark.parametrize(
    "parents",
    [
        ({"state": (3,)}, {"state": (3,), "point_cloud.front": (9, 3)}),
        ({"point_cloud.front": (9, 3)}, {"state": (3,)}),
        ({"state": (3,), "point_cloud.front": (9, 3)}, {"goal": (2,), "point_cloud.front": (9, 3)}),
    ],
    ids=["cloud-second", "cloud-first", "cloud-both"],
)
def test_what_any_parent_knows_of_its_observations_serves_critics_and_actors(parents: tuple[Any, Any]) -> None:
    check_what_any_parent_knows_serves_critics_and_actors(parents)
