"""The objective on one ratio per trajectory that is a mean of clipped ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, by_trajectory, first_rows
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments
from robopolicy.limits import NotNegative


@dataclass(frozen=True)
class GeometricMean:
    """GMPO: the geometric mean of the ratios of a trajectory, each of them clipped before, times its advantage.

    As in PPO only the side is clipped on which the objective could grow: a log-ratio counts at most `high` where the
    advantage is positive, and at least `-low` where it is negative. One outlier weighs little in a geometric mean, so
    that the bounds can be wide. Without bounds it is GSPO's ratio without its clip.
    """

    low: NotNegative = 0.4  # nats that a log-ratio may fall
    high: NotNegative = 0.4  # nats that it may rise

    def __post_init__(self) -> None:
        if self.low <= 0 or self.high <= 0:
            raise ValueError(f"Bounds of a geometric mean must be positive, got {self.low} and {self.high}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over the trajectories that have decisions."""
        change = log_ratio(logp, decisions.logp_old, decisions)  # (N, T)
        kept = torch.where(advantage >= 0, change.clamp(max=self.high), change.clamp(min=-self.low))
        first, valid = first_rows(decisions), decisions.valid()
        rows = Segments(by_trajectory(decisions), valid)
        ratio = rows.spread(rows.mean(kept))[first, :1].exp()  # (S, 1)
        value = rows.spread(rows.mean(advantage.expand(decisions.shape)))[first, :1]
        there = rows.spread((rows.count > 0).to(logp.dtype))[first, :1] > 0
        clipped = (kept != change).detach().to(logp.dtype)
        info = {"clip_fraction": masked_mean(clipped, valid), "ratio_mean": masked_mean(ratio.detach(), there)}
        return -masked_mean(ratio * value, there), info
