"""Encoders of observations by the prefix of their key: `image.front` is read by the encoder `image`.

A key without a known prefix is a vector. All keys of one prefix share one `ModalityEncoder`, which usually has a
network for each of them. Rows of `ENCODERS` are imported when a policy observes such a key.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from robopolicy.plugins import Registry


class ModalityEncoder(nn.ModuleDict, ABC):
    """Encoder of all observations whose keys share a prefix; constructed as `cls(shapes, config)`.

    Its modules are the networks of the keys, by key with `/` in place of dots, which names of modules must not hold.

    What `statistics` of a dataset are for:

    * "none": nothing;
    * "box": least and largest values of every number of a key go to `fit`;
    * "vector": `forward` returns numbers that are no features yet. They join the vectors and are normalised with them,
      by the statistics of the key, of which there are `numbers(shape)` each.
    """

    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings, all with defaults
    attribute: ClassVar[str]  # where an `ObservationEncoder` keeps it; the first part of the names of its weights
    order: ClassVar[int] = 2  # place of its features behind those of the vectors; equal ones are sorted by prefix
    rank: ClassVar[int] = 1  # dimensions of one observation
    statistics: ClassVar[Literal["none", "box", "vector"]] = "none"
    feature_dim: int  # F, width of what `forward` returns for all keys together

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: Any) -> None:
        """Build the networks.

        Args:
            shapes: Per-step shape of every key, in sorted order.
            config: Instance of `config_class`.
        """
        super().__init__()
        self.observations = tuple(shapes)  # keys
        for key, shape in shapes.items():
            network = self.build(shape, config)
            if network is not None:
                self[module_name(key)] = network

    @abstractmethod
    def build(self, shape: tuple[int, ...], config: Any) -> nn.Module | None:
        """Network of one key, or None where there is none."""

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Features `(B, To, F)` of every key of `obs` `{key: (B, To, ...)}`.

        `augment` asks for random changes, drawn from `generator`, which are for imitation only.
        """
        features: list[Tensor] = []
        for key, network in zip(self.observations, self.values(), strict=True):
            value = obs[key].float()
            features.append(network(value.flatten(0, 1)).unflatten(0, value.shape[:2]))
        return features

    def fit(self, key: str, low: Tensor, high: Tensor) -> None:
        """Fit the network of a key to the least and largest values `(numbers,)` of a dataset."""
        cast(Any, self[module_name(key)]).fit(low, high)

    @classmethod
    def numbers(cls, shape: tuple[int, ...]) -> int:
        """How many numbers of a key of this shape have statistics."""
        return math.prod(shape)


def module_name(key: str) -> str:
    """Name of the module of an observation key."""
    return key.replace(".", "/")


ENCODERS: Registry[type[ModalityEncoder]] = Registry(
    "encoders",
    {
        "embedding": "robopolicy.nets.encoder:EmbeddingEncoder",
        "image": "robopolicy.nets.vision:ImageEncoder",
        "point_cloud": "robopolicy.nets.point_cloud:PointCloudEncoder",
    },
)
"""Prefix of the keys, without the dot -> class."""


def prefix_of(key: str) -> str:
    """Prefix of an observation key that has an encoder of its own; empty where the key is a vector."""
    prefix, dot, _ = key.partition(".")
    return prefix if dot and prefix in ENCODERS else ""
