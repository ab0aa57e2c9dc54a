"""Rectified-flow policy: a velocity network integrated by K Euler steps from noise to an action chunk.

Training regresses `v(x_t, t, obs)` on `data - noise` along straight lines (flow matching, 1-RF of Liu et al. 2022);
sampling uses the left grid {0, 1/K, ..., (K-1)/K}, whose times are exactly the positions reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.mlp import MLP, ResidualMLP
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.nets.time import TimeEmbedding
from robopolicy.nets.transformer import ActionTransformer
from robopolicy.nets.unet1d import UNet1d
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Info, Observation, Policy, PolicySpec, chunk_mean
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import interpolate, left_grid

BACKBONES = ("mlp", "unet", "transformer")


def _logit_normal(n: Tensor) -> Tensor:
    return n.sigmoid()


def _uniform(n: Tensor) -> Tensor:
    return torch.special.ndtr(n)


def _beta(n: Tensor) -> Tensor:
    # t = s (1 - Beta(1.5, 1)) with the inverse distribution function u ** (1 / 1.5): more mass near the noise.
    return 0.999 * (1 - _uniform(n) ** (1 / 1.5))


TIME_LAWS: dict[str, Callable[[Tensor], Tensor]] = {"uniform": _uniform, "logit_normal": _logit_normal, "beta": _beta}
"""Distribution of the training time, as a function of a standard normal draw."""


@dataclass(frozen=True)
class FlowConfig:
    """Architecture and sampler of a `FlowPolicy`."""

    backbone: str = "mlp"  # mlp | unet | transformer
    steps: int = 4  # K, Euler steps (network calls) per chunk
    time_law: str = "uniform"  # distribution of the training time: uniform | logit_normal | beta
    normalization: str = "minmax"  # minmax | meanstd | running | identity
    action_normalization: str = "minmax"  # minmax | meanstd | identity
    action_clip: float = 1.0  # bound on normalised actions after every Euler step; 0 disables
    time_dim: int = 16  # width of the time embedding (mlp and unet)
    hidden: tuple[int, ...] = (256, 256, 256)  # mlp
    residual: bool = False  # mlp: residual blocks (an odd number of equal widths), as DPPO has them
    activation: str = "silu"  # mlp; mish costs seven times as much on a CPU
    unet_channels: tuple[int, ...] = (64, 128, 256)  # published sizes: [256, 512, 1024]
    unet_kernel: int = 5
    transformer_width: int = 128  # published sizes: width 256, 8 layers
    transformer_layers: int = 4
    transformer_heads: int = 4
    transformer_dropout: float = 0.0  # keep 0 when the policy will be fine-tuned by RL
    vision: VisionConfig = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES:
            raise unknown_name("backbone", self.backbone, BACKBONES)
        if self.time_law not in TIME_LAWS:
            raise unknown_name("time law", self.time_law, TIME_LAWS)
        if self.steps < 1 or self.action_clip < 0:
            raise UserError(f"A flow needs steps >= 1 and action_clip >= 0, got {self.steps} and {self.action_clip}.")
        if self.transformer_heads < 1 or self.transformer_width % self.transformer_heads:
            raise UserError(
                f"transformer_width {self.transformer_width} must be a multiple of transformer_heads "
                f"{self.transformer_heads}."
            )
        if self.action_normalization == "meanstd" and 0 < self.action_clip < 3:
            raise UserError(
                f"action_clip {self.action_clip} would cut standardised actions at as many standard deviations; "
                "set it to 0 (no bound) or to at least 3."
            )
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")


class MLPVelocity(nn.Module):
    """Velocity network that sees the flattened chunk, the time embedding and all features at once."""

    def __init__(self, config: FlowConfig, action_dim: int, horizon: int, feature_dim: int) -> None:
        super().__init__()
        size = horizon * action_dim
        self.time = TimeEmbedding(config.time_dim)
        network = ResidualMLP if config.residual else MLP
        in_dim = size + config.time_dim + feature_dim
        self.body = network(in_dim, config.hidden, size, activation=config.activation)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Predict the velocity at `x` `(B, H, A)` and time `t` `(B,)` given `features` `(B, To, F)`."""
        return self.body(torch.cat([x.flatten(1), self.time(t), features.flatten(1)], -1)).view_as(x)


