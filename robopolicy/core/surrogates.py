"""Policy-gradient surrogates: all with one signature, all with gradient `-advantage * grad log_ratio` at ratio 1.

Away from it they differ in how far, and with which force, a decision may still be pushed. `gradient_preserving`,
`cispo`, `nft` and `nft_scaled` have a gradient that differs from the gradient of their value by design.
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
    """Loss of each decision and mask of the clipped ones."""

    loss: Tensor  # (N, T) to be minimised
    clipped: Tensor  # (N, T) bool


Surrogate = Callable[..., SurrogateOut]
"""`(log_ratio (N, T), advantage (N, T), low, high, **options) -> SurrogateOut`."""


def policy_gradient(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Plain policy gradient, `-A log ratio` (REINFORCE up to a constant); ignores the bounds."""
    return SurrogateOut(-advantage * log_ratio, none_clipped(log_ratio))


def importance_sampling(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Importance-sampled policy gradient, `-A ratio`; ignores the bounds."""
    return SurrogateOut(-advantage * log_ratio.exp(), none_clipped(log_ratio))


def clip(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """PPO's pessimistic bound: minus the smaller of `A ratio` and `A clamp(ratio, low, high)`."""
    ratio = log_ratio.exp()
    free = -advantage * ratio
    bounded = -advantage * clamp_ratio(ratio, low, high)
    return SurrogateOut(torch.maximum(free, bounded), bounded > free)


def dual_clip(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, cap: Positive = 3.0) -> SurrogateOut:
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
    return SurrogateOut(ratio * (log_ratio - advantage) - torch.expm1(log_ratio), none_clipped(log_ratio))


def cispo(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Policy gradient weighted by the clamped ratio, itself without gradient (CISPO): every decision has a gradient."""
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
    return SurrogateOut(-advantage * (4.0 / tau) * torch.sigmoid(tau * torch.expm1(log_ratio)), none_clipped(log_ratio))


def best_ratio(signal: Tensor, low: Bound, high: Bound, temperature: float) -> Tensor:
    """Ratio within the bounds with the largest gain: the upper bound where `signal` is positive, else the lower.

    The step between them is a sigmoid of width `temperature`, in units of the signal. Source: Ao et al. 2026.
    """
    return low + (high - low) * torch.sigmoid(signal / temperature)


def nft(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, floor: Positive = 1.0) -> SurrogateOut:
    """Supervised learning on both outcomes, for advantages `R - p` of 0/1 rewards; ignores the bounds.

    Successes are imitated, `-A log ratio`. Failures train the policy that is left when successes are taken out of the
    old one, `(1 - p ratio) / (1 - p)`, whose likelihood they raise. That likelihood is held above `floor`, with the
    gradient passed through. Source: Chen et al. 2025, NFT.
    """
    return _negative_aware(log_ratio, advantage, -advantage, floor)


def nft_scaled(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, floor: Positive = 1.0) -> SurrogateOut:
    """`nft` for advantages `(R - p) / sqrt(p (1 - p))`, from which p is recovered."""
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
LINEAR_IN_LOG_RATIO = frozenset(
    {"policy_gradient", "cispo"}
)  # in the log-ratio, which needs no limit: its gradient is never cut


def _negative_aware(log_ratio: Tensor, advantage: Tensor, success: Tensor, floor: float) -> SurrogateOut:
    """NFT with the success rate `success` of the group, used only at negative advantages."""
    share = success.clamp(0.02, 0.98)
    left = (1.0 - share * log_ratio.exp()) / (1.0 - share)
    held = left + (left.clamp(min=floor) - left).detach()
    failed = advantage * ((1.0 - share) / share) * held.log()
    negative = advantage < 0
    return SurrogateOut(torch.where(negative, failed, -advantage * log_ratio), negative & (left < floor))


def none_clipped(like: Tensor) -> Tensor:
    """False `(N, T)`: nothing is clipped."""
    return torch.zeros_like(like, dtype=torch.bool)


def clamp_ratio(ratio: Tensor, low: Bound, high: Bound) -> Tensor:
    """The ratio within its bounds `(N, T)`."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.minimum(torch.maximum(ratio, torch.as_tensor(low)), torch.as_tensor(high))
    return ratio.clamp(low, high)
