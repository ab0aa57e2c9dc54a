"""Budgets of launches and waits on the simulated device: a slow line in an update fails here.

`budgets.toml` holds them for one update of tiny networks; `python tests/device/test_budgets.py` measures and writes it.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.compatibility import allowed, opened, workplace
from robopolicy.algorithms.registry import ALGORITHMS

simulated = pytest.importorskip("simulated", exc_type=ImportError)
FILE = Path(__file__).with_name("budgets.toml")
BUDGETS: dict[str, dict[str, int]] = tomllib.loads(FILE.read_text()) if FILE.is_file() else {}
LOOSE = 0.8  # share of a budget below which it is lowered
HEADER = "# Launches and waits of one update of tiny networks on the simulated device; see test_budgets.py.\n"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace(ALGORITHMS.product()) as folder:
        yield folder


def measure(name: str, place: Path) -> Any:
    """Count the second update of an algorithm with its first head; the first one initialises."""
    with opened(place, name, min(allowed(name)), device=simulated.NAME) as parts:
        algorithm, source = parts.algorithm, parts.source
        algorithm.update(source.next(algorithm))
        batch = source.next(algorithm)
        with simulated.record() as found:
            algorithm.update(batch)
    return found


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_an_update_keeps_its_budget(name: str, place: Path) -> None:
    found, budget = measure(name, place), BUDGETS[name]
    for kind, count in (("launches", found.launches), ("waits", found.waits)):
        assert count <= budget[kind], f"{kind}: {count}, at most {budget[kind]}\n{found.places()}"
        assert count >= LOOSE * budget[kind], f"Lower the budget of {kind} to {count}."


def test_every_algorithm_has_a_budget() -> None:
    assert set(BUDGETS) == {name for name in ALGORITHMS.product() if allowed(name)}


def main() -> None:
    """Write the budgets."""
    lines = [HEADER]
    with workplace(ALGORITHMS.product()) as folder:
        for name in sorted(name for name in ALGORITHMS.product() if allowed(name)):
            found = measure(name, folder)
            lines.append(f"{name} = {{ launches = {found.launches}, waits = {found.waits} }}\n")
            sys.stdout.write(lines[-1])
    FILE.write_text("".join(lines))


if __name__ == "__main__":
    main()
