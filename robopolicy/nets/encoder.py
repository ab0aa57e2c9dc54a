"""Observation encoder; the prefix of a key selects the encoder of its modality.

* `image.*`: uint8 `(3, h, w)`, one camera network each (`vision.py`);
* `point_cloud.*`: float `(N, 3)` [m], one network each (`point_cloud.py`);
* `embedding.*`: float `(D,)`, an embedding of an instruction or a goal, e.g. of unit norm from a text encoder. It is
  not normalised and has its own projection. In imitation a fraction of the rows may have zeros in all embeddings, so
  that zeros mean "no instruction" (`without_embeddings`, for classifier-free guidance);
* other prefixes in `modality.ENCODERS`, which contrib and plugins add to;
* all other keys, e.g. a goal position: vectors, concatenated in sorted order and normalised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from robopolicy.constraints import FractionBelowOne, PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.modality import ENCODERS, ModalityEncoder, prefix_of
from robopolicy.nets.normalizer import RunningNormalizer, Statistics, make_normalizer
from robopolicy.nets.point_cloud import PointCloudConfig
from robopolicy.nets.vision import VisionConfig
from robopolicy.schema import with_defaults
from robopolicy.spec import IMAGE_PREFIX

CLOUD_PREFIX = "point_cloud."
EMBEDDING_PREFIX = "embedding."

ENCODER_FIELDS = {IMAGE_PREFIX: "vision", CLOUD_PREFIX: "point_cloud", EMBEDDING_PREFIX: "embedding"}
"""Prefix of keys -> field of a policy's config with the settings of their encoder."""


@dataclass(frozen=True)
class EmbeddingConfig(Validated):
    """Settings of embeddings of instructions and goals (keys `embedding.*`)."""

    width: PositiveInt = 64  # size of the projection of each embedding
    dropout: FractionBelowOne = 0.0  # imitated samples without embeddings; 0.1 to 0.2 for classifier-free guidance


class EmbeddingEncoder(ModalityEncoder):
    """Embeddings `embedding.*`, float `(D,)`, one projection each."""

    config_class = EmbeddingConfig
    attribute = "projections"
    order = 3

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: EmbeddingConfig) -> None:
        super().__init__(shapes, config)
        self.dropout = config.dropout
        self.feature_dim = len(shapes) * config.width

    def build(self, shape: tuple[int, ...], config: EmbeddingConfig) -> nn.Linear:
        """Build the projection of an embedding."""
        return nn.Linear(math.prod(shape), config.width)

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Features `(B, To, F)` of every embedding; with `augment` all embeddings of some rows are 0."""
        embeddings = [obs[key].flatten(2).float() for key in self.observations]  # (B, To, D) each
        if augment and self.dropout:
            reference = embeddings[0]
            device = reference.device if generator is None else generator.device
            kept = torch.rand(len(reference), 1, 1, generator=generator, device=device) >= self.dropout
            embeddings = [value * kept.to(reference.device) for value in embeddings]
        return [project(value) for project, value in zip(self.values(), embeddings, strict=True)]


def encoder_configs(encoders: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Configs by prefix from settings `{prefix: settings}` of encoders without a field in the config of a policy."""
    configs: dict[str, Any] = {}
    for prefix, settings in encoders.items():
        if prefix not in ENCODERS:
            raise unknown_name("encoder", prefix, ENCODERS, "in encoders")
        if field := ENCODER_FIELDS.get(f"{prefix}."):
            raise UserError(f"Encoder '{prefix}' is set by {field}, not by encoders.{prefix}.")
        configs[prefix] = with_defaults(ENCODERS[prefix].config_class, settings, f"encoders.{prefix}")
    return configs


@dataclass(frozen=True)
class Layout:
    """Observation keys in a fixed order: vectors, and keys with an encoder."""

    vectors: tuple[str, ...]  # sorted
    encoded: tuple[tuple[str, tuple[str, ...]], ...]  # (prefix, sorted keys), in the order of features

    @classmethod
    def of(cls, observation: Mapping[str, tuple[int, ...]]) -> Layout:
        """Sort the keys of a policy specification."""
        if not observation:
            raise UserError("A policy needs at least one observation key.")
        keys: dict[str, list[str]] = {}
        for key in sorted(observation):
            keys.setdefault(prefix_of(key), []).append(key)
        vectors = tuple(keys.pop("", ()))
        prefixes = sorted(keys, key=lambda prefix: (ENCODERS[prefix].order, prefix))
        return cls(vectors, tuple((prefix, tuple(keys[prefix])) for prefix in prefixes))

    def with_statistics(self, kind: str) -> tuple[str, ...]:
        """Keys whose `ModalityEncoder.statistics` is `kind`."""
        return tuple(key for prefix, keys in self.encoded if ENCODERS[prefix].statistics == kind for key in keys)

    @property
    def normalized(self) -> tuple[str, ...]:
        """Keys of the normaliser in the order of its columns: vectors, and encoders with "vector" statistics."""
        return (*self.vectors, *self.with_statistics("vector"))


