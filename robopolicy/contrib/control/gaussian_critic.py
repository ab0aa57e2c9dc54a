"""Action-value ensembles that predict a Gaussian distribution of the return."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from robopolicy.critics.q import CriticConfig, CriticInput, QEnsemble
from robopolicy.errors import UserError


class GaussianQ(QEnsemble):
    """Mean and standard deviation of the return for each member; `QEnsemble` methods return the means."""

    def __init__(self, config: CriticConfig, policy: CriticInput) -> None:
        """Build the critic of `policy`, without a histogram."""
        if config.bins:
            raise UserError(f"This critic predicts a Gaussian, not a histogram; drop critic.bins={config.bins}.")
        super().__init__(config, policy, outputs=2)

    def moments(self, obs: Mapping[str, Tensor], chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation `(M, B)`, in units of the return."""
        output = self.output(self.encode(obs), chunk)
        return self.value(output), self.std(output)

    def value(self, output: Tensor) -> Tensor:
        """Means `(M, ...)` of raw outputs."""
        return output[..., 0]

    def std(self, output: Tensor) -> Tensor:
        """Standard deviations `(M, ...)` of raw outputs."""
        return nn.functional.softplus(output[..., 1])

    def min_q(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Least mean `(B,)` over all members."""
        return self(obs, chunk).min(0).values
