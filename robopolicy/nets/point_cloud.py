"""Point-cloud network: an MLP per point and a maximum, invariant to order and repetition of points.

The encoder of 3D Diffusion Policy (Ze et al. 2024): three linear layers with LayerNorm, the maximum over the points of
every channel, and a projection with LayerNorm. Deviation: one scale for all three coordinates, which keeps shapes
undistorted; the original scales each separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from robopolicy.constraints import PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.modality import ModalityEncoder


@dataclass(frozen=True)
class PointCloudConfig(Validated):
    """Sizes of one point-cloud network (one network per cloud)."""

    widths: tuple[PositiveInt, ...] = (64, 128, 256)  # channels of the layers per point
    features: PositiveInt = 64  # size of the projection of the maximum

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.widths:
            raise UserError("point_cloud.widths needs at least one width, got none.")


class PointCloudNet(nn.Module):
    """Map clouds `(B, N, 3)` [m] to features `(B, feature_dim)`."""

    def __init__(self, shape: tuple[int, ...], config: PointCloudConfig) -> None:
        super().__init__()
        if len(shape) != 2 or shape[1] != 3 or shape[0] < 1:
            raise UserError(f"A point cloud has shape (points, 3), got {tuple(shape)}.")
        layers: list[nn.Module] = []
        for before, after in zip((3, *config.widths), config.widths, strict=False):
            layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.project = nn.Sequential(nn.Linear(config.widths[-1], config.features), nn.LayerNorm(config.features))
        self.feature_dim = config.features
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, cloud: Tensor) -> Tensor:
        """Encode each cloud."""
        centre, scale = cast(Tensor, self.centre), cast(Tensor, self.scale)
        return self.project(self.points((cloud - centre) / scale).amax(-2))

    def fit(self, low: Tensor, high: Tensor) -> None:
        """Map the box from `low` to `high`, `(N, 3)` or `(3,)` [m], into [-1, 1]."""
        low, high = low.reshape(-1, 3).amin(0), high.reshape(-1, 3).amax(0)
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise UserError("The statistics of a point cloud are not finite; repair or drop the episode.")
        cast(Tensor, self.centre).copy_((low + high) / 2)
        cast(Tensor, self.scale).copy_(((high - low).max() / 2).clamp(min=1e-4))


class PointCloudEncoder(ModalityEncoder):
    """Point clouds `point_cloud.*`, float `(N, 3)` [m], one network each."""

    config_class = PointCloudConfig
    attribute = "clouds"
    order = 1
    rank = 2
    statistics = "box"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: PointCloudConfig) -> None:
        super().__init__(shapes, config)
        self.feature_dim = len(shapes) * config.features

    def build(self, shape: tuple[int, ...], config: PointCloudConfig) -> PointCloudNet:
        """Build the network of a cloud."""
        return PointCloudNet(shape, config)
