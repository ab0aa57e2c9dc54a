"""Action-value ensembles that predict quantiles of the return, for objectives other than its mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from robopolicy.critics.q import CriticConfig, CriticInput, QEnsemble
from robopolicy.errors import UserError


class QuantileQ(QEnsemble):
    """Quantiles at (i + 1/2) / n of the return for each member; `QEnsemble` methods return their means."""

    levels: Tensor

    def __init__(self, config: CriticConfig, policy: CriticInput, *, quantiles: int) -> None:
        """Build the critic of `policy`, without a histogram."""
        if config.bins:
            raise UserError(f"This critic predicts quantiles, not a histogram; drop critic.bins={config.bins}.")
        super().__init__(config, policy, outputs=quantiles)
        self.register_buffer("levels", (torch.arange(quantiles) + 0.5) / quantiles)

    def quantiles(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Quantiles `(M, B, n)` of the return, in its units."""
        return self.output(self.encode(obs), chunk)

    def value(self, output: Tensor) -> Tensor:
        """Means `(M, ...)` of raw outputs."""
        return output.mean(-1)

    def min_q(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Least mean `(B,)` over all members."""
        return self(obs, chunk).min(0).values


def quantile_loss(quantiles: Tensor, target: Tensor, levels: Tensor, huber: float) -> Tensor:
    """Quantile regression (Dabney et al. 2017) `(M, B)`, summed over the quantiles and averaged over the targets.

    Args:
        quantiles: (M, B, n) predicted.
        target: (B, k) draws of the return.
        levels: (n,) of the quantiles.
        huber: Error up to which the loss is quadratic; 0 is the plain quantile loss.
    """
    error = target[None, :, None] - quantiles.unsqueeze(-1)  # (M, B, n, k)
    size = error.abs()
    smooth = size if huber == 0 else torch.where(size < huber, error.square() / (2 * huber), size - huber / 2)
    weight = (levels[:, None] - (error.detach() < 0).float()).abs()
    return (weight * smooth).mean(-1).sum(-1)
