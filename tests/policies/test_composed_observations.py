"""Tests of compositions of parents with different observations: critics and actors get all statistics."""

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
def test_critics_and_actors_get_the_statistics_of_all_parents(parents: tuple[Any, Any]) -> None:
    check_what_any_parent_knows_serves_critics_and_actors(parents)
