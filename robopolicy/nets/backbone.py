"""The networks of the heads.

Denoising heads map noisy chunk, time(s) and features to a chunk; direct heads map features to a chunk. Both choose
among the same four backbones. Times are `(B,)` or `(B, times)`, or whatever else broadcasts over the iterates: one time
for all, or `(T,)` for those of chains `(B, T, H, A)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name
from robopolicy.limits import Count, Layers, PartialShare, Ranged
from robopolicy.nets.mlp import MLP, ResidualMLP
from robopolicy.nets.modular import ModularMLP
from robopolicy.nets.time import TimeEmbedding, network_rows
from robopolicy.nets.transformer import ActionTransformer
from robopolicy.nets.unet1d import UNet1d

BACKBONES = ("mlp", "modular", "unet", "transformer")


@dataclass(frozen=True)
class BackboneConfig(Ranged):
    """Which network and how large; a base of every head's configuration."""

    backbone: str = "mlp"  # mlp | modular | unet | transformer
    time_dim: Count = 16  # width of the time embedding (all but transformer)
    hidden: tuple[Count, ...] = (256, 256, 256)  # mlp and modular
    hidden_dropout: PartialShare = 0.0  # mlp without residual blocks: share of the hidden units left out in training
    residual: bool = False  # mlp: residual blocks (an odd number of equal widths), as DPPO has them
    activation: str = "silu"  # mlp; mish costs seven times as much on a CPU
    modular_count: Count = 8  # weight modules of every layer, which the features of the observation mix
    modular_context: Count = 64  # hidden units of the network that mixes them
    unet_channels: tuple[Count, ...] = (64, 128, 256)  # published sizes: [256, 512, 1024]
    unet_kernel: Count = 5
    transformer_width: Count = 128  # published sizes: width 256, 8 layers
    transformer_layers: Layers = 4
    transformer_heads: Count = 4
    transformer_dropout: PartialShare = 0.0  # keep 0 when the policy will be fine-tuned by RL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone not in BACKBONES:
            raise unknown_name("backbone", self.backbone, BACKBONES)
        if self.transformer_width % self.transformer_heads:
            raise UserError(
                f"transformer_width {self.transformer_width} must be a multiple of transformer_heads "
                f"{self.transformer_heads}."
            )


