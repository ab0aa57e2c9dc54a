"""Off-policy learners on Pendulum: return, jerk, bias of the values, and the cost of slower decisions.

    python -m benchmarks.pendulum --quick                      # one seed, 600 steps, nothing written
    python -m benchmarks.pendulum                              # everything missing, 3 seeds: about 1.5 CPU hours
    python -m benchmarks.pendulum --rows sac --seeds 0 1 2
    python -m benchmarks.pendulum --table                      # only rewrite the table from the finished cells

8,000 environment steps of one pendulum with one gradient step each, then 50 held-out episodes with deterministic
actions. `sac-two` has two pendulums, an update per 80 steps, and smaller networks and batches; `sac-two-ray` has each
pendulum in a Ray actor (`pip install 'robopolicy[ray]'`). A verdict compares two rows paired by seed, with Student's
interval of the mean difference.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import finished_cells, print_result, write_result
from benchmarks.pendulum.cell import ENV_STEPS, HOLDS, ROWS, cell_name, run_all
from benchmarks.themes import contributed
from robopolicy.evaluation.intervals import student_mean

Cell = dict[str, Any]
GOOD = -200.0  # mean return of a pendulum that is swung up and held
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Claim:
    """The claim that a row has a smaller figure than another row or, with `level`, an equal one."""

    row: str
    figure: str
    against: str = "sac"
    level: float = 0.0  # largest difference that counts as equal, in units of the figure; 0 claims less


CLAIMS = (
    Claim("sac-two-ray", "return", against="sac-two", level=20.0),
    *(Claim(row, **claim) for row, claims in contributed("pendulum", "claims").items() for claim in claims),
)
"""Contrib themes add claims by `[pendulum.claims]`: row -> list of the other fields of `Claim`."""


def main() -> None:
    """Run the missing cells, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, no results written")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=2, help="parallel cells, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables without running cells")
    arguments = parser.parse_args()
    if arguments.quick:
        cells = run_all([(row, 0) for row in arguments.rows], jobs=arguments.jobs, keep=False, env_steps=600)
        print_result("pendulum", rows(cells), figures(cells))
        return
    if not arguments.table:
        keys = [(row, seed) for seed in arguments.seeds for row in arguments.rows]
        run_all(keys, jobs=arguments.jobs, keep=True)
    cells = finished_cells(cell_name((row, seed)) for row in ROWS for seed in range(100))
    found = figures(cells)
    print_result("pendulum", rows(cells), found)
    write_result("pendulum", rows(cells), found, command="python -m benchmarks.pendulum", notes=notes(cells))


def measured(cell: Cell) -> dict[str, float]:
    """The figures of a cell by name; a return that was never reached counts as reached after the last step."""
    reached = [steps for steps, value in cell["curve"] if value >= GOOD]
    held = {hold: cell["held"][str(hold)] for hold in HOLDS}
    bias = {} if cell["bias"] is None else {"bias": cell["bias"], "absolute bias": abs(cell["bias"])}
    return {
        "return": cell["return"],
        "jerk": cell["jerk"],
        f"steps to {GOOD:.0f}": float(reached[0] if reached else ENV_STEPS),
        **{f"held for {hold}": held[hold] for hold in HOLDS[1:]},
        "lost when held for 8": held[HOLDS[0]] - held[8],
        **bias,
    }


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per learner: means over seeds with Student's interval."""
    found = [(row, [measured(cell) for cell in cells if cell["row"] == row]) for row in ROWS]
    shown = ["return", "jerk", f"steps to {GOOD:.0f}", *(f"held for {hold}" for hold in HOLDS[1:]), "bias"]
    return [
        {"learner": row, "seeds": len(each), **{name: _shown(name, each) for name in shown}}
        for row, each in found
        if each
    ]


def _shown(name: str, each: Sequence[dict[str, float]]) -> str:
    return f"{student_mean([one[name] for one in each]):.4g}" if name in each[0] else "-"


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, and the verdicts."""
    by_row = {row: [measured(cell) for cell in cells if cell["row"] == row] for row in ROWS}
    means = {
        row: {name: student_mean([one[name] for one in each]).to_dict() for name in each[0]}
        for row, each in by_row.items()
        if each
    }
    return {"seeds": sorted({cell["seed"] for cell in cells}), "learners": means, "claims": notes(cells)}


def notes(cells: Sequence[Cell]) -> list[str]:
    """A line per claim with its verdict."""
    return [line for claim in CLAIMS if (line := _judged(claim, cells))]


def _judged(claim: Claim, cells: Sequence[Cell]) -> str:
    mine, theirs = (
        {cell["seed"]: measured(cell)[claim.figure] for cell in cells if cell["row"] == row}
        for row in (claim.row, claim.against)
    )
    common = sorted(mine.keys() & theirs.keys())
    if len(common) < 3:
        return ""
    gap = student_mean([mine[seed] - theirs[seed] for seed in common])
    if claim.level:
        level = -claim.level < gap.low and gap.high < claim.level
        ahead = "ahead" if gap.low > 0 else "behind" if gap.high < 0 else "not told apart"
        asked, verdict = f"the same {claim.figure} within {claim.level:g} as", "confirmed" if level else ahead
    else:
        asked = f"less {claim.figure} than"
        verdict = "confirmed" if gap.high < 0 else "the opposite" if gap.low > 0 else "not seen at this scale"
    return f"- `{claim.row}` has {asked} `{claim.against}`: {gap:+.4g}, {verdict}."


if __name__ == "__main__":
    main()
