"""Action Chunking Transformer (Zhao et al. 2023): a conditional variational autoencoder of the chunk.

A transformer maps tokens to the chunk: latent variables, one token per vector of the observation and one per pixel of
the cameras' feature maps. While training, a second transformer encodes the demonstrated chunk into the latent
variables, so that differences between demonstrations are explained by them; when acting they are 0, and a chunk is a
function of the observation. The loss is the absolute error plus `kl_weight` times the divergence of the latent
variables from a standard normal.

Use it for precise demonstrations of one way of doing a task, and for cameras. Demonstrations with several ways need a
flow, and fine-tuning by RL needs a head with a density or noise. Temporal ensembling is the chunk blending `ensemble`
of evaluation and deployment, at an action horizon of 1.

Deviations from the paper: cameras pass a ResNet with GroupNorm that is trained from scratch (`vision.kind=resnet18` is
the published network), the networks are narrower, the loss weights every chunk equally, and To observations may be
given.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import NonNegative
from robopolicy.errors import UserError
from robopolicy.nets.act import ACTSizes, ChunkPosterior, ChunkTransformer
from robopolicy.nets.modality import module_name
from robopolicy.nets.vision import ImageEncoder, VisionConfig
from robopolicy.policies.base import Info, Observation, PolicySpec, chunk_mean
from robopolicy.policies.heads.explicit import ExplicitConfig, ExplicitPolicy
from robopolicy.policies.noise import Randomness, normal

STATE = "state"  # observation that the encoder of demonstrated chunks reads, if there is one of this name


def default_vision() -> VisionConfig:
    """Camera network of the default settings: one ResNet-18 with GroupNorm for all cameras."""
    return VisionConfig(widths=(64, 128, 256, 512), blocks=2, shared=True)


@dataclass(frozen=True)
class ACTConfig(ACTSizes, ExplicitConfig):
    """Architecture of an `ACTPolicy`."""

    normalization: str = "meanstd"  # of observations: minmax | meanstd | running | identity
    action_normalization: str = "meanstd"  # minmax | meanstd | identity
    vision: VisionConfig = field(default_factory=default_vision)
    kl_weight: NonNegative = 10.0  # weight of the divergence of the latent variables; larger values use them less

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recurrent.kind != "none":
            raise UserError("Policy act has no memory; use gaussian, or leave recurrent out.")


class ACTPolicy(ExplicitPolicy):
    """Chunk as a function of the observation; methods `act`, `imitation_loss`."""

    name: ClassVar[str] = "act"
    config_class = ACTConfig
    config: ACTConfig

    def __init__(self, config: ACTConfig, spec: PolicySpec) -> None:
        super().__init__(replace(config, vision=replace(config.vision, tokens=True)), spec)
        self.config = config
        sizes = {key: columns.stop - columns.start for key, columns in self.encoder.columns().items()}
        maps: dict[str, tuple[int, tuple[int, int]]] = {}
        for key in self.encoder.encoded:
            encoder = self.encoder.encoder_of(key)
            if isinstance(encoder, ImageEncoder):
                camera = encoder.network(key)
                maps[key] = camera.map_channels, camera.grid
            else:
                assert encoder is not None
                sizes[key] = encoder.feature_dim // len(encoder.observations)
        self.maps = tuple(maps)
        self.transformer = ChunkTransformer(
            config,
            horizon=spec.horizon,
            obs_horizon=spec.obs_horizon,
            vectors={module_name(key): size for key, size in sizes.items()},
            maps=maps,
        )
        state_dim = self.encoder.sizes.get(STATE, 0)
        self.posterior = ChunkPosterior(config, horizon=spec.horizon, action_dim=spec.action_dim, state_dim=state_dim)
        self.output = nn.Linear(config.width, spec.action_dim)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the chunk for latent variables of 0; nothing is random."""
        with torch.no_grad():
            vectors, maps = self._tokens(self.encoder.parts(obs))
            reference = next(iter(obs.values()))
            latent = torch.zeros(len(reference), self.config.latent_dim, device=reference.device)
            return self.action_normalizer.denormalize(self._decode(latent, vectors, maps))

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Absolute error averaged over valid steps and dimensions, plus the weighted divergence `(B,)` [nats]."""
        crop_generator = generator if isinstance(generator, torch.Generator) else None
        vectors, maps = self._tokens(self.encoder.parts(obs, augment=self.training, generator=crop_generator))
        target = self.action_normalizer.normalize(chunk)
        state = vectors[STATE][:, -1] if self.posterior.state_in is not None else None
        mean, log_variance = self.posterior(target, state, mask)
        latent = mean + (log_variance / 2).exp() * normal(mean.shape, generator, mean.device)
        error = (self._decode(latent, vectors, maps) - target).abs().mean(2)  # (B, H)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        if mask is not None:
            divergence = divergence * mask.any(1)
        l1 = chunk_mean(error, mask)
        loss = l1 + self.config.kl_weight * divergence
        info = {"l1": l1.detach().mean(), "kl": divergence.detach().mean()}
        return (loss if weight is None else loss * weight), info

    def _tokens(self, parts: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Vectors `(B, To, D)` by key and feature maps `(B, To, P, C)` from the parts of the encoder."""
        vectors: dict[str, Tensor] = {}
        maps: dict[str, Tensor] = {}
        if self.encoder.vector_dim:
            vectors |= {key: parts[0][..., columns] for key, columns in self.encoder.columns().items()}
            parts = parts[1:]
        for key, part in zip(self.encoder.encoded, parts, strict=True):
            if key in self.maps:
                camera = self.encoder.encoder_of(key).network(key)  # type: ignore[union-attr]
                maps[key] = part.unflatten(-1, (-1, camera.map_channels))
            else:
                vectors[key] = part
        return vectors, [maps[key] for key in self.maps]

    def _decode(self, latent: Tensor, vectors: dict[str, Tensor], maps: list[Tensor]) -> Tensor:
        """Normalised chunk `(B, H, A)` for latent variables `(B, Z)`."""
        return self.output(self.transformer(latent, list(vectors.values()), maps))
