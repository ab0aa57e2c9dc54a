"""Backbone networks of the heads.

Denoising heads map noisy chunk, time(s) and features to a chunk; direct heads map features to a chunk. Both select a
class in `BACKBONES`. Times are `(B,)` or `(B, times)`, or broadcast over the iterates, e.g. `(T,)` for chains `(B, T,
H, A)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import FractionBelowOne, Layers, PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.inverted_residual import InvertedResidual
from robopolicy.nets.mlp import MLP, ResidualMLP, check_init, initialize
from robopolicy.nets.time import TimeEmbedding, network_rows
from robopolicy.nets.transformer import ActionTransformer
from robopolicy.nets.unet1d import UNet1d
from robopolicy.plugins import Registry
from robopolicy.schema import with_defaults


@dataclass(frozen=True)
class BackboneConfig(Validated):
    """Type and sizes of the network; a base of every head's configuration."""

    backbone: str = "mlp"  # mlp | inverted_residual (FlashSAC) | unet | transformer | a name from contrib or a plugin
    time_dim: PositiveInt = 16  # width of the time embedding (all but transformer); 1: the time itself
    hidden: tuple[PositiveInt, ...] = (256, 256, 256)  # mlp; inverted_residual: equal widths, one per block
    hidden_dropout: FractionBelowOne = 0.0  # mlp without residual blocks: dropout of hidden units
    residual: bool = False  # mlp: residual blocks (an odd number of equal widths), as in DPPO
    activation: str = "silu"  # mlp; mish costs seven times as much on a CPU
    init: str = "torch"  # mlp of a denoising head: torch | xavier (uniform, with zero biases), as in FQL and QC
    unet_channels: tuple[PositiveInt, ...] = (64, 128, 256)  # published sizes: [256, 512, 1024]
    unet_kernel: PositiveInt = 5
    transformer_width: PositiveInt = 128  # published sizes: width 256, 8 layers
    transformer_layers: Layers = 4
    transformer_heads: PositiveInt = 4
    transformer_dropout: FractionBelowOne = 0.0  # keep 0 if the policy will be fine-tuned by RL
    backbone_options: dict[str, Any] = field(default_factory=dict)  # further settings of the chosen backbone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone not in BACKBONES:
            raise unknown_name("backbone", self.backbone, BACKBONES)
        check_init(self.init, self.backbone)
        if self.transformer_width % self.transformer_heads:
            width, heads = self.transformer_width, self.transformer_heads
            raise UserError(f"transformer_width {width} must be a multiple of transformer_heads {heads}.")
        self.options()

    def options(self) -> Any:
        """`backbone_options` as config of the chosen backbone; raises `UserError` for unknown options or bad values."""
        config_class = BACKBONES[self.backbone].config_class
        if config_class is NoOptions and self.backbone_options:
            raise UserError(f"Backbone '{self.backbone}' takes no backbone_options, got {self.backbone_options}.")
        return with_defaults(config_class, self.backbone_options, "backbone_options")


@dataclass(frozen=True)
class NetworkSizes:
    """Input and output sizes of the network of a head."""

    action_dim: int  # A; for direct heads the outputs per action of the chunk
    horizon: int  # H
    feature_dim: int  # F, width of the features of one observation
    obs_horizon: int  # To

    @property
    def chunk(self) -> int:
        """Size of a chunk, H * A."""
        return self.horizon * self.action_dim

    @property
    def features(self) -> int:
        """Size of the features of all observations, To * F."""
        return self.obs_horizon * self.feature_dim


UNET_SIZES = ("unet_channels", "unet_kernel")
TRANSFORMER_SIZES = ("transformer_width", "transformer_layers", "transformer_heads", "transformer_dropout")


@dataclass(frozen=True)
class NoOptions:
    """Config of a backbone without further settings."""


class BackboneBuilder(ABC):
    """Type of network in `BACKBONES`, with class methods that build it; it has no instances."""

    config_class: ClassVar[type[Any]] = NoOptions  # frozen dataclass of the `backbone_options`
    unused: ClassVar[tuple[str, ...]] = ()  # fields of `BackboneConfig` without effect; not inherited

    @classmethod
    @abstractmethod
    def denoiser(cls, config: BackboneConfig, sizes: NetworkSizes, times: int) -> nn.Module:
        """Build a network of `x` `(B, ..., H, A)`, times and features `(B, To, F)` with a method `representation`."""

    @classmethod
    def direct(cls, config: BackboneConfig, sizes: NetworkSizes, orthogonal_gain: float | None) -> nn.Module:
        """Build a network from features `(B, To, F)` to `(B, H, A)`."""
        return QueryNet(cls.denoiser(config, sizes, 1), channels=sizes.action_dim, horizon=sizes.horizon)


