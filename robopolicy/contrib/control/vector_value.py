"""State values by reward term, with plain layers or with layers mixed from shared modules.

Source: Cho et al. 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from robopolicy.constraints import PositiveInt
from robopolicy.contrib.control.modular import ModularMLP
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.nets.mlp import MLP
from robopolicy.spec import PolicySpec


@dataclass(frozen=True)
class VectorValueConfig(ValueConfig):
    """Architecture of a `VectorValueNet`; `activation`, `layer_norm`, `residual` and `bias` are not used."""

    hidden: tuple[PositiveInt, ...] = (256, 128, 128, 64)
    modules: PositiveInt = 8  # weight modules of every layer
    context_width: PositiveInt = 64  # hidden units of the network that computes the mixture


class TermValues(ValueNet):
    """V_k(s) of R reward terms: observations `{key: (B, To, ...)}` -> `(B, R)`; `forward` returns their sum.

    Layers are plain; `residual` and `bias` are not used.
    """

    def __init__(self, config: ValueConfig, spec: PolicySpec, *, terms: int) -> None:
        super().__init__(config, spec)
        size, gain = spec.obs_horizon * self.encoder.feature_dim, 1.0 if config.orthogonal_init else None
        sizes = (size, config.hidden, terms)
        self.head = MLP(*sizes, activation=config.activation, layer_norm=config.layer_norm, orthogonal_gain=gain)

    def by_term(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Expected sum of each reward term `(B, R)`."""
        return self.head(self.encoder(obs).flatten(1))

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Expected return `(B,)`."""
        return self.by_term(obs).sum(1)


class VectorValueNet(TermValues):
    """`TermValues` over modular layers."""

    def __init__(self, config: VectorValueConfig, spec: PolicySpec, *, terms: int) -> None:
        super().__init__(config, spec, terms=terms)
        size = spec.obs_horizon * self.encoder.feature_dim
        self.head = ModularMLP(
            size,
            config.hidden,
            terms,
            context_dim=size,
            modules=config.modules,
            context_width=config.context_width,
            orthogonal_gain=1.0 if config.orthogonal_init else None,
        )

    def by_term(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Expected sum of each reward term `(B, R)`."""
        features = self.encoder(obs).flatten(1)
        return self.head(features, features)
