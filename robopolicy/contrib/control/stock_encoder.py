"""The stock of an episode as an observation: what was earned so far, on top of a start (Pires et al. 2025).

A key `stock.<discount>` `(2,)` shows what was earned and how worth has grown since the episode began. It enters as one
number, the stock: what was earned plus `start` times the growth.
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
    """Stocks as numbers among the vectors."""

    config_class = StockConfig
    attribute = "stock"
    statistics = "vector"
    start: Tensor

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: StockConfig) -> None:
        super().__init__(shapes, config)
        self.register_buffer("start", torch.zeros(()))  # stock at the start of an episode
        self.feature_dim = len(shapes)

    def build(self, shape: tuple[int, ...], config: StockConfig) -> None:
        """There is no network."""

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Stock `(B, To, 1)` of every key."""
        return [self.stock(obs[key]) for key in self.observations]

    def stock(self, earned: Tensor) -> Tensor:
        """Stock `(B, To, 1)` of an observation `(B, To, 2)`."""
        return earned[..., :1] + self.start * earned[..., 1:]

    @classmethod
    def numbers(cls, shape: tuple[int, ...]) -> int:
        """One, the stock."""
        return 1
