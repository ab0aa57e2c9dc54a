"""The objective on one ratio per trajectory that is a mean of clipped ones."""

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
    """Log-ratio to the reference policy of each row's trajectory `(N,)`; rows of one trajectory share it."""
    return log_ratio(logp, decisions.require("logp_ref"), decisions, "sequence", reduction)[:, 0]


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


@dataclass(frozen=True)
class GeometricMean:
    """GMPO: the geometric mean of the ratios of a trajectory, each of them clipped before, times its advantage.

    As in PPO only the side is clipped on which the objective could grow: a log-ratio counts at most `high` where the
    advantage is positive, and at least `-low` where it is negative. One outlier weighs little in a geometric mean, so
    that the bounds can be wide. Without bounds it is GSPO's ratio without its clip.
    """

    low: NonNegative = 0.4  # nats that a log-ratio may fall
    high: NonNegative = 0.4  # nats that it may rise

    def __post_init__(self) -> None:
        if self.low <= 0 or self.high <= 0:
            raise ValueError(f"Bounds of a geometric mean must be positive, got {self.low} and {self.high}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over the trajectories that have decisions."""
        change = log_ratio(logp, decisions.logp_old, decisions)  # (N, T)
        kept = torch.where(advantage >= 0, change.clamp(max=self.high), change.clamp(min=-self.low))
        first, valid = first_rows(decisions), decisions.valid()
        rows = Segments(by_trajectory(decisions), valid)
        ratio = rows.broadcast(rows.mean(kept))[first, :1].exp()  # (S, 1)
        value = rows.broadcast(rows.mean(advantage.expand(decisions.shape)))[first, :1]
        there = rows.broadcast((rows.count > 0).to(logp.dtype))[first, :1] > 0
        clipped = (kept != change).detach().to(logp.dtype)
        info = {"clip_fraction": masked_mean(clipped, valid), "ratio_mean": masked_mean(ratio.detach(), there)}
        return -masked_mean(ratio * value, there), info


Info = dict[str, Tensor]


@dataclass(frozen=True)
class DirectPreference:
    """DPO: `-log sigmoid(beta (r+ - r-))` over all ordered pairs of a group, r = log pi / pi_ref of the trajectory."""

    beta: NonNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Mean over the pairs; 0 where no two outcomes differ."""
        score = scores(logp, decisions)
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        return mean_or_zero(logistic_pair(score[chosen], score[rejected], self.beta)), agreement(
            score, chosen, rejected
        )


def mean_or_zero(loss: Tensor) -> Tensor:
    """Mean, and 0 of nothing."""
    return loss.sum() / max(loss.numel(), 1)


def agreement(score: Tensor, chosen: Tensor, rejected: Tensor) -> Info:
    """Share of the pairs that the scores put in the right order."""
    return {"accuracy": mean_or_zero((score[chosen] > score[rejected]).to(score.dtype)).detach()}


@dataclass(frozen=True)
class KahnemanTversky:
    """KTO: every trajectory is desirable or not by itself; gains and losses are felt against a reference point.

    `w (1 - sigmoid(+-beta (r - z)))` with `r = log pi / pi_ref`, + for a positive advantage. The reference point z is
    the mean of r over the batch, never negative and without gradient, an estimate of KL(pi || pi_ref).
    """

    beta: NonNegative = 0.1
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


Objective = Callable[[Decisions, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


OBJECTIVES: Registry[Callable[..., object]] = Registry(
    "parts.objective",
    {
        "direct_preference": DirectPreference,
        "geometric_mean": GeometricMean,
        "kahneman_tversky": KahnemanTversky,
    },
)
