"""Tests of algorithms on the simulated device: updates, resume points and deployed policies stay on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_rules import check_learns_on_a_device

from docs.compatibility import allowed, workplace
from robopolicy.algorithms.registry import ALGORITHMS

PAIRS = [(name, head) for name in ALGORITHMS.product() for head in sorted(allowed(name))]
# One of each kind of source; `test_budgets.py` updates every algorithm with its first head.
QUICK = [("bc", "flow"), ("ppo", "gaussian"), ("reinflow", "flow"), ("sac", "squashed_gaussian"), ("dsrl_na", "flow")]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace(ALGORITHMS.product()) as folder:
        yield folder


@pytest.mark.parametrize(
    ("name", "head"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
)
def test_algorithm_trains_resumes_and_acts_on_a_device(name: str, head: str, place: Path, tmp_path: Path) -> None:
    check_learns_on_a_device(name, head, place, tmp_path)
