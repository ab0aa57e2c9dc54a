"""Observation encoder; the prefix of a key says what it is.

* `image.*`: uint8 `(3, h, w)`, one camera network each (`vision.py`);
* `point_cloud.*`: float `(N, 3)` [m], one network each (`point_cloud.py`);
* `entities.*`: float `(N, D)`, a set such as the other agents in sight, one network each (`entities.py`);
* `embedding.*`: float `(D,)`, an embedding of an instruction or a goal, e.g. of unit norm from a text encoder. It is
  not normalised and has a projection of its own. While imitating, a share of the rows may see zeros instead of all its
  embeddings, so that zeros come to mean "no instruction" (`without_embeddings`, for classifier-free guidance);
* `stock.<discount>`: float `(2,)`, what the episode has earned and how worth has grown since it began.
  Enters as one number, the stock: what was earned plus `start` times the growth;
* anything else, a goal position for instance: a vector, concatenated in sorted order and normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.limits import Count, PartialShare, Ranged
from robopolicy.nets.entities import EntityConfig, EntityNet
from robopolicy.nets.normalizer import RunningNormalizer, Statistics, make_normalizer
from robopolicy.nets.point_cloud import PointCloudConfig, PointCloudNet
from robopolicy.nets.vision import CameraNet, VisionConfig
from robopolicy.spec import IMAGE_PREFIX

CLOUD_PREFIX = "point_cloud."
ENTITY_PREFIX = "entities."
EMBEDDING_PREFIX = "embedding."
STOCK_PREFIX = "stock."


@dataclass(frozen=True)
class EmbeddingConfig(Ranged):
    """How embeddings of instructions and goals (keys `embedding.*`) enter a policy."""

    width: Count = 64  # size of the projection of each embedding
    dropout: PartialShare = 0.0  # share of imitated samples without embeddings; 0.1 to 0.2 for classifier-free guidance


@dataclass(frozen=True)
class Layout:
    """Which keys are vectors, images, point clouds, sets and embeddings, in a fixed (sorted) order."""

    vectors: tuple[str, ...]
    images: tuple[str, ...]
    clouds: tuple[str, ...]
    entities: tuple[str, ...]
    embeddings: tuple[str, ...]
    stocks: tuple[str, ...]
    vector_dim: int

    @classmethod
    def of(cls, observation: Mapping[str, tuple[int, ...]]) -> Layout:
        """Sort the keys of a policy specification."""
        if not observation:
            raise UserError("A policy needs at least one observation key.")
        images = tuple(sorted(key for key in observation if key.startswith(IMAGE_PREFIX)))
        clouds = tuple(sorted(key for key in observation if key.startswith(CLOUD_PREFIX)))
        entities = tuple(sorted(key for key in observation if key.startswith(ENTITY_PREFIX)))
        embeddings = tuple(sorted(key for key in observation if key.startswith(EMBEDDING_PREFIX)))
        stocks = tuple(sorted(key for key in observation if key.startswith(STOCK_PREFIX)))
        vectors = tuple(sorted(observation.keys() - {*images, *clouds, *entities, *embeddings, *stocks}))
        size = sum(_size(observation[key]) for key in vectors) + len(stocks)
        return cls(vectors, images, clouds, entities, embeddings, stocks, size)


class ObservationEncoder(nn.Module):
    """Map `{key: (B, To, ...)}` to features `(B, To, F)`."""

    start: Tensor

    def __init__(
        self,
        observation: Mapping[str, tuple[int, ...]],
        *,
        normalization: str,
        vision: VisionConfig | None = None,
        point_cloud: PointCloudConfig | None = None,
        embedding: EmbeddingConfig | None = None,
        entities: EntityConfig | None = None,
    ) -> None:
        """Build the encoder.

        Args:
            observation: Per-step shape of every key.
            normalization: Mode of the vector normaliser (`robopolicy.nets.normalizer.MODES`).
            vision: Kind and sizes of the camera networks.
            point_cloud: Sizes of the point-cloud networks.
            embedding: Size of the projections, and dropout.
            entities: Sizes of the networks for sets of entities.
        """
        super().__init__()
        self.layout = Layout.of(observation)
        if self.layout.stocks:
            self.register_buffer("start", torch.zeros(()))  # stock at the start of an episode
        sized = (*self.layout.vectors, *self.layout.clouds, *self.layout.entities)
        self.sizes = {key: _size(observation[key]) for key in sized}
        self.normalization = normalization
        dim = self.layout.vector_dim
        self.normalizer = make_normalizer(dim, normalization if dim else "identity")
        # Module names must not contain dots, observation keys do.
        self.cameras = nn.ModuleDict(
            {key.replace(".", "/"): CameraNet(observation[key], vision or VisionConfig()) for key in self.layout.images}
        )
        self.clouds = nn.ModuleDict(
            {
                key.replace(".", "/"): PointCloudNet(observation[key], point_cloud or PointCloudConfig())
                for key in self.layout.clouds
            }
        )
        self.entities = nn.ModuleDict(
            {
                key.replace(".", "/"): EntityNet(observation[key], entities or EntityConfig())
                for key in self.layout.entities
            }
        )
        self.embedding = embedding or EmbeddingConfig()
        self.projections = nn.ModuleDict(
            {
                key.replace(".", "/"): nn.Linear(_size(observation[key]), self.embedding.width)
                for key in self.layout.embeddings
            }
        )
        self.feature_dim = (
            self.layout.vector_dim
            + sum(camera.feature_dim for camera in self._cameras())
            + sum(net.feature_dim for net in (*self._cloud_nets(), *self._entity_nets()))
            + len(self.projections) * self.embedding.width
        )

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Encode `obs`.

        `augment` crops images and drops embeddings at random (imitation only: it would break density ratios).
        """
        parts = [self.normalizer.normalize(self.vectors(obs))] if self.layout.vector_dim else []
        if not (self.layout.images or self.layout.clouds or self.layout.entities or self.layout.embeddings):
            return parts[0]
        for key, camera in zip(self.layout.images, self._cameras(), strict=True):
            image = obs[key]  # (B, To, 3, h, w) uint8
            features = camera(image.flatten(0, 1), augment=augment, generator=generator)
            parts.append(features.unflatten(0, image.shape[:2]))
        for key, net in zip(self.layout.clouds, self._cloud_nets(), strict=True):
            cloud = obs[key].float()  # (B, To, N, 3)
            parts.append(net(cloud.flatten(0, 1)).unflatten(0, cloud.shape[:2]))
        for key, net in zip(self.layout.entities, self._entity_nets(), strict=True):
            entities = obs[key].float()  # (B, To, N, D)
            parts.append(net(entities.flatten(0, 1)).unflatten(0, entities.shape[:2]))
        if self.layout.embeddings:
            parts += self._project(obs, augment, generator)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _project(self, obs: Mapping[str, Tensor], augment: bool, generator: torch.Generator | None) -> list[Tensor]:
        embeddings = [obs[key].flatten(2).float() for key in self.layout.embeddings]  # (B, To, D) each
        if augment and self.embedding.dropout:
            reference = embeddings[0]
            device = reference.device if generator is None else generator.device
            kept = torch.rand(len(reference), 1, 1, generator=generator, device=device) >= self.embedding.dropout
            embeddings = [value * kept.to(reference.device) for value in embeddings]  # all of a row or none
        return [project(value) for project, value in zip(self.projections.values(), embeddings, strict=True)]

    def vectors(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the vector keys and the stock in raw units: `(B, To, D)`."""
        parts = [obs[key].reshape(*obs[key].shape[:2], self.sizes[key]) for key in self.layout.vectors]
        parts += [self.stock(obs[key]) for key in self.layout.stocks]
        return parts[0].float() if len(parts) == 1 else torch.cat(parts, -1).float()

    def stock(self, earned: Tensor) -> Tensor:
        """The stock `(B, To, 1)` of an observation `stock.*` `(B, To, 2)`."""
        return earned[..., :1] + self.start * earned[..., 1:]

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normaliser of vectors and the boxes of clouds and sets; images and embeddings need no statistics.

        Running statistics merely start there, and clouds and sets then stay in their units where none are given.
        """
        mode = self.normalization
        wanted = (*self.layout.vectors, *self.layout.clouds, *self.layout.entities, *self.layout.stocks)
        missing = [key for key in wanted if key not in statistics]
        if mode == "identity" or (mode == "running" and missing):
            return
        if missing:
            raise UserError(f"The statistics lack the observation keys {missing}; found {sorted(statistics)}.")
        boxed = (*self.layout.clouds, *self.layout.entities)
        for key, net in zip(boxed, (*self._cloud_nets(), *self._entity_nets()), strict=True):
            net.fit(*(_statistic(statistics, key, name, self.sizes[key]) for name in ("min", "max")))
        if not self.layout.vector_dim:
            return
        names = ("min", "max") if mode == "minmax" else ("mean", "std")
        joined = {
            name: torch.cat(
                [_statistic(statistics, key, name, self.sizes[key]) for key in self.layout.vectors]
                + [_statistic(statistics, key, name, 1) for key in self.layout.stocks]
            )
            for name in names
        }
        if mode == "running":
            joined["count"] = _statistic(statistics, (*self.layout.vectors, *self.layout.stocks)[0], "count", 1)
        self.normalizer.fit(joined)

    def borrow(self, *others: ObservationEncoder) -> None:
        """Take over all that was fitted of `others`, which see the same: statistics, boxes and the first stock.

        Of a composition each may know a part; where several know the same, the first one's counts.
        """
        theirs = {name: buffer for other in reversed(others) for name, buffer in other.named_buffers()}
        for name, buffer in self.named_buffers():
            if not name.startswith("cameras."):
                buffer.copy_(theirs[name])

    def observe(self, obs: Mapping[str, Tensor]) -> None:
        """Merge the newest step of `obs` into a running normaliser; does nothing in other modes."""
        if isinstance(self.normalizer, RunningNormalizer):
            self.normalizer.update(self.vectors(obs)[:, -1])

    def _cameras(self) -> list[CameraNet]:
        return [camera for camera in self.cameras.values() if isinstance(camera, CameraNet)]

    def _cloud_nets(self) -> list[PointCloudNet]:
        return [net for net in self.clouds.values() if isinstance(net, PointCloudNet)]

    def _entity_nets(self) -> list[EntityNet]:
        return [net for net in self.entities.values() if isinstance(net, EntityNet)]


def without_embeddings(obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`obs` as it looks without instruction and goal embeddings: the unconditional half of classifier-free guidance."""
    return {key: torch.zeros_like(value) if key.startswith(EMBEDDING_PREFIX) else value for key, value in obs.items()}


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _statistic(statistics: Statistics, key: str, name: str, size: int) -> Tensor:
    if name not in statistics[key]:
        raise UserError(f"The statistics of '{key}' lack '{name}'; found {sorted(statistics[key])}.")
    value = torch.as_tensor(statistics[key][name], dtype=torch.float64).flatten()
    if value.numel() != size:
        raise UserError(f"The statistic '{name}' of '{key}' has {value.numel()} values, expected {size}.")
    return value
