"""Mask rules of single methods for the decisions that enter the loss."""

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
    """Keep the first units of trajectories: what follows a reflection or a critique is another's.

    Source: Yao et al. 2023, Xi et al. 2025.
    """

    count: PositiveInt = 1

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return unit_numbers(decisions) < self.count


@dataclass(frozen=True)
class KeyMask:
    """Drop decisions marked in `extra[key]`, bool (N, T): e.g. the choice of a mode while its skills are refined."""

    key: str

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return ~decisions.require_extra(self.key, per_decision=True)


@dataclass(frozen=True)
class Source:
    """Keep rows of one source, e.g. 0 for those the policy itself drew."""

    source: NonNegativeInt

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return (decisions.require("source") == self.source).unsqueeze(1).expand(decisions.shape)


@dataclass(frozen=True)
class ProtectedTokens:
    """Drop decisions marked in `extra[key]`, bool (N, T), where the advantage is negative (DialTree, Guo et al. 2025).

    A marker of structure (a format token, the choice of a skill) is then never unlearned for what came after it.
    """

    key: str

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return ~(decisions.require_extra(self.key, per_decision=True) & (advantage < 0)).expand(decisions.shape)


@dataclass(frozen=True)
class BlamedTurn:
    """Of a failed trajectory keep only the unit that a judge blames: `extra[key]` int (N,), -1 for all.

    Source: A2P, West et al. 2025.

    It reads outcomes, and therefore stands before rules that drop single decisions.
    """

    key: str = "blamed_unit"

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        blamed = decisions.require_extra(self.key, per_decision=True)
        return (decisions.require("unit") == blamed) | (blamed < 0) | (outcome(decisions) > 0)


@dataclass(frozen=True)
class HighVarianceRows:
    """Keep the share of all trajectories whose advantages vary most: some of the best, some of the worst.

    Source: D3S, Wang et al. 2025.

    Each counts with the mean over its decisions. The advantages themselves stay those of the whole groups.
    """

    share: Fraction = 0.5

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        mask = decisions.valid()
        segments = Segments(by_trajectory(decisions), mask)
        playing = torch.nonzero(segments.count > 0).squeeze(1)
        worth = segments.mean(advantage.expand(decisions.shape))[playing]
        count = max(int(self.share * len(worth)), min(2, len(worth)))
        kept = torch.zeros(segments.size, dtype=torch.bool, device=mask.device)
        kept[playing[most_varied(worth, count)]] = True
        return segments.broadcast(kept) & mask


def most_varied(values: Tensor, count: int) -> Tensor:
    """Indices (count,) of the values with the largest variance among all choices of `count` of them `(N,)`.

    The best choice is always some of the smallest and some of the largest values; all such splits are compared.
    """
    order = torch.argsort(values, stable=True)
    ordered = values[order]
    lowest = torch.arange(count + 1, device=values.device)  # how many of the smallest
    total, square = (torch.cat([power.new_zeros(1), power.cumsum(0)]) for power in (ordered, ordered**2))
    start = len(values) - count + lowest  # the rest are the largest
    mean = (total[lowest] + total[-1] - total[start]) / count
    variance = (square[lowest] + square[-1] - square[start]) / count - mean**2
    split = int(variance.argmax())
    return torch.cat([order[:split], order[len(values) - count + split :]])


@dataclass(frozen=True)
class Informative:
    """Keep the share of decisions with the largest `|A| H`: uncertain, and with something at stake.

    Source: D3S, Wang et al. 2025.
    """

    share: Fraction = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        stake = advantage.abs() * decisions.require("entropy")
        mask = decisions.valid()
        return topk_mask(stake.expand(decisions.shape), mask, count_for_fraction(mask, self.share))


@dataclass(frozen=True)
class UncertainTokens:
    """Keep decisions whose probability was below `below` when sampled: the others leave little to choose.

    Source: Guo et al. 2025.
    """

    below: PositiveFraction = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.below <= 1.0:
            raise ValueError(f"'uncertain' keeps decisions below a probability in (0, 1], got {self.below}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        return decisions.logp_old < math.log(self.below)


@dataclass(frozen=True)
class PredictedKL:
    """Drop decisions whose own gradient step is predicted to move the policy too far or to lose.

    Source: CAPO, Melo et al. 2025.

    The model of the step is of second order and knows the logits alone. With d = A (onehot(a) - p), the gradient of
    A log p_a, and F = diag(p) - p p^T, a step `rate` d shifts the policy by KL = rate^2 d'Fd / 2 and changes A log p_a
    by rate |d|^2 - rate^2 A d'Fd / 2. `extra["collision"]` and `extra["collision3"]` (N, T) hold sum p^2 and sum p^3.
    """

    rate: Positive = 1.0
    shift: NonNegative = math.inf  # largest KL [nats]
    gain: float = -math.inf  # smallest change
    share: Fraction = 1.0  # of the decisions, at most; those with the largest shifts are dropped

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Bool `(N, T)`."""
        p, valid = decisions.logp_old.exp(), decisions.valid()
        squares, cubes = decisions.require_extra("collision"), decisions.require_extra("collision3")
        norm = advantage.square() * (1.0 - 2.0 * p + squares)
        curvature = advantage.square() * (p - 2.0 * p.square() + cubes - (p - squares).square())
        shift = 0.5 * self.rate**2 * curvature
        unstable = (shift > self.shift) | (self.rate * norm - advantage * shift < self.gain)
        ranked = torch.where(unstable, shift, -torch.inf)
        return ~(unstable & topk_mask(ranked, valid, count_for_fraction(valid, self.share)))
