"""Recurrent policy that produces a sequence of primitive actions from one observation: the actor of SRL.

A small network maps the observation to the initial state of a GRU, which then runs on its own actions: each action is
drawn from a tanh-Gaussian and fed back. A later action thus depends on the earlier ones, unlike a chunk drawn from
independent Gaussians. The density of the chunk is the exact product over its actions. Source: Patel and Siegelmann
2024.

Use it where decisions are slow and actions are fast. `algorithm=srl` trains it from scratch with a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtMost, Finite, PositiveInt
from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP
from robopolicy.policies.base import DecisionOutput, Info, Observation, PolicySpec, Record, Sample, chunk_mean
from robopolicy.policies.density import log_tanh_slope, normal_entropy, normal_log_density, sample_squashed
from robopolicy.policies.heads.explicit import ExplicitConfig, ExplicitPolicy
from robopolicy.policies.noise import Randomness, normal


@dataclass(frozen=True)
class SequenceConfig(ExplicitConfig):
    """Architecture of a `SequencePolicy`."""

    hidden: tuple[PositiveInt, ...] = (256, 256)  # layers before the GRU, which has the last width
    activation: str = "relu"
    log_std_min: Annotated[Finite, AtMost("log_std_max", exclusive=True)] = -5.0  # bounds of the logarithm, before tanh
    log_std_max: Finite = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden:
            raise UserError("A sequence policy needs at least one width in policy.hidden for its GRU, got none.")


class SequencePolicy(ExplicitPolicy):
    """One decision for the whole chunk; methods `act`, `sample`, `decisions`, `imitation_loss`."""

    name: ClassVar[str] = "sequence"
    config_class = SequenceConfig
    config: SequenceConfig

    def __init__(self, config: SequenceConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        *inner, width = config.hidden
        in_dim = spec.obs_horizon * self.feature_dim
        self.start = MLP(in_dim, inner, width, activation=config.activation)
        self.gru = nn.GRUCell(spec.action_dim, width)
        self.output = nn.Linear(width, 2 * spec.action_dim)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The mode of every action given the previous ones (`deterministic`), or a draw."""
        with torch.no_grad():
            if not deterministic:
                return self.rsample(obs, generator=generator)[0]
            modes: list[Tensor] = []
            self._unroll(self.features(obs), lambda mean, _: _append(modes, mean.tanh()))
            return self.action_normalizer.denormalize(torch.stack(modes, 1))

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk; the record holds it before tanh in normalised units."""
        features, raws = self.features(obs), []
        noise = iter(self._noise(features, self.spec.horizon, generator).unbind(1))

        def draw(mean: Tensor, log_std: Tensor) -> Tensor:
            raws.append(mean + log_std.exp() * next(noise))
            return raws[-1].tanh()

        self._unroll(features, draw)
        record = {"raw": torch.stack(raws, 1)}
        chunk = self.action_normalizer.denormalize(record["raw"].tanh())
        return Sample(chunk, record, self.decisions(obs, record).logp)

    def rsample(
        self, obs: Observation, *, steps: int | None = None, generator: Randomness = None
    ) -> tuple[Tensor, Tensor]:
        """Reparameterised actions `(B, n, A)` and the log-probability of each `(B, n)`; differentiable.

        n is the horizon, or `steps` if given.
        """
        features, density = self.features(obs), []
        actions: list[Tensor] = []
        noise = iter(self._noise(features, steps or self.spec.horizon, generator).unbind(1))

        def draw(mean: Tensor, log_std: Tensor) -> Tensor:
            action, element = sample_squashed(mean, log_std, next(noise))
            density.append(element.sum(1))
            return _append(actions, action)

        self._unroll(features, draw, steps)
        return self.action_normalizer.denormalize(torch.stack(actions, 1)), torch.stack(density, 1)

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, 1)`; the entropy is estimated at the recorded value, as for the Gaussian."""
        raw = record["raw"]
        mean, log_std = self._teacher_forced(self.features(obs), raw)
        logp = (normal_log_density(raw, mean, log_std) - log_tanh_slope(raw)).flatten(1).sum(1, keepdim=True)
        draw = mean + log_std.exp() * ((raw - mean) / log_std.exp()).detach()
        entropy = (normal_entropy(log_std) + log_tanh_slope(draw)).flatten(1).sum(1, keepdim=True)
        return DecisionOutput(logp, entropy)

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Negative log-likelihood `(B,)`, averaged over the valid steps and dimensions."""
        target = self.action_normalizer.normalize(chunk)
        raw = target.clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        mean, log_std = self._teacher_forced(self.encode_for_training(obs, generator), raw)
        density = normal_log_density(raw, mean, log_std) - log_tanh_slope(raw)
        loss = chunk_mean(-density.mean(-1), mask)
        error = (mean.tanh() - target).square().detach()
        return (loss if weight is None else loss * weight), {"mse": chunk_mean(error.mean(-1), mask).mean()}

    def _teacher_forced(self, features: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation `(B, H, A)` of every action, given the recorded previous actions."""
        given = iter(raw.tanh().unbind(1))
        means: list[Tensor] = []
        log_stds: list[Tensor] = []

        def follow(mean: Tensor, log_std: Tensor) -> Tensor:
            means.append(mean)
            log_stds.append(log_std)
            return next(given)

        self._unroll(features, follow)
        return torch.stack(means, 1), torch.stack(log_stds, 1)

    def _unroll(self, features: Tensor, choose: Callable[[Tensor, Tensor], Tensor], steps: int | None = None) -> None:
        """Run the GRU; `choose` maps mean and log standard deviation `(B, A)` to the action that is fed back."""
        hidden = self.start(features.flatten(1))
        action = features.new_zeros(len(features), self.spec.action_dim)
        for _ in range(steps or self.spec.horizon):
            hidden = self.gru(action, hidden)
            mean, log_std = self.output(hidden).chunk(2, -1)
            action = choose(mean, log_std.clamp(self.config.log_std_min, self.config.log_std_max))

    def _noise(self, features: Tensor, steps: int, generator: Randomness) -> Tensor:
        return normal((len(features), steps, self.spec.action_dim), generator, features.device)


def _append(items: list[Tensor], value: Tensor) -> Tensor:
    items.append(value)
    return value
