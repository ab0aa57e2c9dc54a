"""Base of the denoising heads: one encoder, one backbone, K sampler steps from noise to an action chunk.

A head defines how its network is evaluated (`velocity`), trained (`matching_loss`) and iterated (`sampler_step`); all
heads share the policy methods. Internal values are in normalised action units; the public methods use env units.

Iterates are in the coordinates of the head (the linear path for flows, the variance-preserving path for diffusion);
`velocity` and `matching_loss` always refer to the linear path: time 0 is noise, time 1 is data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import PositiveInt, Range
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.backbone import BackboneConfig, make_backbone
from robopolicy.nets.encoder import EmbeddingConfig, ObservationEncoder, encoder_configs
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.nets.point_cloud import PointCloudConfig
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Info, Observation, Policy, PolicySpec, chunk_mean
from robopolicy.policies.noise import Randomness, normal, repeated
from robopolicy.policies.path import step_index

TIME_DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": torch.special.ndtr,
    "logit_normal": torch.sigmoid,
    "logit_normal_data": lambda n: (n + 0.4).sigmoid(),  # of MeanFlow, with reversed time: more mass near the data
    # t = s (1 - Beta(1.5, 1)) by the inverse distribution function u ** (1 / 1.5): more mass near the noise
    "beta": lambda n: 0.999 * (1 - torch.special.ndtr(n) ** (1 / 1.5)),
}
"""Distribution of the training time, as a function of a standard normal number."""


@dataclass(frozen=True)
class GenerativeConfig(BackboneConfig):
    """Architecture and sampler of all generative heads."""

    steps: PositiveInt = 4  # K, sampler steps per chunk
    normalization: str = "minmax"  # minmax | meanstd | running | identity
    action_normalization: str = "minmax"  # minmax | meanstd | identity
    action_clip: Annotated[float, Range(0, 1e6)] = 1.0  # bound on normalised actions and flow iterates; 0: none
    vision: VisionConfig = field(default_factory=VisionConfig)
    point_cloud: PointCloudConfig = field(default_factory=PointCloudConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)  # of instructions and goals
    encoders: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings of further encoders, by prefix

    def __post_init__(self) -> None:
        super().__post_init__()
        encoder_configs(self.encoders)
        if self.action_normalization == "meanstd" and 0 < self.action_clip < 3:
            raise UserError(
                f"action_clip {self.action_clip} would clip standardised actions at as many standard deviations; "
                "set it to 0 (no bound) or to at least 3."
            )
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")


def check_time_distribution(name: str) -> None:
    """Raise a `UserError` for an unknown distribution of training times."""
    if name not in TIME_DISTRIBUTIONS:
        raise unknown_name("time distribution", name, TIME_DISTRIBUTIONS)


class GenerativePolicy(Policy):
    """Base of the denoising heads; methods `act`, `imitation_loss`, `decode`, `field`."""

    family: ClassVar[str]  # flow | diffusion | edm | consistency: selects chains and conversions
    times: ClassVar[int] = 1  # time inputs of the network
    config: GenerativeConfig

    def __init__(self, config: GenerativeConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.encoder = ObservationEncoder(
            spec.observation,
            normalization=config.normalization,
            vision=config.vision,
            point_cloud=config.point_cloud,
            embedding=config.embedding,
            encoders=config.encoders,
        )
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)
        self.backbone = make_backbone(
            config,
            action_dim=spec.action_dim,
            horizon=spec.horizon,
            feature_dim=self.encoder.feature_dim,
            obs_horizon=spec.obs_horizon,
            times=self.times,
        )

    @abstractmethod
    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Expected data - noise `(B, H, A)` at the point `x` `(B, H, A)` of the linear path at time `t` `(B,)`."""

    @abstractmethod
    def matching_loss(self, features: Tensor, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Training loss `(B, H)` of the pair `data`, `noise` `(B, H, A)` at linear time `t` `(B,)`."""

    @abstractmethod
    def sampler_step(self, features: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """Iterates `(B, ..., H, A)` after sampler steps `k` int64 in 0..K-1, without injected noise.

        `k` has the shape `(B,)`, `(1,)` for one step of all, or `(T,)` for iterates `(B, T, H, A)` of a chain.
        """

    @abstractmethod
    def sample_times(self, batch: int, generator: Randomness) -> Tensor:
        """Sample linear times `(B,)` for training."""

    def init_sample(self, noise: Tensor) -> Tensor:
        """First iterate for standard normal `noise` `(B, H, A)`."""
        return noise

    @property
    def nfe(self) -> int:
        """K."""
        return self.config.steps

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the observation and action normalisers; raise a `UserError` if `action_clip` would clip raw actions."""
        clip, actions = self.config.action_clip, statistics.get("action", {})
        if self.config.action_normalization == "identity" and clip > 0:
            extremes = [float(torch.as_tensor(actions[name]).abs().max()) for name in ("min", "max") if name in actions]
            if max(extremes, default=0.0) > clip + 1e-6:
                raise UserError(
                    f"Actions reach {max(extremes):.3g}, which action_clip={clip:g} would clip with "
                    "action_normalization=identity; set action_clip=0, or use minmax."
                )
        self.encoder.fit_normalizer(statistics)
        self.action_normalizer.fit_key(statistics, "action")

    def encode(self, obs: Observation) -> Tensor:
        """Features `(B, To, F)` of the observations."""
        return self.encoder(obs)

    def encode_for_training(self, obs: Observation, generator: Randomness = None) -> Tensor:
        """Features with image augmentation in training mode."""
        crop_generator = generator if isinstance(generator, torch.Generator) else None
        return self.encoder(obs, augment=self.training, generator=crop_generator)

    def clip(self, x: Tensor) -> Tensor:
        """Clip normalised actions to `action_clip`."""
        return x.clamp(-self.config.action_clip, self.config.action_clip) if self.config.action_clip else x

    def draw_noise(self, batch: int, generator: Randomness, device: torch.device) -> Tensor:
        """Standard normal noise `(B, H, A)`."""
        return normal((batch, self.spec.horizon, self.spec.action_dim), generator, device)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Run the sampler from fresh initial noise, the only randomness."""
        with torch.no_grad():
            return self.draw_chunk(self.encode(obs), generator)

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Run the sampler on features that are computed once."""
        features = self.encode(obs).repeat_interleave(count, 0)
        return self.draw_chunk(features, repeated(generator, count)).unflatten(0, (-1, count))

    def draw_chunk(self, features: Tensor, generator: Randomness) -> Tensor:
        """Chunk `(B, H, A)` in env units from fresh noise at features `(B, To, F)`, for `act`."""
        return self.integrate(features, self.draw_noise(features.shape[0], generator, features.device))

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Map `noise` `(B, H, A)` to the chunk in env units; differentiable."""
        return self.integrate(self.encode(obs), noise)

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
        """Denoising loss `(B,)`, averaged over the valid steps of the chunk."""
        features = self.encode_for_training(obs, generator)
        data = self.action_normalizer.normalize(chunk)
        loss = chunk_mean(self.training_loss(features, data, generator, mask), mask)
        info = {"denoising": loss.detach().mean()}
        return (loss if weight is None else loss * weight), info

    def training_loss(
        self, features: Tensor, data: Tensor, generator: Randomness, mask: Tensor | None = None
    ) -> Tensor:
        """Loss `(B, H)` at random noise and times; heads with several objectives override it.

        `mask` `(B, H)` is 0 on padded steps, for losses whose steps depend on each other.
        """
        noise = normal(data.shape, generator, data.device)
        return self.matching_loss(features, data, noise, self.sample_times(len(data), generator).to(data.device))

    def integrate(self, features: Tensor, noise: Tensor) -> Tensor:
        """Run all K steps from `noise` `(B, H, A)` to the chunk in env units."""
        x = self.init_sample(noise)
        for k in range(self.config.steps):
            x = self.sampler_step(features, x, step_index(k, x))
        return self.action_normalizer.denormalize(self.clip(x))
