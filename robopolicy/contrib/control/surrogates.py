"""Surrogates that regress the ratio onto a target, or penalise a step away from the old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.constraints import Positive
from robopolicy.core.ratios import Bound
from robopolicy.core.surrogates import SurrogateOut, best_ratio


def discovered_drift(log_ratio: Tensor, advantage: Tensor, alpha: Positive = 2.0, beta: Positive = 0.6) -> Tensor:
    """Penalty `(N, T)` of a step away from the old policy, in closed form.

    With `u = A (ratio - 1)` where the advantage is positive and `u = A log ratio` where it is negative, it is
    `relu(u - width tanh(u / width))`: never negative, and 0 with gradient 0 at ratio 1 and where the step opposes the
    advantage. `alpha` and `beta` are the widths of the two cases, in units of the advantage: within them steps are
    nearly free. Infinite widths give no drift; a width of 0 cancels the whole gain of a step. Source: Lu et al. 2022,
    discovered policy optimisation.
    """
    positive = advantage >= 0
    gain = torch.where(positive, advantage * torch.expm1(log_ratio), advantage * log_ratio)
    width = torch.where(positive, alpha, beta).to(log_ratio.dtype)
    return torch.relu(gain - width * torch.tanh(gain / width))


def drift(
    log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, alpha: Positive = 2.0, beta: Positive = 0.6
) -> SurrogateOut:
    """`-A ratio` plus `discovered_drift`; ignores the bounds.

    At positive advantages the gradient fades with the distance; at negative ones it reverses where `clipped` is true.
    Widths that narrow at the end of training make it time-aware (Jackson et al. 2024, TA-LPO).
    """
    ratio = log_ratio.exp()
    slope = torch.tanh(advantage * log_ratio / beta).square()
    turned = (advantage < 0) & (log_ratio < 0) & (slope > ratio)
    return SurrogateOut(discovered_drift(log_ratio, advantage, alpha, beta) - advantage * ratio, turned)


def bounded_ratio(
    log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, temperature: Positive = 1e-3
) -> SurrogateOut:
    """Regression of the ratio onto the best one, `|A| |ratio - best|` (BPO, Ao et al. 2026).

    Within the bounds its gradient equals the plain ratio's; ratios beyond their target are pulled back.
    """
    excess = log_ratio.exp() - best_ratio(advantage, low, high, temperature)
    return SurrogateOut(advantage.abs() * excess.abs(), excess * advantage > 0)
