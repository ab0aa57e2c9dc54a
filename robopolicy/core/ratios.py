"""Probability ratios: their level, the reduction of log-ratios, and their bounds.

Clip ranges of different papers are not comparable: DPPO averages over action dimensions, ReinFlow sums over the chain
and divides by (steps x dimensions), others sum. The reduction is therefore always explicit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, Partition, by_trajectory, by_unit
from robopolicy.core.segments import Segments
from robopolicy.plugins import Registry

Bound = float | Tensor  # a number or (N, T)
Bounds = Callable[[Decisions], tuple[Bound, Bound]]
"""Lowest and highest ratio at which the clipped surrogates have a gradient."""

LEVELS: dict[str, Partition | None] = {"token": None, "unit": by_unit, "sequence": by_trajectory}
REDUCTIONS = ("sum", "mean", "normalized")


def log_ratio(
    numerator: Tensor,
    denominator: Tensor,
    decisions: Decisions,
    level: str = "token",
    reduction: str = "sum",
    count: float = 1.0,
) -> Tensor:
    """Log-ratio of each decision at the given level; masked decisions contribute nothing.

    Args:
        numerator: (N, T) log-probabilities of the trained policy.
        denominator: (N, T) log-probabilities of the policy it is compared with.
        decisions: Batch with mask and ids.
        level: One ratio per decision ("token"), chunk or turn ("unit"), or trajectory ("sequence").
        reduction: Over the decisions of the level: "sum", "mean" (geometric mean of the ratios, GSPO), or "normalized".
        count: Divisor of "normalized", e.g. steps x action dimensions (ReinFlow), or dimensions at token level.
    """
    if level not in LEVELS:
        raise ValueError(f"Ratio level must be one of {tuple(LEVELS)}, got {level!r}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"Ratio reduction must be one of {REDUCTIONS}, got {reduction!r}.")
    difference = numerator - denominator
    if decisions.mask is not None:
        difference = difference.masked_fill(~decisions.valid(), 0.0)
    partition = LEVELS[level]
    ids = decisions.unit if level == "unit" else decisions.trajectory
    if partition is not None and ids is None:  # each row is a unit or trajectory
        if difference.shape[1] > 1:
            difference = _row_reduce(difference, decisions, reduction).unsqueeze(1).expand_as(difference)
    elif partition is not None:
        segments = Segments(partition(decisions), decisions.valid())
        pooled = segments.mean(difference) if reduction == "mean" else segments.sum(difference)
        difference = segments.broadcast(pooled)
    return difference / count if reduction == "normalized" else difference


def _row_reduce(difference: Tensor, decisions: Decisions, reduction: str) -> Tensor:
    if reduction != "mean":
        return difference.sum(1)
    if decisions.mask is None:
        return difference.mean(1)
    return difference.sum(1) / decisions.valid().sum(1).clamp(min=1)


@dataclass(frozen=True)
class Hierarchy:
    """Hierarchical log-ratio: a budget per trajectory or chunk, and a smaller one per decision.

    Upward and downward mean drifts of the outer level are rolled back beyond their budgets, and the deviation of a
    decision from its outer level is clipped. Within all budgets the result equals the plain log-ratio. Reconstructed
    from a description; no reference implementation was available. Source: Li et al. 2026, FiberPO.
    """

    outer: str = "sequence"  # level of the drift budget: "sequence" or "unit"
    budget_up: NonNegative = 0.2  # of the mean upward drift [nats]
    budget_down: NonNegative = 0.1  # of the mean downward drift [nats], smaller than budget_up
    residual: NonNegative = 0.02  # largest deviation of a decision from its outer level [nats]
    slope: float | None = None  # of the rollback; None: number of decisions of the outer level

    def __post_init__(self) -> None:
        if LEVELS.get(self.outer) is None:
            raise ValueError(f"Hierarchy.outer must be 'sequence' or 'unit', got {self.outer!r}.")

    def __call__(self, difference: Tensor, decisions: Decisions) -> Tensor:
        """Gated log-ratio `(N, T)`, for the surrogate "importance_sampling"."""
        partition = LEVELS[self.outer]
        assert partition is not None
        segments = Segments(partition(decisions), decisions.valid())
        up = segments.broadcast(segments.mean(difference.clamp(min=0.0)))
        down = segments.broadcast(segments.mean((-difference).clamp(min=0.0)))
        slope = segments.broadcast(segments.count).to(difference) if self.slope is None else self.slope
        base = self._rollback(up, self.budget_up, slope) - self._rollback(down, self.budget_down, slope)
        sign = torch.where(difference >= 0, 1.0, -1.0)
        same, other = torch.where(difference >= 0, up, down), torch.where(difference >= 0, down, up)
        own = sign * (sign * difference - same)
        gate = base + self._clip(own) - self._clip(-sign * other)
        return gate if decisions.mask is None else gate.masked_fill(~decisions.valid(), 0.0)

    def _clip(self, value: Tensor) -> Tensor:
        return value.clamp(-self.residual, self.residual)

    @staticmethod
    def _rollback(drift: Tensor, budget: float, slope: float | Tensor) -> Tensor:
        back = ((slope + 1.0) * budget - slope * drift).clamp(min=0.0)
        return torch.where(drift <= budget, drift, back)


def importance_weight(decisions: Decisions, level: str = "token", cap: float = 2.0) -> Tensor:
    """Detached weight old / behaviour `(N, T)`, at most `cap`, for data of another sampler or inference engine.

    The ratio of the surrogate is new / old, so that weight x ratio = new / behaviour.
    """
    mismatch = log_ratio(decisions.logp_old, decisions.require("logp_behaviour"), decisions, level)
    return mismatch.detach().clamp(max=math.log(cap)).exp()


@dataclass(frozen=True)
class ConstantBounds:
    """Ratio in [1 - low, 1 + high]; symmetric if `high` is None."""

    low: NonNegative = 0.2
    high: NonNegative | None = None

    def __call__(self, decisions: Decisions) -> tuple[Bound, Bound]:
        """Bounds, the same for every decision."""
        return 1.0 - self.low, 1.0 + (self.low if self.high is None else self.high)


@dataclass(frozen=True)
class DepthBounds:
    """Clip range that grows exponentially along the denoising chain (DPPO), narrowest at the noisiest step.

    `clip(i) = first + (last - first) (exp(rate i / (steps - 1)) - 1) / (exp(rate) - 1)`, and `last` for one step.
    """

    first: NonNegative = 0.001  # half-width at depth 0
    last: NonNegative = 0.01  # half-width at depth steps - 1
    steps: PositiveInt = 10  # trained denoising steps
    rate: Positive = 3.0

    def __call__(self, decisions: Decisions) -> tuple[Bound, Bound]:
        """Bounds `(N, T)` from the depth of each decision."""
        if self.steps == 1:
            return 1.0 - self.last, 1.0 + self.last
        progress = decisions.depths().to(decisions.logp_old.dtype) / (self.steps - 1)
        width = self.first + (self.last - self.first) * torch.expm1(self.rate * progress) / math.expm1(self.rate)
        return 1.0 - width, 1.0 + width


BOUNDS: Registry[Callable[..., Bounds]] = Registry("parts.bounds", {"constant": ConstantBounds})


def covariance(logp: Tensor, advantage: Tensor, decisions: Decisions) -> Tensor:
    """Contribution `(N, T)` of each decision to Cov(logp, A), `(logp - mean) (A - mean)` (Cui et al. 2025).

    Its mean times the step size approximates the decrease of a softmax policy's entropy. 0 where the mask is off.
    """
    mask = decisions.valid()
    advantage = advantage.expand_as(logp)
    product = (logp - masked_mean(logp, mask)) * (advantage - masked_mean(advantage, mask))
    return product.masked_fill(~mask, 0.0)


def count_for_fraction(mask: Tensor, fraction: float) -> int:
    """Number of entries in a fraction of the valid ones, rounded down; at least one if the fraction is positive."""
    total = int(mask.sum())
    return min(max(int(fraction * total), 1), total) if fraction > 0 else 0


def topk_mask(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """Bool mask `(N, T)` of the `count` valid entries with the highest values."""
    chosen = torch.zeros_like(mask).flatten()
    if count > 0:
        chosen[values.masked_fill(~mask, -torch.inf).flatten().topk(min(count, chosen.numel())).indices] = True
    return chosen.view_as(mask) & mask
