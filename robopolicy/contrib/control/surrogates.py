"""Surrogates that pull the ratio towards a target, or charge for a step away from the old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.constraints import Positive
from robopolicy.core.ratios import Bound
from robopolicy.core.surrogates import SurrogateOut, best_ratio


def discovered_drift(log_ratio: Tensor, advantage: Tensor, alpha: Positive = 2.0, beta: Positive = 0.6) -> Tensor:
    """What a step away from the old policy costs `(N, T)`, in closed form.

    With `u = A (ratio - 1)` where the advantage is positive and `u = A log ratio` where it is negative, it is
    `relu(u - width tanh(u / width))`: never negative, 0 with gradient 0 at ratio 1 and wherever the step goes against
    the advantage. `alpha` and `beta` are the widths of the two cases, in units of the advantage: within them steps are
    nearly free. Towards infinite widths there is no drift, towards 0 it takes back all that a step gains.
    Source: Lu et al. 2022, discovered policy optimisation.
    """
    positive = advantage >= 0
    gain = torch.where(positive, advantage * torch.expm1(log_ratio), advantage * log_ratio)
    width = torch.where(positive, alpha, beta).to(log_ratio.dtype)
    return torch.relu(gain - width * torch.tanh(gain / width))


def drift(
    log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, alpha: Positive = 2.0, beta: Positive = 0.6
) -> SurrogateOut:
    """`-A ratio` plus `discovered_drift`; ignores the bounds.

    At positive advantages the push fades with the distance, at negative ones it turns back where `clipped` says so.
    Widths that narrow as training ends make it aware of the time that is left (Jackson et al. 2024, TA-LPO).
    """
    ratio = log_ratio.exp()
    slope = torch.tanh(advantage * log_ratio / beta).square()
    turned = (advantage < 0) & (log_ratio < 0) & (slope > ratio)
    return SurrogateOut(discovered_drift(log_ratio, advantage, alpha, beta) - advantage * ratio, turned)


def bounded_ratio(
    log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound, temperature: Positive = 1e-3
) -> SurrogateOut:
    """Regression of the ratio onto the best one, `|A| |ratio - best|` (BPO, Ao et al. 2026).

    Within the bounds it pushes like the plain ratio; what has moved beyond its target is pulled back.
    """
    excess = log_ratio.exp() - best_ratio(advantage, low, high, temperature)
    return SurrogateOut(advantage.abs() * excess.abs(), excess * advantage > 0)
