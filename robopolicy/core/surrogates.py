"""Policy-gradient surrogates with one signature and the gradient `-advantage * grad log_ratio` at ratio 1.

They differ in the gradient away from ratio 1. The gradients of `cispo`, `nft` and `nft_scaled` differ by design from
the gradients of their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Positive
from robopolicy.core.ratios import Bound
from robopolicy.plugins import Registry


@dataclass(frozen=True)
class SurrogateOut:
    """Loss of each decision, and which decisions are clipped."""

    loss: Tensor  # (N, T) to be minimised
    clipped: Tensor  # (N, T) bool


Surrogate = Callable[..., SurrogateOut]
"""`(log_ratio (N, T), advantage (N, T), low, high, **options) -> SurrogateOut`."""


def policy_gradient(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Plain policy gradient, `-A log ratio` (REINFORCE up to a constant); ignores the bounds."""
    return SurrogateOut(-advantage * log_ratio, nothing_clipped(log_ratio))


def importance_sampling(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Importance-sampled policy gradient, `-A ratio`; ignores the bounds."""
    return SurrogateOut(-advantage * log_ratio.exp(), nothing_clipped(log_ratio))


def clip(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """PPO's clipped objective: minus the smaller of `A ratio` and `A clamp(ratio, low, high)`."""
    ratio = log_ratio.exp()
    negative = -advantage
    free, bounded = negative * ratio, negative * clamp_ratio(ratio.detach(), low, high)
    clipped = bounded > free  # only beyond the bounds, where the clamped ratio has no gradient
    return SurrogateOut(torch.where(clipped, bounded, free), clipped)


def dual_clip(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, cap: Positive = 3.0) -> SurrogateOut:
    """PPO with the loss at negative advantages bounded by `-cap A`, so that large ratios cannot dominate a batch."""
    out = clip(log_ratio, advantage, low, high)
    ceiling = -cap * advantage
    capped = (advantage < 0) & (out.loss > ceiling)
    return SurrogateOut(torch.where(capped, ceiling, out.loss), out.clipped | capped)


def aspo(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """PPO's clip where the advantage is positive, a quadratic penalty where it is negative (FPO++).

    The penalty `-(A ratio - |A| (ratio - 1)^2 / (2 width))`, with `width = 1 - low`, has its minimum at `low`: its
    gradient raises a ratio below `low`, where the clipped loss is flat.
    """
    out = clip(log_ratio, advantage, low, high)
    change = torch.expm1(log_ratio)
    pulled = -advantage * (1.0 + change) + advantage.abs() * change.square() / (2.0 * (1.0 - low))
    negative = advantage < 0
    return SurrogateOut(torch.where(negative, pulled, out.loss), torch.where(negative, 1.0 + change < low, out.clipped))


def mirror(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Mirror descent: `-A ratio` plus `ratio log ratio - ratio + 1`, whose mean is KL(new || old); ignores the bounds.

    On decisions of the old policy its minimiser is `old * exp(A) / Z`; scale the advantage by the step size (MDPO).
    """
    ratio = log_ratio.exp()
    loss = ratio * (log_ratio - advantage) - torch.expm1(log_ratio)
    return SurrogateOut(loss, nothing_clipped(log_ratio))


def cispo(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Policy gradient weighted by the detached clamped ratio (CISPO): every decision has a gradient."""
    ratio = log_ratio.detach().exp()
    bounded = clamp_ratio(ratio, low, high)
    return SurrogateOut(-advantage * bounded * log_ratio, bounded != ratio)


def soft_gate(
    log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, up: Positive = 1.0, down: Positive = 1.05
) -> SurrogateOut:
    """Smooth clip `-A (4 / tau) sigmoid(tau (ratio - 1))` (SAPO); ignores the bounds.

    `up` is the sharpness tau where the advantage is positive, `down` where it is negative.
    """
    tau = torch.where(advantage < 0, down, up).to(log_ratio.dtype)
    loss = -advantage * (4.0 / tau) * torch.sigmoid(tau * torch.expm1(log_ratio))
    return SurrogateOut(loss, nothing_clipped(log_ratio))


def best_ratio(signal: Tensor, low: Bound, high: Bound, temperature: float) -> Tensor:
    """Ratio between the bounds: a sigmoid of the signal with width `temperature` (Ao et al. 2026).

    It tends to the upper bound for positive and to the lower bound for negative signals.
    """
    return low + (high - low) * torch.sigmoid(signal / temperature)


def nft(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, floor: Positive = 1.0) -> SurrogateOut:
    """Negative-aware fine-tuning (Chen et al. 2025, NFT), for advantages `R - p` of 0/1 rewards; ignores the bounds.

    Successes are imitated, `-A log ratio`. Failures raise the likelihood of the old policy without its successes,
    `(1 - p ratio) / (1 - p)`, which is clamped to at least `floor` with a straight-through gradient.
    """
    return _negative_aware(log_ratio, advantage, -advantage, floor)


def nft_scaled(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, floor: Positive = 1.0) -> SurrogateOut:
    """`nft` for advantages `(R - p) / sqrt(p (1 - p))`, from which p is computed."""
    return _negative_aware(log_ratio, advantage, advantage.square() / (1.0 + advantage.square()), floor)


SURROGATES: Registry[Surrogate] = Registry(
    "parts.surrogate",
    {
        "policy_gradient": policy_gradient,
        "importance_sampling": importance_sampling,
        "clip": clip,
        "dual_clip": dual_clip,
        "aspo": aspo,
        "mirror": mirror,
        "cispo": cispo,
        "soft_gate": soft_gate,
        "nft": nft,
        "nft_scaled": nft_scaled,
    },
)
LINEAR_IN_LOG_RATIO = frozenset({"policy_gradient", "cispo"})
"""Surrogates that get the log-ratio without clamping, so that their gradient never vanishes."""


def _negative_aware(log_ratio: Tensor, advantage: Tensor, success: Tensor, floor: float) -> SurrogateOut:
    """NFT with the success rate of the group, used only at negative advantages."""
    rate = success.clamp(0.02, 0.98)
    implicit = (1.0 - rate * log_ratio.exp()) / (1.0 - rate)
    clamped = implicit + (implicit.clamp(min=floor) - implicit).detach()
    failed = advantage * ((1.0 - rate) / rate) * clamped.log()
    negative = advantage < 0
    return SurrogateOut(torch.where(negative, failed, -advantage * log_ratio), negative & (implicit < floor))


def nothing_clipped(like: Tensor) -> Tensor:
    """Mask of clipped decisions `(N, T)` that is False everywhere."""
    return torch.zeros_like(like, dtype=torch.bool)


def clamp_ratio(ratio: Tensor, low: Bound, high: Bound) -> Tensor:
    """Clamp the ratio `(N, T)` to its bounds."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.minimum(torch.maximum(ratio, torch.as_tensor(low)), torch.as_tensor(high))
    return ratio.clamp(low, high)
