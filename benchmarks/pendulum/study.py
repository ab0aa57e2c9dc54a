"""Off-policy learners on Pendulum: return, jerk, bias of the values, and the cost of slower decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from numpy.typing import ArrayLike

from benchmarks.pendulum.cell import ENV_STEPS, HOLDS, ROWS, settings
from benchmarks.study import Cell, Contrast, Key, Score, Study
from benchmarks.themes import contributed

GOOD = -200.0  # mean return of a pendulum that is swung up and held
RANDOM = -1204.0  # mean return of random actions
TASK, BASELINE = "pendulum", "sac"
AGAINST = {"stac-noisy": "sac-noisy", "sac-two-ray": "sac-two"}  # rows with a baseline of their own
BASELINES = (BASELINE, *AGAINST.values())
SEEDS = range(5)
NULL_SEEDS = range(100, 105)  # further runs of the baselines, for the null arm
REACHED = f"steps to {GOOD:.0f}"
LOST = "lost when deciding every 8 steps"
SHOWN = ("jerk", REACHED, *(f"every {hold} steps" for hold in HOLDS[1:]), "bias")


@dataclass(frozen=True)
class Claim:
    """A figure that a row lowers."""

    figure: str
    against: str = BASELINE


CLAIMS = {row: tuple(Claim(**claim) for claim in claims) for row, claims in contributed("pendulum", "claims").items()}
"""Claims of contrib themes by `[pendulum.claims]`: row -> list of the fields of `Claim`."""


@dataclass(frozen=True)
class Pendulum(Study):
    """50 held-out episodes with deterministic actions, after steps of one pendulum with one gradient step each.

    `sac-two` has two pendulums, an update per 80 steps, and smaller networks and batches; `sac-two-ray` has each
    pendulum in a Ray actor (`pip install 'robopolicy[ray]'`).
    """

    name = "pendulum"
    question = "What do slow decisions cost, and do the claims of their sources hold, on a pendulum?"
    paired = False
    env_steps: int = ENV_STEPS
    only: tuple[Key, ...] = ()  # cells of the smoke test; empty: all

    @property
    def tasks(self) -> list[str]:
        """One task."""
        return [TASK]

    @property
    def methods(self) -> list[str]:
        """Learners."""
        return list(ROWS)

    def cell_keys(self) -> list[Key]:
        """All learners, and more seeds of the baselines."""
        null: list[Key] = [(row, seed) for row in BASELINES for seed in NULL_SEEDS]
        return list(self.only) or [*((row, seed) for seed in SEEDS for row in ROWS), *null]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """The learner on the only task."""
        return [(str(key[0]), TASK)]

    def facts(self, key: Key, folder: Path) -> Cell:
        """Learner, seed and budget."""
        return {"row": key[0], "seed": key[1], "env_steps": self.env_steps}

    def trainings(self, key: Key) -> Mapping[str, Sequence[str]]:
        """Settings of the learner."""
        return {"run": settings(ROWS[str(key[0])], int(key[1]), self.env_steps)}

    def run(self, key: Key, folder: Path) -> Cell:
        """Train and evaluate one learner."""
        from benchmarks.pendulum.cell import run_cell

        return run_cell(ROWS[str(key[0])], int(key[1]), folder, self.env_steps)

    def scores(self, cell: Cell) -> list[Score]:
        """All figures of a learner."""
        return [Score(cell["row"], TASK, cell["seed"], measured(cell), curve=cell["curve"], cell=cell)]

    def failure(self, task: str) -> dict[str, ArrayLike]:
        """The return of random actions, and a first good policy that is never reached."""
        return {"return": RANDOM, REACHED: float(ENV_STEPS)}

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """The return against SAC, and the claims of the learner."""
        if method in BASELINES or task != TASK:
            return ()
        own = [Contrast(claim.against, claim.figure, larger=False) for claim in CLAIMS.get(method, ())]
        return (Contrast(AGAINST.get(method, BASELINE), "return"), *own)

    def is_current(self, cell: Cell) -> bool:
        """Cells with another budget run again."""
        return cell["env_steps"] == self.env_steps

    def describe(self, cell: Cell) -> str:
        """Return and jerk."""
        return f"return {cell['return']:.0f}, jerk {cell['jerk']:.1f}"

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Means of the other figures."""
        found = [measured(score.cell) for score in scores]
        return {name: f"{fmean(f[name] for f in found):,.4g}" if name in found[0] else "-" for name in SHOWN}

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Meaning of the slower decisions."""
        return [
            "`every 8 steps` is the return if a policy decides every 8 steps and its last action is repeated; `srl` "
            "executes the sequence of 8 actions that it has planned.",
        ]

    def quick(self) -> Pendulum:
        """Two learners with 600 steps."""
        return Pendulum(600, ((BASELINE, 0), ("sac-noisy", 0)))


STUDY = Pendulum()


def measured(cell: Cell) -> dict[str, Any]:
    """The figures of a cell by name; a return that was never reached counts as reached after the last step."""
    reached = [steps for steps, value in cell["curve"] if value >= GOOD]
    held = {hold: cell["held"][str(hold)] for hold in HOLDS}
    bias = {} if cell["bias"] is None else {"bias": cell["bias"], "absolute bias": abs(cell["bias"])}
    return {
        "return": cell["return"],
        "jerk": cell["jerk"],
        REACHED: float(reached[0] if reached else ENV_STEPS),
        **{f"every {hold} steps": held[hold] for hold in HOLDS[1:]},
        LOST: held[HOLDS[0]] - held[8],
        **bias,
    }