class MLPBackbone(nn.Module):
    """MLP on the flattened chunk, the time embedding(s) and all features."""

    def __init__(self, config: BackboneConfig, *, size: int, feature_dim: int, times: int) -> None:
        super().__init__()
        self.time = TimeEmbedding(config.time_dim, times)
        in_dim = size + config.time_dim + feature_dim
        self.body: MLP | ResidualMLP | SingleInvertedResidual
        if config.backbone == "inverted_residual":
            self.body = SingleInvertedResidual(1, in_dim, config.hidden, size)
        elif config.residual:
            self.body = ResidualMLP(in_dim, config.hidden, size, activation=config.activation)
        else:
            self.body = MLP(in_dim, config.hidden, size, activation=config.activation, dropout=config.hidden_dropout)
        initialize(self.body, config.init)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Map `x` `(B, ..., H, A)`, `t` and `features` `(B, To, F)` to the shape of `x`; see `network_rows`."""
        return self.body(self._joined(x, t, features)).view_as(x)

    def representation(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Activations `(B, D)` of the middle layer."""
        return self.body.representation(self._joined(x, t, features))

    def _joined(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        x, time, features = network_rows(x, self.time(t), features)
        return torch.cat([x.flatten(1), time, features.flatten(1)], -1)


class SingleInvertedResidual(InvertedResidual):
    """Inverted residual network: `(B, in)` -> `(B, out)`."""

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Map all rows."""
        return super().forward(x, members).squeeze(0)

    def representation(self, x: Tensor) -> Tensor:
        """Activations `(B, width)` after half of the blocks."""
        return super().representation(x).squeeze(0)


class DirectMLP(MLP):
    """MLP from all features `(B, To, F)` to `(B, H, channels)`."""

    def __init__(self, config: BackboneConfig, *, channels: int, horizon: int, in_dim: int, gain: float | None) -> None:
        out_dim, activation, dropout = horizon * channels, config.activation, config.hidden_dropout
        super().__init__(in_dim, config.hidden, out_dim, activation=activation, dropout=dropout, orthogonal_gain=gain)
        self.shape = (horizon, channels)

    def forward(self, features: Tensor) -> Tensor:
        """Predict all steps of the chunk."""
        return super().forward(features.flatten(1)).unflatten(1, self.shape)


class QueryNet(nn.Module):
    """Denoising network with learned queries at time 0, from features `(B, To, F)` to `(B, H, channels)`."""

    def __init__(self, backbone: nn.Module, *, channels: int, horizon: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.queries = nn.Parameter(torch.randn(horizon, channels))  # scale of noise

    def forward(self, features: Tensor) -> Tensor:
        """Predict all steps of the chunk."""
        return self.backbone(self.queries.expand(len(features), -1, -1), features.new_zeros(1), features)


class MLPBuilder(BackboneBuilder):
    """Plain or residual MLP."""

    unused = (*UNET_SIZES, *TRANSFORMER_SIZES)

    @classmethod
    def denoiser(cls, config: BackboneConfig, sizes: NetworkSizes, times: int) -> nn.Module:
        """Build an MLP on chunk, times and features."""
        return MLPBackbone(config, size=sizes.chunk, feature_dim=sizes.features, times=times)

    @classmethod
    def direct(cls, config: BackboneConfig, sizes: NetworkSizes, orthogonal_gain: float | None) -> nn.Module:
        """Build an MLP on features, or a residual one with learned queries."""
        if config.residual:
            return super().direct(config, sizes, orthogonal_gain)
        return DirectMLP(
            config, channels=sizes.action_dim, horizon=sizes.horizon, in_dim=sizes.features, gain=orthogonal_gain
        )


class InvertedResidualBuilder(MLPBuilder):
    """Inverted residual blocks with batch normalisation."""

    unused = (*UNET_SIZES, *TRANSFORMER_SIZES)

    @classmethod
    def direct(cls, config: BackboneConfig, sizes: NetworkSizes, orthogonal_gain: float | None) -> nn.Module:
        """Build a network on features, with its own initialisation."""
        network = SingleInvertedResidual(1, sizes.features, config.hidden, sizes.chunk)
        return nn.Sequential(nn.Flatten(), network, nn.Unflatten(1, (sizes.horizon, sizes.action_dim)))


class UNetBuilder(BackboneBuilder):
    """Temporal U-Net over the chunk."""

    unused = TRANSFORMER_SIZES

    @classmethod
    def denoiser(cls, config: BackboneConfig, sizes: NetworkSizes, times: int) -> nn.Module:
        """Build a U-Net along the chunk, modulated by times and features."""
        return UNet1d(
            sizes.action_dim,
            sizes.features,
            channels=config.unet_channels,
            time_dim=config.time_dim,
            kernel=config.unet_kernel,
            times=times,
        )


class TransformerBuilder(BackboneBuilder):
    """Transformer over the actions of the chunk."""

    unused = UNET_SIZES

    @classmethod
    def denoiser(cls, config: BackboneConfig, sizes: NetworkSizes, times: int) -> nn.Module:
        """Build a transformer on actions, times and observations."""
        return ActionTransformer(
            sizes.action_dim,
            sizes.feature_dim,
            horizon=sizes.horizon,
            obs_horizon=sizes.obs_horizon,
            first_action=sizes.obs_horizon - 1,
            width=config.transformer_width,
            layers=config.transformer_layers,
            heads=config.transformer_heads,
            dropout=config.transformer_dropout,
            times=times,
        )


BACKBONES: Registry[type[BackboneBuilder]] = Registry(
    "backbones",
    {
        "inverted_residual": InvertedResidualBuilder,
        "mlp": MLPBuilder,
        "transformer": TransformerBuilder,
        "unet": UNetBuilder,
    },
)
"""Name -> class that builds the networks."""


def make_direct(
    config: BackboneConfig,
    *,
    channels: int,
    horizon: int,
    feature_dim: int,
    obs_horizon: int,
    orthogonal_gain: float | None = None,
) -> nn.Module:
    """Build the network of a direct head, `(B, To, F)` -> `(B, H, channels)`.

    `orthogonal_gain` is the output gain of the orthogonal initialisation of plain layers; None keeps torch's default.
    """
    sizes = NetworkSizes(channels, horizon, feature_dim, obs_horizon)
    return BACKBONES[config.backbone].direct(config, sizes, orthogonal_gain)


def make_backbone(
    config: BackboneConfig, *, action_dim: int, horizon: int, feature_dim: int, obs_horizon: int, times: int = 1
) -> nn.Module:
    """Build the network of a denoising head; heads with learned step lengths need two time inputs."""
    sizes = NetworkSizes(action_dim, horizon, feature_dim, obs_horizon)
    return BACKBONES[config.backbone].denoiser(config, sizes, times)
