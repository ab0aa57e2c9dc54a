"""Frozen policy controlled through its noise: an actor selects the noise, the base maps it to a chunk.

The base is called only as `base.decode(obs, noise)`, without gradients, once per chunk; it may be a denoising head or
any function (`black_box.py`). A `NoiseSpace` defines the free part of the noise of the base: repeating one noise vector
over the chunk makes the space small, for example, but some bases (pi0.5, fine-tuned VLAs) fail under it, so compare the
success rates of initial random decisions for each kind before training.

The actor is a Gaussian head over the free noise `(B, F, A)`, squashed into the box `[-b, b]`. Actions, exploration,
random samples and the inputs of critics all stay in that box. Densities refer to `w / b`, as in Stable-Baselines3.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from robopolicy.constraints import NonNegative, PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.policies.base import DecisionOutput, Observation, Policy, PolicySpec, Record, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.wrappers.nested import describe, rebuild

KINDS = ("full", "repeat", "interpolate", "truncated")
RESTS = ("zero", "draw")
STEERING_ACTOR = GaussianConfig(
    hidden=(256, 256, 256), state_dependent_std=True, squash=True, action_normalization="minmax"
)
"""Actor of a bounded noise space, with initial mean 0 and a standard deviation close to the noise of the base."""


@dataclass(frozen=True)
class NoiseSpace(Validated):
    """The free part of the noise `(H, A)` of a base, and its bound."""

    kind: str = "full"  # full (H x A) | repeat (A for all steps) | interpolate (knots) | truncated (first steps)
    bound: NonNegative = 1.5  # b, bound on every entry; 0 is unbounded
    steps: PositiveInt = 2  # interpolate: number of knots; truncated: number of free steps
    rest: str = "zero"  # truncated: the remaining steps are zero | draw (standard normal, within the bound)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise unknown_name("noise space", self.kind, KINDS)
        if self.rest not in RESTS:
            raise unknown_name("rest of the noise", self.rest, RESTS)
        if self.kind == "interpolate" and self.steps < 2:
            raise UserError(f"A noise space that interpolates needs steps >= 2, got {self.steps}.")

    def rows(self, horizon: int) -> int:
        """Number F of free noise vectors of a chunk of `horizon` actions, of which there must be enough."""
        if self.kind in ("full", "repeat"):
            return horizon if self.kind == "full" else 1
        if self.steps > horizon:
            raise UserError(
                f"A noise space with {self.steps} steps does not fit chunks of {horizon} actions; lower space.steps."
            )
        return self.steps

    def limit(self, noise: Tensor) -> Tensor:
        """Clip `noise` to the box."""
        return noise.clamp(-self.bound, self.bound) if self.bound else noise

    def expand(self, w: Tensor, horizon: int, generator: Randomness = None) -> Tensor:
        """Noise of the base `(B, H, A)` for the free part `w` `(B, F, A)`; `generator` samples the rest."""
        if self.kind == "full":
            return w
        if self.kind == "repeat":
            return w.expand(-1, horizon, -1)
        if self.kind == "interpolate":
            between = F.interpolate(w.transpose(1, 2), size=horizon, mode="linear", align_corners=True)
            return between.transpose(1, 2).clamp(w.amin(1, keepdim=True), w.amax(1, keepdim=True))  # rounding
        shape = (len(w), horizon - w.shape[1], w.shape[2])
        rest = w.new_zeros(shape) if self.rest == "zero" else self.limit(normal(shape, generator, w.device))
        return torch.cat([w, rest], 1)


@dataclass(frozen=True)
class LatentConfig:
    """Settings of a `LatentPolicy`; created by `LatentPolicy.from_base`."""

    base: dict[str, Any] = field(default_factory=dict)  # description of the frozen policy (`nested.describe`)
    space: NoiseSpace = field(default_factory=NoiseSpace)  # noise of the actor
    actor: GaussianConfig = STEERING_ACTOR  # squashed, in units of the bound, if any

    def __post_init__(self) -> None:
        required = (True, "minmax") if self.space.bound else (False, "identity")
        if (self.actor.squash, self.actor.action_normalization) != required:
            raise UserError(
                f"A noise space with bound {self.space.bound} needs actor.squash={str(required[0]).lower()} and "
                f"actor.action_normalization={required[1]}."
            )


class LatentPolicy(Policy):
    """Frozen base with controlled noise; methods `act`, `sample`, `decisions`, `decode`."""

    name: ClassVar[str] = "latent"
    config_class = LatentConfig
    fallback_hint: ClassVar[str] = "fine-tune its base policy, or continue to steer it by dsrl_na or dsrl_sac"

    def __init__(self, config: LatentConfig, spec: PolicySpec, base: Policy | None = None) -> None:
        """Build the actor around `base`, or around a new policy of the description in `config`."""
        super().__init__()
        self.config = config
        self.spec = spec
        # Before the actor, so that critics of executed actions use the normalisers of the base.
        self.base = (rebuild(config.base) if base is None else base).eval().requires_grad_(False)
        rows = config.space.rows(self.noise_shape[0])
        inner = replace(spec, horizon=rows, action_horizon=rows, action_dim=self.noise_shape[1])
        self.actor = GaussianPolicy(config.actor, inner)
        if config.space.bound:
            normalizer = self.actor.action_normalizer  # tanh to [-b, b], for any b
            normalizer.set_transform(0.0, config.space.bound)
            normalizer.fitted.fill_(True)

    @classmethod
    def from_base(cls, base: Policy, space: NoiseSpace, actor: GaussianConfig) -> LatentPolicy:
        """Put a new actor with the observation statistics of `base` on a frozen copy of `base`.

        Raises:
            UserError: The base takes no noise, or the noise space does not fit it.
        """
        if not base.is_steerable:
            raise UserError(
                f"Steering needs a policy that takes noise, but '{base.name}' takes none; train it with ppo "
                "or sac, or wrap a function of observation and noise in a CallablePolicy."
            )
        encoders = [part for part in base.modules() if isinstance(part, ObservationEncoder)]
        if encoders:
            actor = replace(actor, normalization=encoders[0].normalizer.mode)
        policy = cls(LatentConfig(describe(base), space, actor), base.spec, copy.deepcopy(base))
        if encoders:
            policy.actor.encoder.copy_stats(*encoders)
        return policy

    def decode_free_noise(self, obs: Observation, w: Tensor, generator: Randomness = None) -> Tensor:
        """Chunk `(B, H, A)` of the base for the free noise `w` `(B, F, A)`."""
        with torch.no_grad():
            return self.base.decode(obs, self.config.space.expand(w, self.noise_shape[0], generator))

    def draw(self, batch: int, generator: Randomness, device: torch.device, *, clip: bool = True) -> Tensor:
        """Free noise `(B, F, A)` as the base samples it, clipped to the box unless `clip` is false."""
        noise = normal((batch, self.actor.spec.horizon, self.actor.spec.action_dim), generator, device)
        return self.config.space.limit(noise) if clip else noise

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for the mode (`deterministic`) or a sample of the actor."""
        return self.decode_free_noise(
            obs, self.actor.act(obs, deterministic=deterministic, generator=generator), generator
        )

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample noise and decode it; the record holds it as `noise` and, before tanh, as `raw`."""
        sampled = self.actor.sample(obs, generator=generator)
        chunk = self.decode_free_noise(obs, sampled.chunk, generator)
        return Sample(chunk, {**sampled.record, "noise": sampled.chunk}, sampled.logp)

    @torch.no_grad()
    def sample_prior(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Decode the noise of the base, clipped to the box, to explore before learning starts."""
        reference = next(iter(obs.values()))
        w = self.draw(len(reference), generator, reference.device)
        return Sample(self.decode_free_noise(obs, w, generator), {"noise": w}, w.new_zeros(len(w), 0))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, 1)` of recorded noise under the actor."""
        return self.actor.decisions(obs, {"raw": record["raw"]})

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk of the base for all of its noise `(B, *noise_shape)`, without gradients."""
        with torch.no_grad():
            return self.base.decode(obs, noise)

    def update_stats(self, obs: Observation) -> None:
        """Merge `obs` into the running statistics of the actor, not of the base."""
        self.actor.update_stats(obs)

    def train(self, mode: bool = True) -> LatentPolicy:
        """Set the mode of the actor; the base stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Noise shape of the base."""
        return self.base.noise_shape

    @property
    def nfe(self) -> int:
        """Evaluations of the actor and the base."""
        return 1 + self.base.nfe
