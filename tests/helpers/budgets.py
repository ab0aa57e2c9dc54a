"""The table of budgets of launches and waits on the simulated device, `tests/device/budgets.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "device" / "budgets.toml"
LOOSE = 0.8  # share of a budget below which it is lowered
HEADER = "# Launches and waits on the simulated device; the tests of each section say what is counted.\n"

Budget = Mapping[str, float]


def budgets(section: str) -> dict[str, Budget]:
    """Budgets of a section by name."""
    return tomllib.loads(FILE.read_text()).get(section, {})


def check_budget(section: str, name: str, launches: float, waits: float, found: Any) -> None:
    """Compare counts with their budget; `found` is the record of which a failure prints the places."""
    budget = budgets(section)[name]
    for kind, count in (("launches", launches), ("waits", waits)):
        assert count <= budget[kind], f"{kind} of {name}: {count:g}, at most {budget[kind]:g}\n{found.places()}"
        assert count >= LOOSE * budget[kind], f"Lower the budget of {kind} of {name} to {count:g}."


def write_budgets(section: str, measured: Mapping[str, Budget]) -> None:
    """Replace a section of the table."""
    table = tomllib.loads(FILE.read_text()) | {section: measured}
    lines = [HEADER]
    for title, entries in sorted(table.items()):
        lines.append(f"\n[{title}]\n")
        for name, budget in sorted(entries.items()):
            values = ", ".join(f"{kind} = {count:g}" for kind, count in budget.items())
            lines.append(f"{name} = {{ {values} }}\n")
    FILE.write_text("".join(lines))
