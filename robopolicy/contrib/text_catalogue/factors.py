"""Factors for `Modulate`, which multiply the advantage of a row or decision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative
from robopolicy.contrib.text_catalogue.comparisons import lengths
from robopolicy.core.advantage import outcome
from robopolicy.core.advantage_sources import UnitView
from robopolicy.core.decisions import Decisions, by_group, pair
from robopolicy.core.group_statistics import ROLLOUTS
from robopolicy.core.segments import Segments


@dataclass(frozen=True)
class LongestSuccess:
    """`low` for groups whose longest success is at most as long as the average failure, else 1.

    Source: ADORA, Ren et al. 2026.

    Failures of `overlong` or more decisions do not count. Groups without successes have `low`, groups without failures
    1.
    """

    low: NonNegative = 0.1
    overlong: float = 4054.0  # decisions
    success: float = 0.5  # rewards above this are successes

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the factor `(N, 1)`."""
        length, won = lengths(decisions), outcome(decisions) > self.success
        segments = ROLLOUTS.segments(length, decisions)
        longest = segments.largest(length.masked_fill(~won, -torch.inf))
        counted = ~won & (length < self.overlong)
        failures = Segments(by_group(decisions), segments.weight * counted)
        typical = failures.mean(length).masked_fill(failures.count == 0, -torch.inf)
        return segments.broadcast(torch.where(longest > typical, 1.0, self.low)).to(length.dtype)


@dataclass(frozen=True)
class OutcomeEntropy:
    """`sigmoid(sharpness (H - middle))` of the entropy H [bits] of a group's final answers, or 1 minus it.

    Source: COPO, Han et al. 2025.

    `extra["answer"]` (N,) int identifies answers. With `forced`, groups of equal rewards have weight 0.
    """

    sharpness: float = 20.0
    middle: float = 0.5  # bits
    complement: bool = False
    forced: bool = False

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the factor `(N, 1)`."""
        reward = outcome(decisions)
        groups = ROLLOUTS.segments(reward, decisions)
        answer = decisions.require_extra("answer", per_decision=True)
        same = Segments(pair(by_group(decisions), answer), groups.weight)
        share = (same.broadcast(same.count) / groups.broadcast(groups.count).clamp(min=1e-12)).clamp(min=1e-12)
        entropy = groups.broadcast(groups.mean(-share.log2()))
        weight = torch.sigmoid(self.sharpness * (entropy - self.middle))
        if self.forced:
            weight = weight.masked_fill(~groups.broadcast(groups.differs(reward)), 0.0)
        return 1.0 - weight if self.complement else weight


@dataclass(frozen=True)
class UnitEntropy:
    """`exp(-sharpness H)` of the mean entropy of each unit, min-max scaled over the batch; mean 1.

    Source: EMPG, Wang et al. 2025.
    """

    sharpness: float = 1.0

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the factor `(N, T)`, 1 outside the mask."""
        gate = torch.exp(-self.sharpness * scaled_unit_entropy(decisions))
        return (gate / gate[decisions.valid()].mean()).masked_fill(~decisions.valid(), 1.0)


@dataclass(frozen=True)
class AttentionRhythm:
    """`1 + gain` on decisions that attention marks as planning or as anchors of later decisions (Li et al. 2025).

    `extra["waad"]` (N, T) is the mean attended distance of a decision, `extra["fai"]` (N, T) the attention it
    receives later; see `attention_distance` and `future_attention`. Each rule selects the top `share` of a row.
    """

    rule: str = "local"  # local: changes of waad | global: fai | coupled: global, moved to the previous local peak
    gain: float = 0.5
    share: Fraction = 0.4  # of the decisions of a row
    moved: float = 0.5  # share of the bonus that "coupled" moves from anchors with low waad

    def __post_init__(self) -> None:
        if self.rule not in ("local", "global", "coupled"):
            raise ValueError(f"Rhythm rule must be 'local', 'global' or 'coupled', got {self.rule!r}.")

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the factor `(N, T)`."""
        valid = decisions.valid()
        distance = decisions.require_extra("waad")
        step = (distance - next_valid(distance, valid)).abs()
        peaks = top_share(step, valid, self.share)
        if self.rule == "local":
            return 1.0 + self.gain * peaks.to(step.dtype)
        anchors = top_share(decisions.require_extra("fai"), valid, self.share)
        bonus = anchors.to(step.dtype)
        if self.rule == "coupled":
            segments = Segments(torch.arange(len(valid), device=valid.device).unsqueeze(1), valid)
            low = distance < segments.broadcast(segments.median(distance))
            places = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
            last = torch.cummax(torch.where(peaks, places, -1), 1)[0]  # last peak at or before each decision
            moves = anchors & low & ~peaks & (last >= 0)
            part = self.moved * moves.to(step.dtype)
            bonus = (bonus - part).scatter_add(1, last.clamp(min=0), part)
        return 1.0 + self.gain * bonus


@dataclass(frozen=True)
class DurationFactor:
    """Duration of a decision divided by the mean: asynchronous workers oversample fast ones (Yang et al. 2025).

    Durations are `extra["duration"]` (N,) or (N, T) [s].
    """

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the factor `(N, 1)` or `(N, T)`."""
        times = decisions.require_extra("duration", per_decision=True)
        valid = decisions.valid() if times.shape == decisions.shape else decisions.valid().any(1, keepdim=True)
        return times / times[valid].mean()


