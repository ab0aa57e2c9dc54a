"""Encoder of an episode's stock: the reward collected so far plus an initial value (Pires et al. 2025).

The observation `stock.<discount>` `(2,)` holds the collected reward and the growth since the episode began. The encoder
reduces it to one number, the stock: collected reward plus `start` times the growth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.nets.modality import ModalityEncoder

STOCK_PREFIX = "stock."


@dataclass(frozen=True)
class StockConfig:
    """Settings of the encoder of stocks; it has none."""


class StockEncoder(ModalityEncoder):
    """Encodes stocks as numbers among the vectors."""

    config_class = StockConfig
    attribute = "stock"
    statistics = "vector"
    start: Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: StockConfig) -> None:
        super().__init__(shapes, config)
        self.register_buffer("start", torch.zeros(()))  # stock at the start of an episode
        self.feature_dim = len(shapes)

    def build(self, shape: tuple[int, ...], config: StockConfig) -> None:
        """Build nothing; the encoder has no network."""

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Stock `(B, To, 1)` of every key."""
        return [self.stock(obs[key]) for key in self.observations]

    def stock(self, value: Tensor) -> Tensor:
        """Stock `(B, To, 1)` of an observation `(B, To, 2)`."""
        return value[..., :1] + self.start * value[..., 1:]

    @classmethod
    def numbers(cls, shape: tuple[int, ...]) -> int:
        """One number, the stock."""
        return 1
