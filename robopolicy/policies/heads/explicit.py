"""Base of the heads with an explicit density of the chunk: one encoder, one action normaliser.

Gaussian, mixture and autoregressive heads score and sample chunks without a denoising chain. Densities refer to the
normalised chunk (affine action scaling only shifts log-probabilities by a constant).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import Validated
from robopolicy.errors import UserError
from robopolicy.nets.encoder import EmbeddingConfig, ObservationEncoder, encoder_configs
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.nets.point_cloud import PointCloudConfig
from robopolicy.nets.recurrent import RecurrentCell, RecurrentConfig
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, Policy, PolicySpec, Sample
from robopolicy.policies.noise import Randomness, normal
from robopolicy.spec import HIDDEN_STATE


@dataclass(frozen=True)
class ExplicitConfig(Validated):
    """Inputs and units of an explicit head."""

    normalization: str = "running"  # minmax | meanstd | running | identity
    action_normalization: str = "minmax"  # minmax | meanstd | identity; minmax for squashed policies
    vision: VisionConfig = field(default_factory=VisionConfig)
    point_cloud: PointCloudConfig = field(default_factory=PointCloudConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)  # of instructions and goals
    encoders: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings of further encoders, by prefix
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig)  # memory between decisions

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder_configs(self.encoders)
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")


class ExplicitPolicy(Policy):
    """Base of the explicit heads; subclasses define `act`, `sample`, `decisions` and `imitation_loss`."""

    config: ExplicitConfig

    def __init__(self, config: ExplicitConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        observation = {key: shape for key, shape in spec.observation.items() if key != HIDDEN_STATE}
        self.encoder = ObservationEncoder(
            observation,
            normalization=config.normalization,
            vision=config.vision,
            point_cloud=config.point_cloud,
            embedding=config.embedding,
            encoders=config.encoders,
        )
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)
        self.feature_dim = self.encoder.feature_dim  # F
        self.cell: RecurrentCell | None = None
        if config.recurrent.kind != "none":
            if spec.obs_horizon != 1:
                raise UserError(
                    f"A recurrent policy takes one observation at a time, got obs_horizon {spec.obs_horizon}."
                )
            self.cell = RecurrentCell(config.recurrent, self.feature_dim)
            self.feature_dim += self.cell.width
            observation[HIDDEN_STATE] = (self.cell.hidden_dim,)
        self.spec = replace(spec, observation=observation)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers; for squashed policies pass the action bounds as `{"action": {"min", "max"}}`."""
        self.encoder.fit_normalizer(statistics)
        self.action_normalizer.fit_key(statistics, "action")

    def features(self, obs: Observation) -> Tensor:
        """Features `(B, To, F)` of the observation, with the output of the recurrent cell, if any."""
        return self._with_memory(self.encoder(obs), obs)

    def next_hidden(self, obs: Observation) -> Tensor:
        """Memory after `obs`."""
        if self.cell is None:
            raise self._lacks("next_hidden")
        return self._next_memory(self.encoder(obs), obs)

    def unroll_rnn(self, obs: Observation, steps: int) -> Observation:
        """Recompute the memories of `steps` decisions of E episodes, `obs` `(steps * E, ...)`, from the first ones.

        Gradients flow through all steps. A memory of zeros starts an episode and is kept.
        """
        assert self.cell is not None
        encoded = self.encoder(obs).unflatten(0, (steps, -1))  # (T, E, 1, F)
        stored = obs[HIDDEN_STATE].unflatten(0, (steps, -1))  # (T, E, 1, M)
        fresh = (stored == 0).all(-1, keepdim=True)
        memories = [stored[0]]
        for t in range(steps - 1):
            after = self._next_memory(encoded[t], {HIDDEN_STATE: memories[t]})
            memories.append(torch.where(fresh[t + 1], 0.0, after))
        return obs | {HIDDEN_STATE: torch.cat(memories)}

    def _next_memory(self, encoded: Tensor, obs: Observation) -> Tensor:
        assert self.cell is not None
        if HIDDEN_STATE not in obs:
            raise UserError(f"Policy '{self.name}' is recurrent: pass '{HIDDEN_STATE}', as rollouts and evaluation do.")
        return self.cell(encoded.squeeze(1), obs[HIDDEN_STATE].squeeze(1)).unsqueeze(1)

    def _with_memory(self, encoded: Tensor, obs: Observation) -> Tensor:
        if self.cell is None:
            return encoded
        return torch.cat([encoded, self.cell.output(self._next_memory(encoded, obs))], -1)

    def encode_for_training(self, obs: Observation, generator: Randomness = None) -> Tensor:
        """Features `(B, To, F)` with augmentation in training mode."""
        crop_generator = generator if isinstance(generator, torch.Generator) else None
        return self._with_memory(self.encoder(obs, augment=self.training, generator=crop_generator), obs)

    @torch.no_grad()
    def sample_uniform(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample chunks uniformly within the action bounds of a squashed policy, for warm-up."""
        reference = next(iter(obs.values()))
        shape = (len(reference), self.spec.horizon, self.spec.action_dim)
        uniform = 2 * torch.special.ndtr(normal(shape, generator, reference.device)) - 1
        return Sample.unscored(self.action_normalizer.denormalize(uniform))
