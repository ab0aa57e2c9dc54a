"""Guard rails around every update: nothing non-finite goes unnoticed, and a collapse does not cost the best policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Algorithm, Metrics
from robopolicy.errors import UserError

Summary = dict[str, Any]


class TrainingDiverged(UserError):
    """A number stopped being finite; the message names it."""


ENOUGH = 10  # episodes, of whose returns a bootstrap gives an interval to rely on
TOLERATED = 0.1  # share of episodes in which the simulation may diverge


def check_metrics(metrics: Metrics, algorithm: Algorithm, update: int) -> None:
    """Refuse a NaN or infinite metric.

    Raises:
        TrainingDiverged: Names the tensor that is not finite, or else the metric.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            check_parameters(algorithm, update)
            raise TrainingDiverged(_message(f"metric '{name}'", value, update))


def check_parameters(algorithm: Algorithm, update: int) -> None:
    """Refuse NaN or infinite numbers in anything that decides future updates: weights, moments, statistics.

    Raises:
        TrainingDiverged: Names the tensor and the update.
    """
    for name, tensor in named_tensors(algorithm.state_dict()):
        # Summing is one pass without a temporary; only a suspicious sum is looked at element by element.
        if tensor.is_floating_point() and not math.isfinite(float(tensor.detach().sum())):
            bad = ~torch.isfinite(tensor)
            if bool(bad.any()):
                raise TrainingDiverged(_message(f"tensor '{name}'", float(tensor[bad].flatten()[0]), update))


def named_tensors(tree: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state with its dotted path."""
    if isinstance(tree, Tensor):
        yield where, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{where}.{index}")


def score(summary: Summary) -> float:
    """What "best" means: the success rate, or the mean return where the task defines no success."""
    return float(summary["return_mean"] if summary["success"] is None else summary["success"])


def better(new: Summary, best: Summary | None) -> bool:
    """Whether `new` replaces `best`; a tie in success goes to the higher return, then to the earlier one.

    Returns are compared between policies under which the simulation diverges alike: where rewards are costs, breaking
    it would end them.
    """
    if best is None:
        return True
    first, second = ((-_broken(each), score(each), each["return_mean"]) for each in (new, best))
    return first > second


def _broken(summary: Summary) -> float:
    """Share of the episodes that diverged beyond what is tolerated; success judges them by itself."""
    if summary["success"] is not None:
        return 0.0
    return max(summary.get("diverged", 0) / summary["n"] - TOLERATED, 0.0)


def collapsed(new: Summary, best: Summary) -> bool:
    """Whether `new` is worse than `best` beyond doubt: its interval lies entirely below that of `best`."""
    if new["success"] is None and min(new["n"], best["n"]) < ENOUGH:
        return False
    low, high = ("return_low", "return_high") if new["success"] is None else ("low", "high")
    return new[high] is not None and best[low] is not None and new[high] < best[low]


def _message(what: str, value: float, update: int) -> str:
    return f"Training diverged at update {update}: {what} is {value}; lower the learning rate or check the data."