class ObservationEncoder(nn.Module):
    """Map `{key: (B, To, ...)}` to features `(B, To, F)`."""

    def __init__(
        self,
        observation: Mapping[str, tuple[int, ...]],
        *,
        normalization: str,
        vision: VisionConfig | None = None,
        point_cloud: PointCloudConfig | None = None,
        embedding: EmbeddingConfig | None = None,
        encoders: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Build the encoder.

        `observation` has the per-step shape of every key, `normalization` is a mode in `normalizer.MODES`, `encoders`
        has the settings of further encoders by prefix.
        """
        super().__init__()
        self.layout = Layout.of(observation)
        self.sizes = {key: math.prod(observation[key]) for key in self.layout.vectors}  # numbers with statistics
        for prefix, keys in self.layout.encoded:
            kind = ENCODERS[prefix]
            if kind.statistics != "none":
                self.sizes |= {key: kind.numbers(observation[key]) for key in keys}
        self.normalization = normalization
        self.vector_dim = sum(self.sizes[key] for key in self.layout.normalized)
        self.normalizer = make_normalizer(self.vector_dim, normalization if self.vector_dim else "identity")
        given = {"image": vision, "point_cloud": point_cloud, "embedding": embedding} | encoder_configs(encoders or {})
        self._features: list[str] = []  # attributes of encoders of features
        self._vectors: list[str] = []  # attributes of encoders whose outputs are normalised with the vectors
        for prefix, keys in self.layout.encoded:
            kind = ENCODERS[prefix]
            config = kind.config_class() if given.get(prefix) is None else given[prefix]
            self.add_module(kind.attribute, kind({key: tuple(observation[key]) for key in keys}, config))
            (self._vectors if kind.statistics == "vector" else self._features).append(kind.attribute)
        self.feature_dim = self.vector_dim + sum(self._encoder(name).feature_dim for name in self._features)

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Encode `obs`; `augment` randomly crops images and drops embeddings (only in imitation, not for ratios)."""
        parts = self.parts(obs, augment=augment, generator=generator)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def parts(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Features `(B, To, F)` of the normalised vectors, if any, then of every key of `encoded`."""
        parts = [self.normalizer.normalize(self.vectors(obs))] if self.vector_dim else []
        for name in self._features:
            parts += self._encoder(name)(obs, augment=augment, generator=generator)
        return parts

    @property
    def encoded(self) -> tuple[str, ...]:
        """Keys with features of their own, in the order of `parts`."""
        return tuple(key for name in self._features for key in self._encoder(name).observations)

    def vectors(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the vectors and encoder outputs with "vector" statistics in raw units, `(B, To, D)`."""
        parts = [obs[key].reshape(*obs[key].shape[:2], self.sizes[key]) for key in self.layout.vectors]
        for name in self._vectors:
            parts += self._encoder(name)(obs)
        return parts[0].float() if len(parts) == 1 else torch.cat(parts, -1).float()

    def columns(self) -> dict[str, slice]:
        """Columns of each key in the vector of the normaliser."""
        columns: dict[str, slice] = {}
        start = 0
        for key in self.layout.normalized:
            columns[key] = slice(start, start := start + self.sizes[key])
        return columns

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normaliser of vectors and the boxes of clouds and sets; images and embeddings need no statistics.

        In mode "running" the statistics are the initial values, and are optional.
        """
        mode = self.normalization
        boxed, normalized = self.layout.with_statistics("box"), self.layout.normalized
        missing = [key for key in dict.fromkeys((*self.layout.vectors, *boxed, *normalized)) if key not in statistics]
        if mode == "identity" or (mode == "running" and missing):
            return
        if missing:
            raise UserError(f"The statistics lack the observation keys {missing}; found {sorted(statistics)}.")
        for key in boxed:
            encoder = self.encoder_of(key)
            assert encoder is not None
            encoder.fit(key, *(_statistic(statistics, key, name, self.sizes[key]) for name in ("min", "max")))
        if not self.vector_dim:
            return
        names = ("min", "max") if mode == "minmax" else ("mean", "std")
        joined = {
            name: torch.cat([_statistic(statistics, key, name, self.sizes[key]) for key in normalized])
            for name in names
        }
        if mode == "running":
            joined["count"] = _statistic(statistics, normalized[0], "count", 1)
        self.normalizer.fit(joined)

    def copy_stats(self, *others: ObservationEncoder) -> None:
        """Copy the fitted statistics of `others`, which cover the same observations; the first has precedence."""
        theirs = {name: buffer for other in reversed(others) for name, buffer in other.named_buffers()}
        unfitted = tuple(f"{encoder.attribute}." for encoder in self.encoders() if encoder.statistics == "none")
        for name, buffer in self.named_buffers():
            if not name.startswith(unfitted):
                buffer.copy_(theirs[name])

    def update_stats(self, obs: Mapping[str, Tensor]) -> None:
        """Update a running normaliser with the newest step of `obs`; does nothing in other modes."""
        if isinstance(self.normalizer, RunningNormalizer):
            self.normalizer.update(self.vectors(obs)[:, -1])

    def encoders(self) -> Iterator[ModalityEncoder]:
        """Encoders of the keys that are not vectors."""
        return (self._encoder(name) for name in (*self._features, *self._vectors))

    def encoder_of(self, key: str) -> ModalityEncoder | None:
        """Encoder of an observation key; None for a vector."""
        return next((encoder for encoder in self.encoders() if key in encoder.observations), None)

    def _encoder(self, attribute: str) -> ModalityEncoder:
        return cast(ModalityEncoder, getattr(self, attribute))


def without_embeddings(obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set instruction and goal embeddings in `obs` to 0, for the unconditional part of classifier-free guidance."""
    return {key: torch.zeros_like(value) if key.startswith(EMBEDDING_PREFIX) else value for key, value in obs.items()}


def _statistic(statistics: Statistics, key: str, name: str, size: int) -> Tensor:
    if name not in statistics[key]:
        raise UserError(f"The statistics of '{key}' lack '{name}'; found {sorted(statistics[key])}.")
    value = torch.as_tensor(statistics[key][name], dtype=torch.float64).flatten()
    if value.numel() != size:
        raise UserError(f"The statistic '{name}' of '{key}' has {value.numel()} values, expected {size}.")
    return value
