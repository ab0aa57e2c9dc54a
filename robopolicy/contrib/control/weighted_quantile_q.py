"""Action-value ensembles whose sorted outputs are averaged with larger weights on the low ones.

Source: Ishuov et al. 2025, Symphony.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from robopolicy.critics.q import CriticConfig, CriticInput, QEnsemble
from robopolicy.errors import UserError


class WeightedQuantileQ(QEnsemble):
    """One value from the sorted outputs of all members, with weights `tanh((pi (1 - i / n)) ** e)` from the lowest up.

    Every output learns the same target, so that the value lies below the mean where they disagree. In terms of
    `QEnsemble` it has a single member.
    """

    weights: Tensor

    def __init__(self, config: CriticConfig, policy: CriticInput, *, nodes: int) -> None:
        """Build the critic of `policy` with `nodes` outputs for each of `config.members` networks; no histogram."""
        if config.bins:
            raise UserError(f"This critic predicts quantile nodes, not a histogram; drop critic.bins={config.bins}.")
        super().__init__(config, policy, outputs=nodes)
        count = config.members * nodes
        weights = (math.pi * (1 - torch.arange(count) / count)).pow(math.e).tanh()
        self.register_buffer("weights", weights / weights.sum())

    def nodes(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """All outputs `(B, members * nodes)`."""
        return _joined_nodes(self.output(self.encode(obs), chunk))

    def value(self, output: Tensor) -> Tensor:
        """Value `(1, B)` of raw outputs `(M, B, nodes)`."""
        return (_ascending(_joined_nodes(output)) * self.weights).sum(-1).unsqueeze(0)

    def min_q(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """The value `(B,)`."""
        return self(obs, chunk).squeeze(0)


def _joined_nodes(output: Tensor) -> Tensor:
    return output.movedim(0, 1).flatten(1)


def _ascending(values: Tensor) -> Tensor:
    """Sort along the last axis, with gradient; on a CPU by NumPy's vectorised sort, 4 to 35 times faster."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        return values.sort(-1).values
    if torch.is_grad_enabled() and values.requires_grad:
        return values.gather(-1, torch.from_numpy(np.argsort(values.detach().numpy(), -1)))
    return torch.from_numpy(np.sort(values.detach().numpy(), -1))
