"""Bonuses for `Shape`: what is added to the advantage of a row or decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import log_ratio

Bonus = Callable[[Decisions], Tensor]
"""`decisions -> (N, 1) per row or (N, T) per decision`."""


@dataclass(frozen=True)
class ReferencePenalty:
    """`-coef log(pi_old / pi_ref)` of the trajectory: the KL to the reference as part of the reward."""

    coef: float = 0.1

    def __call__(self, decisions: Decisions) -> Tensor:
        """Bonus `(N, 1)`."""
        return -self.coef * log_ratio(decisions.logp_old, decisions.need("logp_ref"), decisions, "sequence")[:, :1]


BONUSES: dict[str, Callable[..., object]] = {"reference_penalty": ReferencePenalty}
