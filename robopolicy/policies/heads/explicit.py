"""What the heads with an explicit density of the chunk share: one encoder, one action normaliser.

Gaussian, mixture and autoregressive heads score and draw chunks without a denoising chain. Their densities are those of
the normalised chunk (affine action scaling only shifts log-probabilities by a constant).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.encoder import EmbeddingConfig, ObservationEncoder
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.nets.point_cloud import PointCloudConfig
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, Policy, PolicySpec, Sample
from robopolicy.policies.noise import Randomness, normal


@dataclass(frozen=True)
class ExplicitConfig:
    """Inputs and units of an explicit head."""

    normalization: str = "running"  # minmax | meanstd | running | identity
    action_normalization: str = "minmax"  # minmax | meanstd | identity; minmax for squashed policies
    vision: VisionConfig = field(default_factory=VisionConfig)
    point_cloud: PointCloudConfig = field(default_factory=PointCloudConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)  # of instructions and goals

    def __post_init__(self) -> None:
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")


class ExplicitPolicy(Policy):
    """Base of the explicit heads; verbs `act`, `sample`, `decisions`, `imitation_loss` are the head's."""

    config: ExplicitConfig

    def __init__(self, config: ExplicitConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.encoder = ObservationEncoder(
            spec.observation,
            normalization=config.normalization,
            vision=config.vision,
            point_cloud=config.point_cloud,
            embedding=config.embedding,
        )
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers; for squashed policies pass the action bounds as `{"action": {"min", "max"}}`."""
        self.encoder.fit_normalizer(statistics)
        self.action_normalizer.fit_key(statistics, "action")

    def encode_for_training(self, obs: Observation, generator: Randomness = None) -> Tensor:
        """Features `(B, To, F)` with augmentation when the policy is in training mode."""
        crop_generator = generator if isinstance(generator, torch.Generator) else None
        return self.encoder(obs, augment=self.training, generator=crop_generator)

    @torch.no_grad()
    def sample_uniform(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Chunks uniform over the action bounds of a squashed policy, for the first steps of off-policy learning."""
        reference = next(iter(obs.values()))
        shape = (len(reference), self.spec.horizon, self.spec.action_dim)
        uniform = 2 * torch.special.ndtr(normal(shape, generator, reference.device)) - 1
        return Sample.unscored(self.action_normalizer.denormalize(uniform))
