"""Network for sets of entities, such as visible agents, independent of their order and number.

Self-attention without positions relates entities to each other, and a learned query pools them. No parameter depends on
the number of entities, so a policy trained with three others runs with five. An entity is a row of numbers; a row of
zeros is an empty slot, so that observations of one shape contain any number of entities up to their maximum. Source:
Zhang et al. 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from robopolicy.constraints import PositiveInt, Range, Validated
from robopolicy.errors import UserError
from robopolicy.nets.modality import ModalityEncoder
from robopolicy.nets.normalizer import MIN_RANGE
from robopolicy.nets.transformer import AttentionBlock


@dataclass(frozen=True)
class EntityConfig(Validated):
    """Sizes of one network for entities (one network per key `entities.*`)."""

    width: PositiveInt = 64  # of an entity's embedding
    heads: PositiveInt = 4
    layers: Annotated[int, Range(0, 1000)] = 1  # of self-attention; with 0 entities do not interact
    features: PositiveInt = 64  # size of the projected output

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise UserError(f"entities.width {self.width} must be a multiple of entities.heads {self.heads}.")


class EntityNet(nn.Module):
    """Map sets `(B, N, D)` of any N to features `(B, feature_dim)`, zeros for empty sets."""

    def __init__(self, shape: tuple[int, ...], config: EntityConfig) -> None:
        super().__init__()
        if len(shape) != 2 or min(shape) < 1:
            raise UserError(f"Entities need shape (N, D), got {tuple(shape)}.")
        self.embed = nn.Linear(shape[1], config.width)
        self.blocks = nn.ModuleList(AttentionBlock(config.width, config.heads) for _ in range(config.layers))
        self.query = nn.Parameter(torch.randn(config.width))
        self.key = nn.Linear(config.width, config.width)
        self.project = nn.Sequential(nn.Linear(config.width, config.features), nn.LayerNorm(config.features))
        self.feature_dim = config.features
        self.register_buffer("centre", torch.zeros(shape[1]))
        self.register_buffer("scale", torch.ones(shape[1]))

    def forward(self, entities: Tensor) -> Tensor:
        """Encode each set separately."""
        centre, scale = cast(Tensor, self.centre), cast(Tensor, self.scale)
        present = (entities != 0).any(-1)  # (B, N)
        some = present.any(-1, keepdim=True)  # (B, 1); empty sets attend to all slots, and their result is dropped
        attended = present | ~some
        x = self.embed((entities - centre) / scale)
        for block in self.blocks:
            x = cast(AttentionBlock, block)(x, attended[:, None, None])
        scores = (self.key(x) @ self.query) / x.shape[-1] ** 0.5  # (B, N)
        shares = scores.masked_fill(~attended, -torch.inf).softmax(-1)
        return self.project((shares[..., None] * x).sum(-2)) * some

    def fit(self, low: Tensor, high: Tensor) -> None:
        """Map entities between `low` and `high`, `(N, D)` or `(D,)`, into [-1, 1]."""
        size = len(cast(Tensor, self.centre))
        low, high = low.reshape(-1, size).amin(0), high.reshape(-1, size).amax(0)
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise UserError("The statistics of entities are not finite; fix or drop the episode.")
        cast(Tensor, self.centre).copy_((low + high) / 2)
        constant = high - low <= MIN_RANGE  # constant entries keep their unit
        cast(Tensor, self.scale).copy_(torch.where(constant, 1.0, (high - low) / 2))


class EntityEncoder(ModalityEncoder):
    """Sets `entities.*`, float `(N, D)`, such as visible agents, with one network each."""

    config_class = EntityConfig
    attribute = "entities"
    rank = 2
    statistics = "box"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: EntityConfig) -> None:
        super().__init__(shapes, config)
        self.feature_dim = len(shapes) * config.features

    def build(self, shape: tuple[int, ...], config: EntityConfig) -> EntityNet:
        """Build the network of a set."""
        return EntityNet(shape, config)
