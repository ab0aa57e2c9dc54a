"""Tests of every head with every algorithm: one update from files if supported, a reason for refusal otherwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from algorithm_rules import (
    check_acts_by_a_copy,
    check_deploys_exactly,
    check_resumes_exactly,
    check_stays_finite_under_autocast_and_shows_a_nan,
    check_updates_what_it_allows,
)

from docs.compatibility import allowed, workplace
from robopolicy.algorithms.registry import ALGORITHMS


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace(ALGORITHMS.product()) as folder:
        yield folder


@pytest.mark.parametrize("name", ALGORITHMS.product())
def test_an_algorithm_updates_what_it_allows_and_refuses_the_rest_with_a_reason(name: str, place: Path) -> None:
    check_updates_what_it_allows(name, place)


of_robots = pytest.mark.parametrize("name", [name for name in ALGORITHMS.product() if allowed(name)])


@of_robots
def test_a_resumed_algorithm_ends_with_the_same_weights(name: str, place: Path, tmp_path: Path) -> None:
    check_resumes_exactly(name, place, tmp_path)


@pytest.mark.parametrize("head", sorted(allowed("bc")))
def test_resumed_imitation_of_every_head_ends_with_the_same_weights(head: str, place: Path, tmp_path: Path) -> None:
    check_resumes_exactly("bc", place, tmp_path, head)


@of_robots
def test_a_copy_acts_with_the_weights_of_its_last_update(name: str, place: Path) -> None:
    check_acts_by_a_copy(name, place)


@of_robots
def test_the_deployed_policy_survives_a_checkpoint(name: str, place: Path, tmp_path: Path) -> None:
    check_deploys_exactly(name, place, tmp_path)


@of_robots
def test_losses_stay_finite_under_autocast_and_show_a_nan(name: str, place: Path) -> None:
    check_stays_finite_under_autocast_and_shows_a_nan(name, place)
