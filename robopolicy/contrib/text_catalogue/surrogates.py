"""A surrogate that keeps the gradient of clipped decisions (Su et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, Positive
from robopolicy.core.ratios import Bound
from robopolicy.core.surrogates import SurrogateOut, clamp_ratio, dual_clip


def gradient_preserving(
    log_ratio: Tensor,
    advantage: Tensor,
    low: Bound,
    high: Bound,
    low_gain: NonNegative = 1.0,
    high_gain: NonNegative = 1.0,
    cap: Positive = 3.0,
) -> SurrogateOut:
    """Compute the dual clip, but clipped decisions keep the gradient of the bound (GPPO, Su et al. 2025).

    `low_gain` and `high_gain` scale this gradient beyond the lower and the upper bound; 0 and 0 is the dual clip.
    """
    out = dual_clip(log_ratio, advantage, low, high, cap)
    ratio = log_ratio.detach().exp()
    bounded = clamp_ratio(ratio, low, high)
    beyond = torch.where(advantage < 0, ratio < bounded, ratio > bounded)
    gain = torch.where(advantage < 0, low_gain, high_gain).to(log_ratio.dtype)
    kept = -advantage * bounded * (1.0 + gain * (log_ratio - log_ratio.detach()))
    return SurrogateOut(torch.where(beyond, kept, out.loss), out.clipped)
