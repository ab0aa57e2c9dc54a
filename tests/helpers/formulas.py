"""Short names for the terms of hand-written recipe formulas."""

from typing import Any

import torch
from tabular import Tabular, recipe_of, rewards, seq_mean, standardised
from torch import Tensor

DISTANCES = (0.0, 0.3)


def relative(case: Tabular, *, scaled: bool = True) -> Tensor:
    """GRPO's or Dr. GRPO's advantage (N,)."""
    value, group = rewards(case), case.decisions.require("group")
    if scaled:
        return standardised(value, group)
    return value - torch.stack([value[group == key].mean() for key in group])


def z(case: Tabular) -> Tensor:
    """Log-ratio (N, T), 0 where the mask is off."""
    return (case.logp() - case.decisions.logp_old).masked_fill(~case.decisions.valid(), 0.0)


def tok(losses: Tensor, case: Tabular) -> Tensor:
    """Mean over all valid decisions."""
    return losses[case.decisions.valid()].mean()


def by_row(losses: Tensor, case: Tabular) -> Tensor:
    """Mean over rows of the mean over their valid decisions."""
    return seq_mean(losses, case.decisions.valid())


def gradients(name: str, case: Tabular, **changes: Any) -> Tensor:
    """Gradient of a recipe, some of its keys replaced, with respect to the logits."""
    recipe = recipe_of(name, **changes)
    loss, _ = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp(), case.entropy())
    (gradient,) = torch.autograd.grad(loss, case.logits)
    return gradient


def to_reference(case: Tabular) -> Tensor:
    """Log-ratio to the reference (N, T), 0 where the mask is off."""
    return (case.logp() - case.decisions.require("logp_ref")).masked_fill(~case.decisions.valid(), 0.0)


def pairs(case: Tabular, *, ordered: bool) -> list[tuple[int, int]]:
    """Pairs of rows of one group: only different outcomes with the better row first, or all in both orders."""
    value, group = rewards(case), case.decisions.require("group")
    rows = range(len(value))
    same = [(i, j) for i in rows for j in rows if i != j and group[i] == group[j]]
    return [(i, j) for i, j in same if value[i] > value[j]] if ordered else same
