"""Penalties and a controller of single methods: imitation, a KL barrier, an adaptive coefficient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.core.advantage import outcome
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, by_group
from robopolicy.core.regularizers import CoefficientController
from robopolicy.core.segments import Segments


@dataclass(frozen=True)
class Imitation:
    """Mean negative log-likelihood of the decisions of some rows; 0 without such rows."""

    rows: str = "all"  # all | best (highest outcome of their group, if not all are equal) | shown (source is not 0)

    def __post_init__(self) -> None:
        if self.rows not in ("all", "best", "shown"):
            raise ValueError(f"Imitation rows must be 'all', 'best' or 'shown', got {self.rows!r}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Compute the penalty, a scalar."""
        keep = decisions.valid()
        if self.rows == "shown":
            keep = keep & (decisions.require("source") != 0).unsqueeze(1)
        elif self.rows == "best":
            reward = outcome(decisions)
            group = Segments(by_group(decisions), torch.ones_like(reward, dtype=torch.bool))
            keep = keep & group.broadcast(group.differs(reward)) & (reward >= group.broadcast(group.largest(reward)))
        return masked_mean(-logp, keep)


@dataclass(frozen=True)
class KLBarrier:
    """Penalty on KL(old || new) above `limit` with the detached weight `max(0, slope (KL - limit))`.

    There is no penalty and no gradient below the limit (DisCO, Li et al. 2025).
    """

    limit: NonNegative = 1e-4  # nats per decision
    slope: float = 1e3

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Compute the penalty, a scalar."""
        divergence = masked_mean(decisions.logp_old - logp, decisions.valid())
        return (self.slope * (divergence - self.limit)).clamp(min=0.0).detach() * divergence


class AdaptiveKL(CoefficientController):
    """Controller that multiplies the coefficient by `1 + clip(measured / target - 1, -0.2, 0.2) * count / horizon`.

    Source: Ziegler et al.

    `count` is the number of trajectories; batches of more than `horizon` count as that many, so the factor is positive.
    """

    def __init__(self, value: float, target: Positive, horizon: PositiveInt) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, measured: float, count: int = 1) -> None:
        """Raise the coefficient if the measured quantity exceeds the target, otherwise lower it."""
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(count / self.horizon, 1.0)
