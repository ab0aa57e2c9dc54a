"""Encoders of observations by the prefix of their key: `image.front` has the encoder `image`.

A key without a known prefix is a vector. All keys of a prefix share one `ModalityEncoder`, which usually has a network
per key. Classes in `ENCODERS` are imported when a policy observes such a key.
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
    """Encoder of all observations whose keys share a prefix, constructed as `cls(shapes, config)`.

    Its modules are the networks of the keys, by key with `/` instead of dots, which module names must not contain.

    Use of dataset `statistics`:

    * "none": not used;
    * "box": minima and maxima of every number of a key are passed to `fit`;
    * "vector": the outputs of `forward` are normalised with the vectors, by the `numbers(shape)` statistics of the key.
    """

    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings, all with defaults
    attribute: ClassVar[str]  # attribute of the `ObservationEncoder`, a prefix of weight names
    order: ClassVar[int] = 2  # position of its features after the vectors, then by prefix
    rank: ClassVar[int] = 1  # dimensions of one observation
    statistics: ClassVar[Literal["none", "box", "vector"]] = "none"
    feature_dim: int  # F, total width of the outputs of `forward`

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: Any) -> None:
        """Build the networks for the per-step `shapes` of the sorted keys; `config` is a `config_class`."""
        super().__init__()
        self.observations = tuple(shapes)  # keys
        for key, shape in shapes.items():
            network = self.build(shape, config)
            if network is not None:
                self[module_name(key)] = network

    @abstractmethod
    def build(self, shape: tuple[int, ...], config: Any) -> nn.Module | None:
        """Build the network of a key, or None."""

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Features `(B, To, F)` of every key of `obs` `{key: (B, To, ...)}`, with random changes if `augment`."""
        features: list[Tensor] = []
        for key, network in zip(self.observations, self.values(), strict=True):
            value = obs[key].float()
            features.append(network(value.flatten(0, 1)).unflatten(0, value.shape[:2]))
        return features

    def fit(self, key: str, low: Tensor, high: Tensor) -> None:
        """Fit the network of a key to the minima and maxima `(numbers,)` of a dataset."""
        cast(Any, self[module_name(key)]).fit(low, high)

    @classmethod
    def numbers(cls, shape: tuple[int, ...]) -> int:
        """Count the statistics of a key of this shape."""
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
    """Prefix of an observation key with an encoder; empty for a vector."""
    prefix, dot, _ = key.partition(".")
    return prefix if dot and prefix in ENCODERS else ""
