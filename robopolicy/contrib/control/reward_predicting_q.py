"""Action-value ensembles that also predict the reward of the chunk, from the same trunk.

Source: Liu et al. 2024, SL-MGAC.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from robopolicy.critics.q import C51, CriticConfig, CriticInput, QEnsemble
from robopolicy.errors import UserError


class RewardPredictingQ(QEnsemble):
    """Values, scalar or as histograms, and one more output of every member for the reward of the window."""

    def __init__(self, config: CriticConfig, policy: CriticInput) -> None:
        """Build the critic of `policy`; its histogram has scalar targets."""
        super().__init__(config, policy, extra=1)
        if isinstance(self.histogram, C51):
            raise UserError(
                "A critic that predicts rewards has scalar targets; set algorithm.critic.histogram=hl_gauss, not c51."
            )

    def value(self, output: Tensor) -> Tensor:
        """Values `(M, ...)` of raw outputs."""
        return super().value(output[..., :-1])

    def reward(self, output: Tensor) -> Tensor:
        """Predicted rewards `(M, ...)` of raw outputs."""
        return output[..., -1]

    def regression(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss `(M, B)` of the values to `target` `(B,)`, without the rewards."""
        return super().regression(output[..., :-1], target)

    def min_q(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Least value `(B,)` over all members."""
        return self(obs, chunk).min(0).values