class MLPBackbone(nn.Module):
    """Sees the flattened chunk, the time embedding(s) and all features at once."""

    def __init__(self, config: BackboneConfig, *, size: int, feature_dim: int, times: int) -> None:
        super().__init__()
        self.time = TimeEmbedding(config.time_dim, times)
        in_dim = size + config.time_dim + feature_dim
        if config.residual:
            self.body: MLP | ResidualMLP = ResidualMLP(in_dim, config.hidden, size, activation=config.activation)
        else:
            self.body = MLP(in_dim, config.hidden, size, activation=config.activation, dropout=config.hidden_dropout)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Map `x` `(B, ..., H, A)`, `t` and `features` `(B, To, F)` to the shape of `x`; see `network_rows`."""
        return self.body(self._joined(x, t, features)).view_as(x)

    def representation(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Activations `(B, D)` of the middle layer."""
        return self.body.representation(self._joined(x, t, features))

    def _joined(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        x, time, features = network_rows(x, self.time(t), features)
        return torch.cat([x.flatten(1), time, features.flatten(1)], -1)


class ModularBackbone(nn.Module):
    """As `MLPBackbone`, with layers that the features mix from shared modules."""

    def __init__(self, config: BackboneConfig, *, size: int, feature_dim: int, times: int) -> None:
        super().__init__()
        self.time = TimeEmbedding(config.time_dim, times)
        in_dim = size + config.time_dim + feature_dim
        self.body = make_modular(config, in_dim=in_dim, out_dim=size, context_dim=feature_dim)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Map `x` `(B, ..., H, A)`, `t` and `features` `(B, To, F)` to the shape of `x`; see `network_rows`."""
        return self.body(*self._joined(x, t, features)).view_as(x)

    def representation(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Activations `(B, D)` of the middle layer."""
        return self.body.representation(*self._joined(x, t, features))

    def _joined(self, x: Tensor, t: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x, time, features = network_rows(x, self.time(t), features)
        context = features.flatten(1)
        return torch.cat([x.flatten(1), time, context], -1), context


class DirectModular(nn.Module):
    """Features `(B, To, F)` to `(B, H, channels)` by layers that the same features mix from shared modules."""

    def __init__(self, config: BackboneConfig, *, channels: int, horizon: int, in_dim: int, gain: float | None) -> None:
        super().__init__()
        self.shape = (horizon, channels)
        self.body = make_modular(config, in_dim=in_dim, out_dim=horizon * channels, context_dim=in_dim, gain=gain)

    def forward(self, features: Tensor) -> Tensor:
        """All steps of the chunk at once."""
        flat = features.flatten(1)
        return self.body(flat, flat).unflatten(1, self.shape)


class DirectMLP(MLP):
    """Features `(B, To, F)` to `(B, H, channels)` by plain layers over all features at once."""

    def __init__(self, config: BackboneConfig, *, channels: int, horizon: int, in_dim: int, gain: float | None) -> None:
        size = horizon * channels
        super().__init__(
            in_dim,
            config.hidden,
            size,
            activation=config.activation,
            dropout=config.hidden_dropout,
            orthogonal_gain=gain,
        )
        self.shape = (horizon, channels)

    def forward(self, features: Tensor) -> Tensor:
        """All steps of the chunk at once."""
        return super().forward(features.flatten(1)).unflatten(1, self.shape)


class QueryNet(nn.Module):
    """Features `(B, To, F)` to `(B, H, channels)` by a denoising network that reads learned queries at time 0."""

    def __init__(self, backbone: nn.Module, *, channels: int, horizon: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.queries = nn.Parameter(torch.randn(horizon, channels))  # of the size of noise

    def forward(self, features: Tensor) -> Tensor:
        """All steps of the chunk at once."""
        return self.backbone(self.queries.expand(len(features), -1, -1), features.new_zeros(1), features)


def make_modular(
    config: BackboneConfig, *, in_dim: int, out_dim: int, context_dim: int, gain: float | None = None
) -> ModularMLP:
    """The modular layers that `config` describes."""
    return ModularMLP(
        in_dim,
        config.hidden,
        out_dim,
        context_dim=context_dim,
        modules=config.modular_count,
        context_width=config.modular_context,
        orthogonal_gain=gain,
    )


def make_direct(
    config: BackboneConfig,
    *,
    channels: int,
    horizon: int,
    feature_dim: int,
    obs_horizon: int,
    orthogonal_gain: float | None = None,
) -> nn.Module:
    """Build the network of a head that needs no noise, `(B, To, F)` -> `(B, H, channels)`.

    Args:
        config: Kind and sizes.
        channels: Outputs per action of the chunk.
        horizon: H.
        feature_dim: F, width of the features of one observation.
        obs_horizon: To.
        orthogonal_gain: Output gain of the orthogonal initialisation of plain layers; None keeps torch's own.
    """
    if config.backbone == "mlp" and not config.residual:
        return DirectMLP(
            config, channels=channels, horizon=horizon, in_dim=obs_horizon * feature_dim, gain=orthogonal_gain
        )
    if config.backbone == "modular":
        return DirectModular(
            config, channels=channels, horizon=horizon, in_dim=obs_horizon * feature_dim, gain=orthogonal_gain
        )
    backbone = make_backbone(
        config, action_dim=channels, horizon=horizon, feature_dim=feature_dim, obs_horizon=obs_horizon
    )
    return QueryNet(backbone, channels=channels, horizon=horizon)


def make_backbone(
    config: BackboneConfig, *, action_dim: int, horizon: int, feature_dim: int, obs_horizon: int, times: int = 1
) -> nn.Module:
    """Build the network of a head.

    Args:
        config: Kind and sizes.
        action_dim: A.
        horizon: H.
        feature_dim: F, width of the features of one observation.
        obs_horizon: To.
        times: Time inputs; heads that learn steps of any length need two.
    """
    if config.backbone == "mlp":
        return MLPBackbone(config, size=horizon * action_dim, feature_dim=obs_horizon * feature_dim, times=times)
    if config.backbone == "modular":
        return ModularBackbone(config, size=horizon * action_dim, feature_dim=obs_horizon * feature_dim, times=times)
    if config.backbone == "unet":
        return UNet1d(
            action_dim,
            obs_horizon * feature_dim,
            channels=config.unet_channels,
            time_dim=config.time_dim,
            kernel=config.unet_kernel,
            times=times,
        )
    return ActionTransformer(
        action_dim,
        feature_dim,
        horizon=horizon,
        obs_horizon=obs_horizon,
        first_action=obs_horizon - 1,
        width=config.transformer_width,
        layers=config.transformer_layers,
        heads=config.transformer_heads,
        dropout=config.transformer_dropout,
        times=times,
    )
