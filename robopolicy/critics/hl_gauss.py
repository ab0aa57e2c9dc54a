"""Value regression as classification of a Gaussian-smoothed histogram (HL-Gauss, Farebrother et al. 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.errors import UserError

SIGMA_PER_BIN = 0.75  # width of the smoothing Gaussian in bins, the paper's choice


class HLGauss(nn.Module):
    """Turns scalars into bin probabilities and logits back into scalars."""

    edges: Tensor
    centers: Tensor

    def __init__(self, bins: int, low: float, high: float) -> None:
        super().__init__()
        if bins < 2 or not low < high:
            raise UserError(f"A value histogram needs at least 2 bins and low < high, got {bins}, {low}, {high}.")
        edges = torch.linspace(low, high, bins + 1)
        self.sigma = SIGMA_PER_BIN * (high - low) / bins
        self.register_buffer("edges", edges, persistent=False)  # (bins + 1,)
        self.register_buffer("centers", (edges[1:] + edges[:-1]) / 2, persistent=False)

    def probabilities(self, target: Tensor) -> Tensor:
        """Mass of a Gaussian around `target` `(...)`, truncated to the support, in every bin `(..., bins)`."""
        target = target.clamp(self.edges[0], self.edges[-1])
        cdf = torch.special.ndtr((self.edges - target.unsqueeze(-1)) / self.sigma)
        return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])

    def mean(self, logits: Tensor) -> Tensor:
        """Expected value `(...)` of logits `(..., bins)`."""
        # A sum and no product of matrices, which lower precision would round to 8 bits.
        return (logits.float().softmax(-1) * self.centers).sum(-1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy `(...)`."""
        return -(self.probabilities(target) * F.log_softmax(logits, -1)).sum(-1)
