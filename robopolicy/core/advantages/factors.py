"""Factors for `Modulate`: what the advantage of a row or decision is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.limits import Count, Share


@dataclass(frozen=True)
class DepthDiscount:
    """Factor `gamma ** (steps - 1 - depth)` for `Modulate`: less credit for earlier denoising steps (DPPO).

    `gamma = 0` leaves only the last step, since 0^0 = 1.
    """

    gamma: Share
    steps: Count  # trained denoising steps

    def __call__(self, decisions: Decisions) -> Tensor:
        """Factor `(N, T)`."""
        remaining = (self.steps - 1 - decisions.depths()).to(decisions.logp_old.dtype)
        return torch.pow(self.gamma, remaining)
