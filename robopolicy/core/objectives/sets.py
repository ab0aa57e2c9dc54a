"""Objectives on the good and the bad trajectories of a group as two sets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, first_rows
from robopolicy.core.preferences import scores
from robopolicy.limits import NotNegative

Info = dict[str, Tensor]


@dataclass(frozen=True)
class KahnemanTversky:
    """KTO: every trajectory is desirable or not by itself; gains and losses are felt against a reference point.

    `w (1 - sigmoid(+-beta (r - z)))` with `r = log pi / pi_ref`, + for a positive advantage. The reference point z is
    the mean of r over the batch, never negative and without gradient, an estimate of KL(pi || pi_ref).
    """

    beta: NotNegative = 0.1
    desirable: float = 1.0  # weight w of the good ones
    undesirable: float = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the trajectories."""
        first = first_rows(decisions)
        score, good = scores(logp, decisions)[first], advantage[first, 0] > 0
        point = score.detach().mean().clamp(min=0.0)
        margin = self.beta * (score - point)
        felt = torch.where(good, self.desirable * torch.sigmoid(-margin), self.undesirable * torch.sigmoid(margin))
        return felt.mean(), {"kl_ref": point}
