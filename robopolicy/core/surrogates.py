"""Policy-gradient surrogates: all with one signature, all with gradient `-advantage * grad log_ratio` at ratio 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.ratios import Bound


@dataclass(frozen=True)
class SurrogateOut:
    """Loss of each decision and where the surrogate stopped pushing."""

    loss: Tensor  # (N, T) to be minimised
    clipped: Tensor  # (N, T) bool


Surrogate = Callable[..., SurrogateOut]
"""`(log_ratio (N, T), advantage (N, T), low, high, **options) -> SurrogateOut`."""


def pg(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Plain policy gradient, `-A log ratio` (REINFORCE up to a constant); ignores the bounds."""
    return SurrogateOut(-advantage * log_ratio, _nowhere(log_ratio))


def importance(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Importance-sampled policy gradient, `-A ratio`; ignores the bounds."""
    return SurrogateOut(-advantage * log_ratio.exp(), _nowhere(log_ratio))


def clip(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """PPO's pessimistic bound: minus the smaller of `A ratio` and `A clamp(ratio, low, high)`."""
    ratio = log_ratio.exp()
    free = -advantage * ratio
    bounded = -advantage * _clamp(ratio, low, high)
    return SurrogateOut(torch.maximum(free, bounded), bounded > free)


def dual_clip(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, cap: float = 3.0) -> SurrogateOut:
    """PPO whose loss at negative advantage is bounded by `-cap A`, so that huge ratios cannot dominate a batch."""
    out = clip(log_ratio, advantage, low, high)
    ceiling = -cap * advantage
    capped = (advantage < 0) & (out.loss > ceiling)
    return SurrogateOut(torch.where(capped, ceiling, out.loss), out.clipped | capped)


def aspo(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """PPO's clip where the advantage is positive, a quadratic penalty where it is negative (FPO++).

    The penalty `-(A ratio - |A| (ratio - 1)^2 / (2 width))`, with `width = 1 - low`, has its minimum at `low`: a ratio
    that fell below it is pulled back, while clipping would leave it there.
    """
    out = clip(log_ratio, advantage, low, high)
    change = torch.expm1(log_ratio)
    pulled = -advantage * (1.0 + change) + advantage.abs() * change.square() / (2.0 * (1.0 - low))
    negative = advantage < 0
    return SurrogateOut(torch.where(negative, pulled, out.loss), torch.where(negative, 1.0 + change < low, out.clipped))


def mirror(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Mirror descent: `-A ratio` plus `ratio log ratio - ratio + 1`, on average KL(new || old); ignores the bounds.

    Over decisions of the old policy its minimiser is `old * exp(A) / Z`: the advantage carries the step size (MDPO).
    """
    ratio = log_ratio.exp()
    return SurrogateOut(ratio * (log_ratio - advantage) - torch.expm1(log_ratio), _nowhere(log_ratio))


SURROGATES: dict[str, Surrogate] = {
    "pg": pg,
    "is": importance,
    "clip": clip,
    "dual_clip": dual_clip,
    "aspo": aspo,
    "mirror": mirror,
}


def _nowhere(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _clamp(ratio: Tensor, low: Bound, high: Bound) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.minimum(torch.maximum(ratio, torch.as_tensor(low)), torch.as_tensor(high))
    return ratio.clamp(low, high)
