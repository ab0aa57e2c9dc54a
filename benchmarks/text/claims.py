"""Claims of the recipes: a quantity that improves over another recipe, and the verdict from the cells.

A claim names one quantity of a cell. For every seed the recipe is compared with another one on the same task from the
same checkpoint; the interval is Student's over the seeds, so that three seeds do not resolve small effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.themes import contributed
from robopolicy.evaluation.intervals import Interval, student_mean
from robopolicy.text.evaluation import pass_at_k

Cell = Mapping[str, Any]
HARD = 1  # largest number of solved base samples on a hard prompt
SEEDS = 3  # for a verdict
GRADES = ("efficiency", "advantage", "safe", "grounding", "legal", "analysis", "consistency", "verdict", "refined")
CONFIRMED, UNSEEN, OPPOSITE = "confirmed", "not seen at this scale", "the opposite at this scale"


def _held_out(name: str) -> Callable[[Cell], float | None]:
    return lambda cell: cell["after"].get(name)


def _training(*names: str) -> Callable[[Cell], float | None]:
    return lambda cell: next((cell["training"][name] for name in names if name in cell["training"]), None)


def _pass_at(k: int) -> Callable[[Cell], float]:
    def measure(cell: Cell) -> float:
        return _solved(cell["after"]["wins"], cell["after"]["samples"], k)

    return measure


def _hard(cell: Cell) -> float | None:
    """pass@1 on prompts where the base almost never succeeds."""
    wins = [after for before, after in zip(cell["base"]["wins"], cell["after"]["wins"], strict=True) if before <= HARD]
    return _solved(wins, cell["after"]["samples"], 1) if wins else None


def _solved(wins: Sequence[int], samples: int, k: int) -> float:
    return float(pass_at_k(torch.tensor(wins), samples, k).mean())


QUANTITIES: dict[str, Callable[[Cell], float | None]] = {
    "accuracy": lambda cell: cell["after"]["correct"] / cell["after"]["n"],
    "pass@1": _pass_at(1),
    "pass@8": _pass_at(8),
    "hard prompts": _hard,
    "entropy": _held_out("entropy"),
    "tokens": _held_out("length"),
    "format": _held_out("format"),
    **{name: _held_out(name) for name in GRADES},
    "tool calls": _held_out("calls"),
    "informative rows": _training("nonzero_advantage_fraction", "informative"),
    "dead groups": _training("degenerate"),
    "clipped": _training("clip_fraction"),
    "drift": _training("approx_kl"),
}
"""Name -> its value in a cell, None where the cell has none.

Held-out prompts: accuracy of the most likely answers, pass@k, pass@1 of hard prompts (where the base solves at most one
sample), entropy [nats per token], tokens and tool calls per answer, share of well-formed answers, further grades of the
tasks (`GRADES`). Training, as means over the updates: rows with a nonzero advantage, groups with equal verdicts,
clipped decisions, and KL of the ratios [nats per decision].
"""


@dataclass(frozen=True)
class Claim:
    """A quantity that should be larger, or smaller, than with another recipe."""

    quantity: str  # a key of QUANTITIES
    larger: bool = True
    against: str = "grpo"

    def __str__(self) -> str:
        return f"{'more' if self.larger else 'less'} {self.quantity} than {self.against}"


BETTER = Claim("accuracy")
"""Claim of recipes without another claim."""

CLAIMS: dict[str, Claim] = {
    "grpo": Claim("accuracy", against="reinforce"),
    "dapo": Claim("entropy"),
    "clip_cov": Claim("entropy"),
    "kl_cov": Claim("entropy"),
    "pass_at_k": Claim("pass@8"),
    "dr_grpo": Claim("tokens", larger=False),
    "nft": Claim("accuracy", against="rft"),
    "reinforce_pp_baseline": Claim("accuracy", against="reinforce_pp"),
    "reinforce": Claim("accuracy", against="rft"),
    **{name: Claim(**row) for name, row in contributed("text", "claims").items()},
}
"""Recipe -> its claim; contrib themes add claims by `[text.claims]`, with the fields of `Claim` as keys."""


def claim_of(recipe: str) -> Claim:
    """The claim of a recipe."""
    return CLAIMS.get(recipe, BETTER)


def difference(claim: Claim, own: Sequence[Cell], other: Sequence[Cell]) -> Interval | None:
    """Mean over the common seeds, own minus other; None where no seed has the quantity in both."""
    measure = QUANTITIES[claim.quantity]
    theirs = {cell["seed"]: measure(cell) for cell in other}
    pairs = [(measure(cell), theirs.get(cell["seed"])) for cell in own]
    gaps = [mine - their for mine, their in pairs if mine is not None and their is not None]
    return student_mean(gaps) if gaps else None


def verdict(claim: Claim, gap: Interval | None) -> str:
    """Confirmed where the whole interval is on the claimed side, with at least `SEEDS` seeds."""
    if gap is None:
        return "not measured"
    if gap.n < SEEDS:
        return f"{gap.n} of {SEEDS} seeds"
    if gap.low > 0 or gap.high < 0:
        return CONFIRMED if (gap.low > 0) == claim.larger else OPPOSITE
    return UNSEEN


def mean_of(name: str, cells: Sequence[Cell]) -> float | None:
    """Mean of a quantity over the cells that have it."""
    found = [value for cell in cells if (value := QUANTITIES[name](cell)) is not None]
    return fmean(found) if found else None
