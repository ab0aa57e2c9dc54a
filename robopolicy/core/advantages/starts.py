"""Where the advantage starts: what a recipe hands to the first stage."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.advantages.pipeline import outcome
from robopolicy.core.decisions import Decisions

Start = Callable[[Decisions], Tensor]
"""`decisions -> (N, 1) per row or (N, T) per decision`."""


def ones(decisions: Decisions) -> Tensor:
    """1 for every row `(N, 1)`: what is imitated has no reward."""
    return decisions.logp_old.new_ones(len(decisions), 1)


def given(decisions: Decisions, *, key: str) -> Tensor:
    """A recorded advantage, `extra[key]` (N,) or (N, T)."""
    return decisions.need_extra(key, per_decision=True)


STARTS: dict[str, Callable[..., object]] = {"given": given, "ones": ones, "outcome": outcome}
