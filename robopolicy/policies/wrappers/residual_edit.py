"""Policy that edits the samples of another one and executes the best of originals and edits (EXPO, Dong et al. 2025).

A small Gaussian policy e(d | s, a) of the observation and a sampled chunk adds d in [-beta, beta] (normalised action
units, executed actions only). Candidates are N samples of the base policy and edits of the first `edits` samples; the
critic selects. beta = 0 or edits = 0 is best-of-N of the base, and N = 1 without edits is plain imitation. The density
of an edit refers to d / beta, so that the entropy does not depend on beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtMost, Finite, NonNegative, NonNegativeInt, PositiveInt, Validated
from robopolicy.critics.q import QEnsemble, copy_normalizers
from robopolicy.nets.mlp import MLP
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.density import log_tanh_slope, normal_log_density
from robopolicy.policies.noise import Randomness, normal, repeated
from robopolicy.policies.wrappers.best_of_n import BestOfNConfig, BestOfNPolicy, Candidates, clip_to_bounds
from robopolicy.policies.wrappers.nested import describe


@dataclass(frozen=True)
class EditConfig(Validated):
    """Architecture of an `EditNet`."""

    beta: NonNegative = 0.15  # maximum edit, normalised action units: 0.05 refines, 0.7 explores
    hidden: tuple[PositiveInt, ...] = (256, 256, 256)
    activation: str = "silu"
    log_std_min: Annotated[Finite, AtMost("log_std_max", exclusive=True)] = -5.0  # bounds of the logarithm, before tanh
    log_std_max: Finite = 2.0
    vision: VisionConfig = field(default_factory=VisionConfig)


class EditNet(nn.Module):
    """Tanh-Gaussian edits of the executed part of a chunk."""

    def __init__(self, config: EditConfig, base: Policy) -> None:
        """Build the network with the normalisers of `base`."""
        super().__init__()
        self.config = config
        self.steps = base.spec.action_horizon
        self.encoder, self.action_normalizer = copy_normalizers(base, config.vision)
        size = self.steps * base.spec.action_dim
        in_dim = base.spec.obs_horizon * self.encoder.feature_dim + size
        self.body = MLP(in_dim, config.hidden, 2 * size, activation=config.activation, orthogonal_gain=0.01)

    def encode(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Flat features `(B, F)`, for many chunks."""
        return self.encoder(obs).flatten(1)

    def distribution(self, features: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation `(B, n * A)` of the edit before tanh, given the chunk `(B, H, A)`."""
        action = self.action_normalizer.normalize(chunk[:, : self.steps]).flatten(1)
        mean, log_std = self.body(torch.cat([features, action], -1)).chunk(2, -1)
        return mean, log_std.clamp(self.config.log_std_min, self.config.log_std_max)

    def add(self, chunk: Tensor, raw: Tensor) -> Tensor:
        """Add the edit beta * tanh(raw) `(B, n * A)` to `chunk` `(B, H, A)`, within the action bounds."""
        start = self.action_normalizer.normalize(chunk[:, : self.steps])
        edited = start + self.config.beta * raw.tanh().view_as(start)
        edited = self.action_normalizer.denormalize(clip_to_bounds(self.action_normalizer, edited, start))
        return torch.cat([edited, chunk[:, self.steps :]], 1)

    def rsample(self, features: Tensor, chunk: Tensor, generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """Reparameterised edited chunk `(B, H, A)` and log-density `(B,)` of the edit in units of beta."""
        mean, log_std = self.distribution(features, chunk)
        raw = mean + log_std.exp() * normal(mean.shape, generator, mean.device)
        return self.add(chunk, raw), (normal_log_density(raw, mean, log_std) - log_tanh_slope(raw)).sum(1)

    def mode(self, features: Tensor, chunk: Tensor) -> Tensor:
        """Edited chunk `(B, H, A)` without noise."""
        return self.add(chunk, self.distribution(features, chunk)[0])


@dataclass(frozen=True)
class ResidualEditConfig(BestOfNConfig):
    """Settings of a `ResidualEditPolicy`; `candidates` is N."""

    candidates: PositiveInt = 8  # N, samples of the base policy per decision
    edits: Annotated[NonNegativeInt, AtMost("candidates")] = 8  # number of these samples that are also edited
    edit: EditConfig = field(default_factory=EditConfig)  # the edit policy


class ResidualEditPolicy(BestOfNPolicy):
    """Best of samples and edited samples; methods of `BestOfNPolicy`."""

    name: ClassVar[str] = "edited"
    config_class = ResidualEditConfig
    config: ResidualEditConfig

    def __init__(
        self,
        config: ResidualEditConfig,
        spec: PolicySpec | None = None,
        *,
        base: Policy | None = None,
        critic: QEnsemble | None = None,
        edit: EditNet | None = None,
    ) -> None:
        """Build the policy like `BestOfNPolicy`; `edit` is shared with the caller."""
        super().__init__(config, spec, base=base, critic=critic)
        self.edit = EditNet(config.edit, self.base) if edit is None else edit

    @property
    def nfe(self) -> int:
        """Evaluations of all samples and edits, and one of the critic per candidate."""
        return super().nfe + 2 * self.config.edits

    @torch.no_grad()
    def propose(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Candidates:
        """Propose the samples, then the edits; `deterministic` edits without noise."""
        chunks = self.samples(obs, deterministic=deterministic, generator=generator)
        count = self.config.edits
        if count:
            features = self.edit.encode(obs).repeat_interleave(count, 0)
            originals = chunks[:, :count].flatten(0, 1)
            if deterministic:
                edited = self.edit.mode(features, originals)
            else:
                edited = self.edit.rsample(features, originals, repeated(generator, count))[0]
            chunks = torch.cat([chunks, edited.unflatten(0, (-1, count))], 1)
        return Candidates(chunks, self.score(obs, chunks))


def make_residual_edit(base: Policy, edit: EditNet, critic: QEnsemble, **settings: Any) -> ResidualEditPolicy:
    """Samples and edits of `base` selected by `critic`, all shared; `settings` are fields of `ResidualEditConfig`."""
    config = ResidualEditConfig(base=describe(base), critic=critic.config, edit=edit.config, **settings)
    return ResidualEditPolicy(config, base=base, critic=critic, edit=edit)
