"""Objectives of whole groups of trajectories: preference losses and the geometric mean of ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.constraints import NonNegative
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, by_group, by_trajectory, first_rows
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments
from robopolicy.plugins import Registry


def scores(logp: Tensor, decisions: Decisions, reduction: str = "sum") -> Tensor:
    """Log-ratio `(N,)` of each row's trajectory to the reference policy."""
    return log_ratio(logp, decisions.require("logp_ref"), decisions, "sequence", reduction)[:, 0]


def preference_pairs(decisions: Decisions, outcome: Tensor) -> tuple[Tensor, Tensor]:
    """First rows (P,) of the better and of the worse trajectory, for all pairs of a group with different outcomes.

    `outcome` is (N,) or (N, 1), per row's trajectory.
    """
    first = torch.zeros(len(decisions), dtype=torch.bool, device=outcome.device)
    first[first_rows(decisions)] = True
    group, reward = by_group(decisions).squeeze(1), outcome.reshape(-1)
    better = (group.unsqueeze(1) == group.unsqueeze(0)) & (reward.unsqueeze(1) > reward.unsqueeze(0))
    better = better & first.unsqueeze(1) & first.unsqueeze(0)
    chosen, rejected = torch.nonzero(better).unbind(1)
    return chosen, rejected


def logistic_pair(chosen: Tensor, rejected: Tensor, beta: float = 0.1, margin: float = 0.0) -> Tensor:
    """`-log sigmoid(beta (chosen - rejected) - margin)` per pair `(P,)`; DPO if the scores are reference log-ratios."""
    return -functional.logsigmoid(beta * (chosen - rejected) - margin)


@dataclass(frozen=True)
class GeometricMean:
    """GMPO: the geometric mean of the clipped ratios of a trajectory, times its advantage.

    As in PPO the clip is one-sided: a log-ratio is at most `high` where the advantage is positive, and at least `-low`
    where it is negative. A geometric mean is robust to outliers, so the bounds can be wide.
    """

    low: NonNegative = 0.4  # largest decrease of a log-ratio [nats]
    high: NonNegative = 0.4  # largest increase [nats]

    def __post_init__(self) -> None:
        if self.low <= 0 or self.high <= 0:
            raise ValueError(f"Bounds of a geometric mean must be positive, got {self.low} and {self.high}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, the mean over the trajectories that have decisions, and its scalars."""
        change = log_ratio(logp, decisions.logp_old, decisions)  # (N, T)
        kept = torch.where(advantage >= 0, change.clamp(max=self.high), change.clamp(min=-self.low))
        first, valid = first_rows(decisions), decisions.valid()
        rows = Segments(by_trajectory(decisions), valid)
        ratio = rows.broadcast(rows.mean(kept))[first, :1].exp()  # (S, 1)
        value = rows.broadcast(rows.mean(advantage.expand(decisions.shape)))[first, :1]
        nonempty = rows.broadcast((rows.count > 0).to(logp.dtype))[first, :1] > 0
        clipped = (kept != change).detach().to(logp.dtype)
        info = {"clip_fraction": masked_mean(clipped, valid), "ratio_mean": masked_mean(ratio.detach(), nonempty)}
        return -masked_mean(ratio * value, nonempty), info


Info = dict[str, Tensor]


@dataclass(frozen=True)
class DirectPreference:
    """DPO: `-log sigmoid(beta (r+ - r-))` over all ordered pairs of a group, r = log pi / pi_ref of the trajectory."""

    beta: NonNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Loss, the mean over the pairs (0 if there are none), and its scalars."""
        score = scores(logp, decisions)
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        loss = mean_or_zero(logistic_pair(score[chosen], score[rejected], self.beta))
        return loss, pair_accuracy(score, chosen, rejected)


def mean_or_zero(loss: Tensor) -> Tensor:
    """Mean of the loss; 0 if it is empty."""
    return loss.sum() / max(loss.numel(), 1)


def pair_accuracy(score: Tensor, chosen: Tensor, rejected: Tensor) -> Info:
    """Fraction of the pairs that the scores rank correctly."""
    return {"accuracy": mean_or_zero((score[chosen] > score[rejected]).to(score.dtype)).detach()}


@dataclass(frozen=True)
class KahnemanTversky:
    """KTO: every trajectory is desirable (positive advantage) or undesirable, relative to a reference point.

    `w (1 - sigmoid(+-beta (r - z)))` with `r = log pi / pi_ref`, + for desirable trajectories. The reference point z is
    the detached mean of r over the batch, at least 0, an estimate of KL(pi || pi_ref).
    """

    beta: NonNegative = 0.1
    desirable: float = 1.0  # weight w of desirable trajectories
    undesirable: float = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Loss, the mean over the trajectories, and its scalars."""
        first = first_rows(decisions)
        score, good = scores(logp, decisions)[first], advantage[first, 0] > 0
        point = score.detach().mean().clamp(min=0.0)
        margin = self.beta * (score - point)
        loss = torch.where(good, self.desirable * torch.sigmoid(-margin), self.undesirable * torch.sigmoid(margin))
        return loss.mean(), {"kl_ref": point}


Objective = Callable[[Decisions, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


OBJECTIVES: Registry[Callable[..., object]] = Registry(
    "parts.objective",
    {"direct_preference": DirectPreference, "geometric_mean": GeometricMean, "kahneman_tversky": KahnemanTversky},
)
