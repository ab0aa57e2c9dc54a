"""Pairwise objectives on trajectory scores: logistic (DPO and relatives) and squared difference (IPO, REBEL, CoPG)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.core.decisions import Decisions, by_group, first_rows
from robopolicy.core.ratios import log_ratio


def scores(logp: Tensor, decisions: Decisions, reduction: str = "sum") -> Tensor:
    """Log-ratio to the reference policy of each row's trajectory `(N,)`; rows of one trajectory share it."""
    return log_ratio(logp, decisions.need("logp_ref"), decisions, "sequence", reduction)[:, 0]


def preference_pairs(decisions: Decisions, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of trajectories of one group with differing outcome.

    Args:
        decisions: Gives group and trajectory ids.
        outcome: (N,) or (N, 1) outcome of each row's trajectory.

    Returns:
        Row indices (P,) of the better and of the worse trajectory, each represented by its first row.
    """
    first = torch.zeros(len(decisions), dtype=torch.bool, device=outcome.device)
    first[first_rows(decisions)] = True
    group, reward = by_group(decisions).squeeze(1), outcome.reshape(-1)
    better = (group.unsqueeze(1) == group.unsqueeze(0)) & (reward.unsqueeze(1) > reward.unsqueeze(0))
    better = better & first.unsqueeze(1) & first.unsqueeze(0)
    chosen, rejected = torch.nonzero(better).unbind(1)
    return chosen, rejected


def logistic_pair(chosen: Tensor, rejected: Tensor, beta: float = 0.1, margin: float = 0.0) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected) - margin)` per pair `(P,)`; with reference log-ratios as scores, DPO."""
    return -functional.logsigmoid(beta * (chosen - rejected) - margin)
