"""Objectives that regress log-ratios onto advantages, by squared error; their data may come from any policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, Partition, by_trajectory, by_unit
from robopolicy.core.objectives.pairs import group_pairs
from robopolicy.core.preferences import scores, squared_difference
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments
from robopolicy.limits import NotNegative

Info = dict[str, Tensor]
REGRESSED: dict[str, Partition] = {"unit": by_unit, "trajectory": by_trajectory}


@dataclass(frozen=True)
class PairRegression:
    """CoPG (S061): differences of `R - beta log pi / pi_ref` within a group, squared.

    At 0 the policy is `pi_ref exp(R / beta)` up to its norm, whatever drew the trajectories; for two of them this is
    IPO. On policy its gradient is that of RLOO with the penalised reward.
    """

    beta: NotNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the trajectories of the mean over the others of their group, each pair counted once."""
        shaped = advantage[:, 0] - self.beta * scores(logp, decisions)
        first, second = group_pairs(decisions)
        if len(first) == 0:
            return 0.0 * shaped.sum(), {}
        others = Segments(first, torch.ones_like(first, dtype=torch.bool))
        error = others.mean(squared_difference(shaped[first], shaped[second], 0.0))
        return 0.5 * error.sum() / others.size, {"residual": error.mean().detach()}


@dataclass(frozen=True)
class StepRegression:
    """Direct advantage policy optimisation (S109): `(beta log pi / pi_ref - A)^2` of each unit, a step or a chunk.

    The advantage of a unit is the mean over its decisions. At 0 the policy is `pi_ref exp(A / beta)`. With the level
    "trajectory" whole rollouts are regressed (A*-PO).
    """

    beta: NotNegative = 0.1
    level: str = "unit"  # unit | trajectory

    def __post_init__(self) -> None:
        if self.level not in REGRESSED:
            raise ValueError(f"Level must be one of {', '.join(REGRESSED)}, got {self.level!r}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the units or trajectories."""
        segments = Segments(REGRESSED[self.level](decisions), decisions.valid())
        gain = segments.mean(advantage.expand_as(logp))
        change = segments.sum(log_ratio(logp, decisions.need("logp_ref"), decisions))
        error = squared_difference(self.beta * change, gain, 0.0)
        loss = error.sum() / (segments.count > 0).sum().clamp(min=1)
        return loss, {"residual": loss.detach()}
