"""Observation encoder: vectors are concatenated and normalised, camera images pass through one small ResNet each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.nets.normalizer import RunningNormalizer, Statistics, make_normalizer
from robopolicy.nets.vision import CameraNet, VisionConfig

IMAGE_PREFIX = "image."


@dataclass(frozen=True)
class Layout:
    """Which keys are vectors and which are images, in a fixed (sorted) order."""

    vectors: tuple[str, ...]
    images: tuple[str, ...]
    vector_dim: int

    @classmethod
    def of(cls, observation: Mapping[str, tuple[int, ...]]) -> Layout:
        """Sort the keys of a policy specification."""
        if not observation:
            raise UserError("A policy needs at least one observation key.")
        images = tuple(sorted(key for key in observation if key.startswith(IMAGE_PREFIX)))
        vectors = tuple(sorted(key for key in observation if not key.startswith(IMAGE_PREFIX)))
        return cls(vectors, images, sum(_size(observation[key]) for key in vectors))


class ObservationEncoder(nn.Module):
    """Map `{key: (B, To, ...)}` to features `(B, To, F)`."""

    def __init__(
        self,
        observation: Mapping[str, tuple[int, ...]],
        *,
        normalization: str,
        vision: VisionConfig | None = None,
    ) -> None:
        """Build the encoder.

        Args:
            observation: Per-step shape of every key; `image.*` keys are uint8 `(3, h, w)`.
            normalization: Mode of the vector normaliser (`robopolicy.nets.normalizer.MODES`).
            vision: Sizes of the camera networks.
        """
        super().__init__()
        self.layout = Layout.of(observation)
        self.sizes = {key: _size(observation[key]) for key in self.layout.vectors}
        self.normalizer = make_normalizer(self.layout.vector_dim, normalization if self.layout.vectors else "identity")
        # Module names must not contain dots, observation keys do.
        self.cameras = nn.ModuleDict(
            {key.replace(".", "/"): CameraNet(observation[key], vision or VisionConfig()) for key in self.layout.images}
        )
        self.feature_dim = self.layout.vector_dim + sum(camera.feature_dim for camera in self._cameras())

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> Tensor:
        """Encode `obs`; `augment` crops images at random (imitation only: it would break density ratios)."""
        if not self.layout.images:
            return self.normalizer.normalize(self.vectors(obs))
        parts = [self.normalizer.normalize(self.vectors(obs))] if self.layout.vectors else []
        for key, camera in zip(self.layout.images, self._cameras(), strict=True):
            image = obs[key]  # (B, To, 3, h, w) uint8
            features = camera(image.flatten(0, 1), augment=augment, generator=generator)
            parts.append(features.unflatten(0, image.shape[:2]))
        return torch.cat(parts, -1)

    def vectors(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the vector keys in raw units: `(B, To, D)`."""
        parts = [obs[key].reshape(*obs[key].shape[:2], self.sizes[key]) for key in self.layout.vectors]
        return parts[0].float() if len(parts) == 1 else torch.cat(parts, -1).float()

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the vector normaliser; images need no statistics, and running statistics merely start from them."""
        mode = self.normalizer.mode
        missing = [key for key in self.layout.vectors if key not in statistics]
        if mode == "identity" or (mode == "running" and missing):
            return
        if missing:
            raise UserError(f"The statistics lack the observation keys {missing}; found {sorted(statistics)}.")
        names = ("min", "max") if mode == "minmax" else ("mean", "std")
        joined = {
            name: torch.cat([_statistic(statistics, key, name, self.sizes[key]) for key in self.layout.vectors])
            for name in names
        }
        if mode == "running":
            joined["count"] = _statistic(statistics, self.layout.vectors[0], "count", 1)
        self.normalizer.fit(joined)

    def observe(self, obs: Mapping[str, Tensor]) -> None:
        """Merge the newest step of `obs` into a running normaliser; does nothing in other modes."""
        if isinstance(self.normalizer, RunningNormalizer):
            self.normalizer.update(self.vectors(obs)[:, -1])

    def _cameras(self) -> list[CameraNet]:
        return [camera for camera in self.cameras.values() if isinstance(camera, CameraNet)]


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _statistic(statistics: Statistics, key: str, name: str, size: int) -> Tensor:
    if name not in statistics[key]:
        raise UserError(f"The statistics of '{key}' lack '{name}'; found {sorted(statistics[key])}.")
    value = torch.as_tensor(statistics[key][name], dtype=torch.float64).flatten()
    if value.numel() != size:
        raise UserError(f"The statistic '{name}' of '{key}' has {value.numel()} values, expected {size}.")
    return value
