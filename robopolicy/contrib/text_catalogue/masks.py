"""Masks of single methods that select the decisions in the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, Positive, PositiveFraction, PositiveInt
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions, by_trajectory, unit_numbers
from robopolicy.core.ratios import count_for_fraction, topk_mask
from robopolicy.core.segments import Segments


@dataclass(frozen=True)
class FirstUnits:
    """Keep the first units of trajectories, e.g. a reflection or critique without the responses to it.

    Source: Yao et al. 2023, Xi et al. 2025.
    """

    count: PositiveInt = 1

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        return unit_numbers(decisions) < self.count


@dataclass(frozen=True)
class KeyMask:
    """Drop decisions marked in `extra[key]`, bool (N, T): e.g. the choice of a mode."""

    key: str

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        return ~decisions.require_extra(self.key, per_decision=True)


@dataclass(frozen=True)
class Source:
    """Keep rows of one source, e.g. 0: sampled from the policy."""

    source: NonNegativeInt

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        return (decisions.require("source") == self.source).unsqueeze(1).expand(decisions.shape)


@dataclass(frozen=True)
class ProtectedTokens:
    """Drop decisions marked in `extra[key]`, bool (N, T), if the advantage is negative (DialTree, Guo et al. 2025).

    Structural tokens, e.g. of the format, are then never unlearned because of later decisions.
    """

    key: str

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        return ~(decisions.require_extra(self.key, per_decision=True) & (advantage < 0)).expand(decisions.shape)


@dataclass(frozen=True)
class BlamedTurn:
    """Keep only the blamed unit of a failed trajectory: `extra[key]` int (N,), -1 for all.

    Source: A2P, West et al. 2025.

    It uses outcomes and therefore precedes masks of single decisions.
    """

    key: str = "blamed_unit"

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        blamed = decisions.require_extra(self.key, per_decision=True)
        return (decisions.require("unit") == blamed) | (blamed < 0) | (outcome(decisions) > 0)


@dataclass(frozen=True)
class HighVarianceRows:
    """Keep the share of trajectories with the largest variance of advantages: some of the best and of the worst.

    Source: D3S, Wang et al. 2025.

    Each trajectory counts with the mean over its decisions. The advantages are still relative to complete groups.
    """

    share: Fraction = 0.5

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        mask = decisions.valid()
        segments = Segments(by_trajectory(decisions), mask)
        present = torch.nonzero(segments.count > 0).squeeze(1)
        values = segments.mean(advantage.expand(decisions.shape))[present]
        count = max(int(self.share * len(values)), min(2, len(values)))
        kept = torch.zeros(segments.size, dtype=torch.bool, device=mask.device)
        kept[present[most_varied(values, count)]] = True
        return segments.broadcast(kept) & mask


def most_varied(values: Tensor, count: int) -> Tensor:
    """Return the indices (count,) of the `count` of values `(N,)` with the largest variance.

    They consist of smallest and largest values; all splits are compared.
    """
    order = torch.argsort(values, stable=True)
    ordered = values[order]
    lowest = torch.arange(count + 1, device=values.device)  # number of smallest values
    total, square = (torch.cat([power.new_zeros(1), power.cumsum(0)]) for power in (ordered, ordered**2))
    start = len(values) - count + lowest  # index of the first of the largest values
    mean = (total[lowest] + total[-1] - total[start]) / count
    variance = (square[lowest] + square[-1] - square[start]) / count - mean**2
    split = int(variance.argmax())
    return torch.cat([order[:split], order[len(values) - count + split :]])


@dataclass(frozen=True)
class Informative:
    """Keep the share of decisions with the largest `|A| H`.

    Source: D3S, Wang et al. 2025.
    """

    share: Fraction = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        weight = advantage.abs() * decisions.require("entropy")
        mask = decisions.valid()
        return topk_mask(weight.expand(decisions.shape), mask, count_for_fraction(mask, self.share))


@dataclass(frozen=True)
class UncertainTokens:
    """Keep decisions that were sampled with a probability below `below`.

    Source: Guo et al. 2025.
    """

    below: PositiveFraction = 0.9

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        return decisions.logp_old < math.log(self.below)


@dataclass(frozen=True)
class PredictedKL:
    """Drop decisions whose gradient step is predicted to move the policy too far or to reduce the objective.

    Source: CAPO, Melo et al. 2025.

    The model of the step is second-order in the logits. With d = A (onehot(a) - p), the gradient of
    A log p_a, and F = diag(p) - p p^T, a step `rate` d shifts the policy by KL = rate^2 d'Fd / 2 and changes A log p_a
    by rate |d|^2 - rate^2 A d'Fd / 2. `extra["collision"]` and `extra["collision3"]` (N, T) are sum p^2 and sum p^3.
    """

    rate: Positive = 1.0
    shift: NonNegative = math.inf  # largest KL [nats]
    gain: float = -math.inf  # smallest change
    share: Fraction = 1.0  # maximum fraction of dropped decisions; those with the largest shifts are dropped

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        p, valid = decisions.logp_old.exp(), decisions.valid()
        squares, cubes = decisions.require_extra("collision"), decisions.require_extra("collision3")
        norm = advantage.square() * (1.0 - 2.0 * p + squares)
        curvature = advantage.square() * (p - 2.0 * p.square() + cubes - (p - squares).square())
        shift = 0.5 * self.rate**2 * curvature
        unstable = (shift > self.shift) | (self.rate * norm - advantage * shift < self.gain)
        ranked = torch.where(unstable, shift, -torch.inf)
        return ~(unstable & topk_mask(ranked, valid, count_for_fraction(valid, self.share)))
