"""Value of a point on the way from noise to data: what the chunk that will come of it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.constraints import Count, Ranged
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.mlp import MLP
from robopolicy.nets.time import SinusoidalEmbedding
from robopolicy.nets.vision import VisionConfig
from robopolicy.spec import PolicySpec

TIME_DIM = 16  # width of the time embedding


@dataclass(frozen=True)
class IntermediateConfig(Ranged):
    """Architecture of an `IntermediateValue`."""

    hidden: tuple[Count, ...] = (256, 256, 256)
    activation: str = "silu"
    normalization: str = "running"  # minmax | meanstd | running | identity
    vision: VisionConfig = field(default_factory=VisionConfig)


class IntermediateValue(nn.Module):
    """V(x_t, t, s): points `(B, N, H, A)` at times `(B, N)` and observations `{key: (B, To, ...)}` -> `(B, N)`."""

    def __init__(self, config: IntermediateConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(spec.observation, normalization=config.normalization, vision=config.vision)
        self.time = SinusoidalEmbedding(TIME_DIM)
        size = spec.obs_horizon * self.encoder.feature_dim + TIME_DIM + spec.horizon * spec.action_dim
        self.head = MLP(size, config.hidden, 1, activation=config.activation)

    def forward(self, obs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        """Estimate the outcome from `x`, in normalised action units; observations are encoded once."""
        features = self.encoder(obs).flatten(1).unsqueeze(1).expand(-1, t.shape[1], -1)
        return self.head(torch.cat([features, self.time(t), x.flatten(2)], -1)).squeeze(-1)

    def observe(self, obs: Mapping[str, Tensor]) -> None:
        """Merge `obs` into a running normaliser; does nothing in other modes."""
        self.encoder.observe(obs)
