"""Paired comparison of two results: the same seeds under two policies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import PairedDifference, paired_difference
from robopolicy.evaluation.result import EvalResult


@dataclass(frozen=True, eq=False)
class Comparison:
    """Second minus first on their common seeds."""

    seeds: NDArray[np.int64]  # (n,)
    outcomes: NDArray[np.bool_] | None  # (n, 2) success of first and second; None where the task defines no success
    success: PairedDifference | None
    returns: PairedDifference

    @property
    def headline(self) -> PairedDifference:
        """The difference to report: success where it is defined, else return."""
        return self.success or self.returns

    def sentence(self, first: str = "the first", second: str = "the second") -> str:
        """State the result in words, with names for the two policies."""
        paired, interval = self.headline, self.headline.difference
        if self.success is not None:
            size, low, high = (f"{100 * value:+.1f}" for value in (interval.estimate, interval.low, interval.high))
            amount = f"{size} points of success [{low}, {high}]"
        else:
            amount = f"{interval.estimate:+.3g} return [{interval.low:+.3g}, {interval.high:+.3g}]"
        sure = "better" if interval.low > 0 else "worse" if interval.high < 0 else "not distinguishable"
        verdict = (
            f"{second} is {sure} than {first}" if sure != "not distinguishable" else f"{second} and {first} are {sure}"
        )
        return (
            f"{verdict}: {amount}; better on {paired.wins}, worse on {paired.losses}, equal on {paired.ties} of "
            f"{interval.n} common seeds, {format_p(paired.p_value)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "n": int(self.seeds.size),
            "success": None if self.success is None else asdict(self.success),
            "return": asdict(self.returns),
        }


def compare(first: EvalResult, second: EvalResult) -> Comparison:
    """Pair two results by episode seed.

    Raises:
        UserError: They come from different tasks, share fewer than two seeds, or the seeds mean nothing.
    """
    if first.task != second.task:
        raise UserError(f"Only results of one task can be compared, got {first.task} and {second.task}.")
    if not (first.seeded and second.seeded):
        raise UserError(
            f"The backend of {first.task} has no repeatable episodes to pair; read the two intervals instead."
        )
    seeds, a, b = np.intersect1d(first.seeds, second.seeds, assume_unique=True, return_indices=True)
    if seeds.size < 2:
        raise UserError(
            f"A paired comparison needs common seeds, found {seeds.size}; evaluate both with the same --seed."
        )
    outcomes = None
    if first.success is not None and second.success is not None:
        outcomes = np.stack([first.success[a], second.success[b]], 1)
    return Comparison(
        seeds=seeds,
        outcomes=outcomes,
        success=None if outcomes is None else paired_difference(outcomes[:, 0], outcomes[:, 1]),
        returns=paired_difference(first.returns[a], second.returns[b]),
    )


def format_p(p: float) -> str:
    """Write a p-value as people read it."""
    return f"p = {p:.2f}" if p >= 0.095 else f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"
