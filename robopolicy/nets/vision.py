"""Camera networks: a ResNet with GroupNorm and spatial softmax, a ResNet-18, or a small transformer over patches.

All use the centre crop, or a random crop in imitation, and the images of a batch never interact (no BatchNorm). The
transformer is DPPO's (from IBRL): two convolutions embed overlapping patches, followed by `vit_depth` attention blocks
and a learned spatial embedding instead of pooling. Deviations: random crops instead of DPPO's padded random shifts, and
no dropout (there: 0.5 on the embedding), which would break density ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.constraints import AtLeastTwo, Layers, PositiveFraction, PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.augmentation import augmentation_config
from robopolicy.nets.modality import ModalityEncoder, module_name
from robopolicy.nets.resnet18 import CHANNELS, ResNet18
from robopolicy.nets.transformer import AttentionBlock

KINDS = ("resnet", "resnet18", "vit")


@dataclass(frozen=True)
class VisionConfig(Validated):
    """Type and sizes of a camera network."""

    kind: str = "resnet"  # resnet | resnet18 (of LeRobot and torchvision) | vit
    widths: tuple[PositiveInt, ...] = (32, 64, 128)  # resnet: channels per stage; each halves the image
    blocks: Layers = 1  # resnet: blocks per stage; widths [64, 128, 256, 512] with 2 blocks is a ResNet-18
    keypoints: PositiveInt = 32  # resnet, resnet18: expected 2-D positions of the spatial softmax
    vit_patch: AtLeastTwo = 8  # vit: distance of neighbouring patches [pixels], even
    vit_depth: Layers = 1  # vit: attention blocks
    vit_width: PositiveInt = 128  # vit: channels per patch
    vit_heads: PositiveInt = 4  # vit: attention heads
    vit_features: PositiveInt = 128  # vit: size of the spatial embedding
    shared: bool = False  # one network for all cameras, whose images have one size; else one per camera
    tokens: bool = False  # features are the pixels or patches of the last map, which the policy `act` attends to
    crop: PositiveFraction = 0.9  # side of the crop relative to the image; 1 disables cropping
    augmentation: dict[str, Any] = field(
        default_factory=dict
    )  # learned augmentation in behaviour cloning: name and settings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise unknown_name("camera network", self.kind, KINDS)
        if not self.widths or any(width % 16 for width in self.widths):
            raise UserError(f"vision.widths must be multiples of 16, got {list(self.widths)}.")
        if self.vit_patch % 2:
            raise UserError(f"vision.vit_patch must be even, got {self.vit_patch}.")
        if self.vit_width % self.vit_heads:
            raise UserError(f"vision.vit_width {self.vit_width} must be a multiple of vit_heads {self.vit_heads}.")
        augmentation_config(self.augmentation)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm (16 channels per group), so samples of a batch never interact."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False),
            nn.GroupNorm(out_channels // 16, out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False),
            nn.GroupNorm(out_channels // 16, out_channels),
        )
        same = stride == 1 and in_channels == out_channels
        self.skip = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(B, C, h, w)` to `(B, C', h / stride, w / stride)`."""
        return F.relu(self.body(x) + self.skip(x))