@dataclass(frozen=True)
class SaturationGate:
    """`low` in the units after the first unit whose potential exceeds `limit`, else 1; see `potential`.

    Source: SPAE, Wu et al. 2026.
    """

    low: NonNegative = 0.5
    limit: NonNegative = 0.9

    def __call__(self, decisions: Decisions) -> Tensor:
        """Compute the factor `(N, T)`."""
        units = UnitView(decisions)
        reached = (units.gather(potential(decisions)) > self.limit).long()
        before = torch.cumsum(reached, 1) - reached
        return torch.where(units.broadcast(before) > 0, self.low, 1.0).to(decisions.logp_old.dtype)


def scaled_unit_entropy(decisions: Decisions) -> Tensor:
    """Compute the mean entropy of each decision's unit `(N, T)`, scaled to [0, 1] over the batch."""
    units = UnitView(decisions)
    ones = torch.ones_like(decisions.logp_old)
    mean = units.broadcast(units.sums(decisions.require("entropy")) / units.sums(ones).clamp(min=1.0))
    kept = mean[decisions.valid()]
    return (mean - kept.min()) / (kept.max() - kept.min()).clamp(min=1e-8)


def potential(decisions: Decisions) -> Tensor:
    """Compute the progress in [-1, 1] of each step `(N, T)` from a probe of the answer (SPAE, Wu et al. 2026).

    `extra["probe_accuracy"]` (N, T) is exp of the mean log-probability of the true answer, `extra["probe_confidence"]`
    (N, T) is exp of minus the entropy of the answer: confident wrong answers have -1, confident correct ones 1.
    """
    accuracy, confidence = decisions.require_extra("probe_accuracy"), decisions.require_extra("probe_confidence")
    return 1.5 * accuracy * confidence + 0.5 * accuracy - confidence


def attention_distance(attention: Tensor, window: int = 10) -> Tensor:
    """Compute the mean attended distance `(N, T)`, clipped at `window`, of attention (N, T, T) to earlier positions."""
    places = torch.arange(attention.shape[-1], device=attention.device)
    distance = (places.unsqueeze(1) - places).clamp(0, window).to(attention.dtype)
    return (attention * distance).sum(-1)


def future_attention(attention: Tensor, nearest: int = 10, farthest: int = 50) -> Tensor:
    """Compute the mean attention `(N, T)` received from positions `nearest` to `farthest` later."""
    places = torch.arange(attention.shape[-1], device=attention.device)
    ahead = places.unsqueeze(1) - places
    counted = ((ahead >= nearest) & (ahead <= farthest)).to(attention.dtype)  # (T later, T earlier)
    return (attention * counted).sum(-2) / counted.sum(0).clamp(min=1.0)


def next_valid(values: Tensor, valid: Tensor) -> Tensor:
    """Return the value `(N, T)` at the next valid entry of the row, or at the entry itself if there is none."""
    width = values.shape[1]
    places = torch.arange(width, device=values.device).expand_as(valid)
    here = torch.where(valid, places, width).flip(1).cummin(1)[0].flip(1)  # first valid index at or after each entry
    behind = torch.cat([here[:, 1:], torch.full_like(here[:, :1], width)], 1)
    return values.gather(1, torch.where(behind < width, behind, places))


def top_share(values: Tensor, valid: Tensor, share: float) -> Tensor:
    """Return bool `(N, T)`: the largest `share` of the valid entries of each row, rounded up."""
    order = torch.argsort(torch.argsort(values.masked_fill(~valid, -torch.inf), dim=1, descending=True), dim=1)
    count = (valid.sum(1, keepdim=True) * share).ceil()
    return (order < count) & valid