def _make_backbone(config: FlowConfig, spec: PolicySpec, feature_dim: int) -> nn.Module:
    if config.backbone == "mlp":
        return MLPVelocity(config, spec.action_dim, spec.horizon, spec.obs_horizon * feature_dim)
    if config.backbone == "unet":
        return UNet1d(
            spec.action_dim,
            spec.obs_horizon * feature_dim,
            channels=config.unet_channels,
            time_dim=config.time_dim,
            kernel=config.unet_kernel,
        )
    return ActionTransformer(
        spec.action_dim,
        feature_dim,
        horizon=spec.horizon,
        obs_horizon=spec.obs_horizon,
        first_action=spec.obs_horizon - 1,
        width=config.transformer_width,
        layers=config.transformer_layers,
        heads=config.transformer_heads,
        dropout=config.transformer_dropout,
    )


class FlowPolicy(Policy):
    """Rectified-flow action chunks; verbs `act`, `imitation_loss`, `decode`, `field`."""

    name: ClassVar[str] = "flow"
    grid: Tensor

    def __init__(self, config: FlowConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.encoder = ObservationEncoder(spec.observation, normalization=config.normalization, vision=config.vision)
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)
        self.backbone = _make_backbone(config, spec, self.encoder.feature_dim)
        self.register_buffer("grid", left_grid(config.steps), persistent=False)  # (K,)

    @property
    def network_calls(self) -> int:
        """K."""
        return self.config.steps

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the observation and action normalisers from dataset statistics."""
        self.encoder.fit_normalizer(statistics)
        self.action_normalizer.fit_key(statistics, "action")

    def encode(self, obs: Observation) -> Tensor:
        """Features `(B, To, F)`, computed once per call of a verb."""
        return self.encoder(obs)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Velocity `(B, H, A)` at normalised `x` `(B, H, A)` and time `t` `(B,)` for encoded observations."""
        return self.backbone(x, t, features)

    def euler_step(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Next iterate of the sampler, `clip(x + v(x, t) / K)`, all in normalised units."""
        return self.clip(x + self.velocity(features, x, t) / self.config.steps)

    def clip(self, x: Tensor) -> Tensor:
        """Bound normalised actions by `action_clip`."""
        return x.clamp(-self.config.action_clip, self.config.action_clip) if self.config.action_clip else x

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Integrate the flow from fresh initial noise; there is no other randomness to remove."""
        with torch.no_grad():
            features = self.encode(obs)
            noise = normal((features.shape[0], self.spec.horizon, self.spec.action_dim), generator, features.device)
            return self._integrate(features, noise)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Map `noise` `(B, H, A)` to the chunk in env units; differentiable."""
        return self._integrate(self.encode(obs), noise)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity in normalised units."""
        return self.velocity(self.encode(obs), x, t)

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Flow-matching loss `(B,)`: mean squared velocity error over the valid steps of the chunk."""
        crop_generator = generator if isinstance(generator, torch.Generator) else None
        features = self.encoder(obs, augment=self.training, generator=crop_generator)
        data = self.action_normalizer.normalize(chunk)
        noise = normal(data.shape, generator, data.device)
        t = TIME_LAWS[self.config.time_law](normal((data.shape[0], 1), generator, data.device))  # (B, 1)
        x = interpolate(noise, data, t.unsqueeze(-1))
        error = (self.velocity(features, x, t.squeeze(1)) - (data - noise)).square().mean(-1)  # (B, H)
        loss = chunk_mean(error, mask)
        info = {"flow_matching": loss.detach().mean()}
        return (loss if weight is None else loss * weight), info

    def _integrate(self, features: Tensor, x: Tensor) -> Tensor:
        for t in self.grid:
            x = self.euler_step(features, x, t.expand(x.shape[0]))
        return self.action_normalizer.denormalize(x)