class SpatialSoftmax(nn.Module):
    """Expected image position of each of `keypoints` learned features: `(B, C, h, w)` -> `(B, 2 * keypoints)`."""

    def __init__(self, channels: int, keypoints: int) -> None:
        super().__init__()
        self.heads = nn.Conv2d(channels, keypoints, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute positions in [-1, 1], x before y."""
        weight = self.heads(x).flatten(2).softmax(-1).unflatten(-1, x.shape[-2:])  # (B, P, h, w)
        rows = torch.linspace(-1, 1, x.shape[-2], device=x.device)
        columns = torch.linspace(-1, 1, x.shape[-1], device=x.device)
        return torch.cat([weight.sum(-2) @ columns, weight.sum(-1) @ rows], -1)


class PatchTransformer(nn.Module):
    """Images `(B, C, h, w)` to normalised patch tokens `(B, P, width)`."""

    def __init__(self, channels: int, size: tuple[int, int], config: VisionConfig) -> None:
        super().__init__()
        patch, width = config.vit_patch, config.vit_width
        grid = [(((side - patch) // (patch // 2) + 1) - 3) // 2 + 1 for side in size]
        if min(grid) < 1:
            raise UserError(
                f"A vit with vit_patch {patch} needs crops of at least {2 * patch} pixels a side, got {min(size)}; "
                "use larger images, smaller patches or vision.kind=resnet."
            )
        self.grid = grid[0], grid[1]
        self.count = grid[0] * grid[1]  # P
        self.embed = nn.Sequential(
            nn.Conv2d(channels, width, patch, patch // 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2)
        )
        self.position = nn.Parameter(0.02 * torch.randn(self.count, width))
        self.blocks = nn.Sequential(*(AttentionBlock(width, config.vit_heads) for _ in range(config.vit_depth)))
        self.norm = nn.LayerNorm(width)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches and apply the attention blocks."""
        return self.norm(self.blocks(self.embed(x).flatten(2).transpose(1, 2) + self.position))


class SpatialEmbedding(nn.Module):
    """Patch tokens `(B, P, width)` to `(B, features)`: a projection of each channel's map, weighted and summed."""

    def __init__(self, patches: int, width: int, features: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(patches, features), nn.LayerNorm(features), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(width, features))

    def forward(self, x: Tensor) -> Tensor:
        """Project where in the image a channel is active, which pooling would discard."""
        return (self.weight * self.project(x.transpose(1, 2))).sum(1)


class Tokens(nn.Module):
    """Pixels `(B, C, h, w)` or patches `(B, P, C)` as features `(B, P * C)`, by rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Put the channels last and flatten."""
        return (x if x.dim() == 3 else x.permute(0, 2, 3, 1)).flatten(1)


class CameraNet(nn.Module):
    """Map uint8 images `(B, 3, h, w)` to features `(B, feature_dim)`.

    The last map has `grid` rows and columns and `map_channels` channels.
    """

    def __init__(self, shape: Sequence[int], config: VisionConfig) -> None:
        super().__init__()
        channels, height, width = shape
        self.crop_size = (max(1, round(height * config.crop)), max(1, round(width * config.crop)))
        chosen = augmentation_config(config.augmentation)
        self.augmentation = None if chosen is None else chosen[0](channels, chosen[1])
        self.body: nn.Module
        self.pool: nn.Module
        if config.kind == "vit":
            self.body = PatchTransformer(channels, self.crop_size, config)
            self.pool = SpatialEmbedding(self.body.count, config.vit_width, config.vit_features)
            self.map_channels, self.grid = config.vit_width, self.body.grid
            self.feature_dim = config.vit_features
        else:
            if config.kind == "resnet18":
                self.body, self.map_channels, halvings = ResNet18(), CHANNELS, 5
            else:
                self.body, halvings = _resnet(channels, self.crop_size, config)
                self.map_channels = config.widths[-1]
            height, width = (-(-side // 2**halvings) for side in self.crop_size)
            self.grid = height, width
            self.pool = SpatialSoftmax(self.map_channels, config.keypoints)
            self.feature_dim = 2 * config.keypoints
        if config.tokens:
            self.pool = Tokens()
            self.feature_dim = self.grid[0] * self.grid[1] * self.map_channels

    def forward(self, image: Tensor, *, augment: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Encode the centre crop, or with `augment` a random crop per image with learned augmentation."""
        crop = self._random_crop(image, generator) if augment else self._centre_crop(image)
        scaled = crop.float() / 127.5 - 1
        if augment and self.augmentation is not None:
            scaled = self.augmentation(scaled)
        return self.pool(self.body(scaled))

    def _centre_crop(self, image: Tensor) -> Tensor:
        height, width = self.crop_size
        top, left = (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2
        return image[..., top : top + height, left : left + width]

    def _random_crop(self, image: Tensor, generator: torch.Generator | None) -> Tensor:
        height, width = self.crop_size
        batch = image.shape[0]
        device = image.device if generator is None else generator.device
        uniform = torch.rand(2, batch, generator=generator, device=device).to(image.device)
        top = (uniform[0] * (image.shape[-2] - height + 1)).long()
        left = (uniform[1] * (image.shape[-1] - width + 1)).long()
        rows = top[:, None] + torch.arange(height, device=image.device)  # (B, h')
        columns = left[:, None] + torch.arange(width, device=image.device)  # (B, w')
        index = torch.arange(batch, device=image.device)[:, None, None]
        return image.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class ImageEncoder(ModalityEncoder):
    """Images `image.*`, uint8 `(3, h, w)`, one camera network each, or one for all."""

    config_class = VisionConfig
    attribute = "cameras"
    order = 0
    rank = 3

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: VisionConfig) -> None:
        sizes = dict(shapes)
        if config.shared:
            sizes = dict(list(sizes.items())[:1])
            if len(set(shapes.values())) > 1:
                found = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
                raise UserError(f"vision.shared needs images of one size, found {found}; set it to false.")
        super().__init__(sizes, config)
        self.observations = tuple(shapes)
        self.feature_dim = sum(self.network(key).feature_dim for key in self.observations)

    def network(self, key: str) -> CameraNet:
        """Network of a camera."""
        name = module_name(key)
        return cast(CameraNet, self[name] if name in self else next(iter(self.values())))

    def build(self, shape: tuple[int, ...], config: VisionConfig) -> CameraNet:
        """Build a camera network."""
        return CameraNet(shape, config)

    def forward(
        self, obs: Mapping[str, Tensor], *, augment: bool = False, generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Features `(B, To, F)` of every camera; `augment` crops images randomly."""
        features: list[Tensor] = []
        for key in self.observations:
            image = obs[key]  # (B, To, 3, h, w) uint8
            encoded = self.network(key)(image.flatten(0, 1), augment=augment, generator=generator)
            features.append(encoded.unflatten(0, image.shape[:2]))
        return features


def _resnet(channels: int, size: tuple[int, int], config: VisionConfig) -> tuple[nn.Sequential, int]:
    """Build stages that halve images of `size` while at least two rows and columns remain; count the halvings."""
    stem = config.widths[0]
    layers: list[nn.Module] = [nn.Conv2d(channels, stem, 5, 2, 2), nn.GroupNorm(stem // 16, stem), nn.ReLU()]
    in_channels, side, halvings = stem, -(-min(size) // 2), 1
    for out_channels in config.widths:
        stride = 2 if side > 2 else 1
        side, halvings = -(-side // stride), halvings + stride - 1
        for block in range(config.blocks):
            layers.append(ResidualBlock(in_channels, out_channels, stride if block == 0 else 1))
            in_channels = out_channels
    return nn.Sequential(*layers), halvings
