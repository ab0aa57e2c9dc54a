"""Diffusion policy whose sampler steps are divided among several networks, and decoder for two-stage training.

DPPO fine-tunes the last steps of the denoising chain in a copy of the network and keeps the original network for the
first steps, so it deploys two successive networks (more after repeated fine-tuning).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import NonNegativeInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.path import step_index
from robopolicy.policies.wrappers.nested import describe, rebuild

Step = Callable[[DiffusionPolicy, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class StagedDiffusionConfig(Validated):
    """Assignment of steps to networks."""

    starts: tuple[NonNegativeInt, ...] = ()  # first sampler step of each stage, rising from 0
    stages: tuple[Any, ...] = ()  # descriptions of the networks, see `nested.describe`


class StagedDiffusion(Policy):
    """Diffusion heads for successive parts of one chain; methods `act`, `decode` and `field`."""

    name: ClassVar[str] = "staged_diffusion"
    config_class = StagedDiffusionConfig

    def __init__(self, config: StagedDiffusionConfig, spec: PolicySpec) -> None:
        super().__init__()
        if not config.stages:
            raise UserError("A staged diffusion policy is created by dppo; pass such a checkpoint as init_from.")
        self.config = config
        self.spec = spec
        self.heads = _check_stages(config.starts, [rebuild(description) for description in config.stages])
        self.stages = nn.ModuleList(self.heads)

    @property
    def nfe(self) -> int:
        """K."""
        return self.heads[0].nfe

    def run(self, obs: Observation, x: Tensor, count: int, step: Step) -> Tensor:
        """Run the first `count` sampler steps from the iterate `x`, each by `step(head, features, x, k)`."""
        ends = [*self.config.starts[1:], self.nfe]
        for head, start, end in zip(self.heads, self.config.starts, ends, strict=True):
            if start < count:
                features = head.encode(obs)
                for k in range(start, min(end, count)):
                    x = step(head, features, x, k)
        return x

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Run the configured sampler of the stages; the noise of DDPM is part of it."""

        def ancestral(head: DiffusionPolicy, features: Tensor, x: Tensor, k: int) -> Tensor:
            mean, std = head.posterior(features, x, step_index(k, x))
            return mean + std * normal_like(mean) if k < self.nfe - 1 else mean

        def normal_like(x: Tensor) -> Tensor:
            return self.heads[0].draw_noise(len(x), generator, x.device)

        first = next(iter(obs.values()))
        step = _ddim if self.heads[0].config.sampler == "ddim" else ancestral
        with torch.no_grad():
            noise = self.heads[0].draw_noise(len(first), generator, first.device)
            return self._finish(self.run(obs, self.heads[0].init_sample(noise), self.nfe, step))

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Map `noise` `(B, H, A)` to the chunk in env units; differentiable."""
        return self._finish(self.run(obs, self.heads[0].init_sample(noise), self.nfe, _ddim))

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity in normalised units, of the head for time `t`."""
        velocity = self.heads[0].field(obs, x, t)
        for head, start in zip(self.heads[1:], self.config.starts[1:], strict=True):
            head_start = head.signal_scale[start] / (head.signal_scale[start] + head.noise_scale[start])
            velocity = torch.where((t >= head_start)[:, None, None], head.field(obs, x, t), velocity)
        return velocity

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers of all heads."""
        for head in self.heads:
            head.fit_normalizer(statistics)

    def _finish(self, x: Tensor) -> Tensor:
        return self.heads[-1].action_normalizer.denormalize(self.heads[-1].clip(x))


def make_staged(starts: Sequence[int], heads: Sequence[DiffusionPolicy]) -> StagedDiffusion:
    """Build a staged policy of existing heads, which are shared, not copied."""
    config = StagedDiffusionConfig(tuple(starts), tuple(describe(head) for head in heads))
    staged = StagedDiffusion(config, heads[0].spec)
    staged.heads = list(heads)
    staged.stages = nn.ModuleList(heads)
    return staged


def _check_stages(starts: Sequence[int], policies: Sequence[Policy]) -> list[DiffusionPolicy]:
    if len(starts) != len(policies) or list(starts) != sorted({0, *starts}):
        raise UserError(f"Stages need one start each, rising from 0; got {list(starts)} for {len(policies)} stages.")
    heads = [policy for policy in policies if isinstance(policy, DiffusionPolicy)]
    samplers = {(head.config.steps, head.config.sampler) for head in heads}
    if len(heads) != len(policies) or len(samplers) != 1 or starts[-1] >= heads[0].config.steps:
        raise UserError("Stages must be diffusion policies with one sampler, and start before its last step.")
    return heads


def _ddim(head: DiffusionPolicy, features: Tensor, x: Tensor, k: int) -> Tensor:
    return head.sampler_step(features, x, step_index(k, x))


@dataclass(frozen=True)
class StagedDecoderConfig:
    """Settings of a `StagedDecoder`; created by `StagedDecoder.wrap`."""

    head: dict[str, Any] = field(default_factory=dict)  # description of the head (`nested.describe`)


class StagedDecoder(Policy):
    """Decoder that is first the identity, then a head; methods `act` and `decode`."""

    name: ClassVar[str] = "staged_decoder"
    config_class = StagedDecoderConfig
    identity: Tensor

    def __init__(self, config: StagedDecoderConfig, spec: PolicySpec, head: GenerativePolicy | None = None) -> None:
        """Start as the identity around `head`, or around a new head of the description in `config`."""
        super().__init__()
        self.config = config
        self.spec = spec
        inner = rebuild(config.head) if head is None else head
        if not isinstance(inner, GenerativePolicy):
            raise UserError(f"A decoder is a denoising head such as flow or diffusion, got '{inner.name}'.")
        self.head = inner
        self.register_buffer("identity", torch.tensor(True))

    @classmethod
    def wrap(cls, head: GenerativePolicy, *, identity: bool) -> StagedDecoder:
        """Wrap `head`, which is shared, not copied; a start as the identity needs minmax action normalisation."""
        mode = head.action_normalizer.mode
        if identity and mode != "minmax":
            raise UserError(
                f"An untrained decoder needs action bounds, which action_normalization '{mode}' lacks; set "
                "policy.action_normalization=minmax, or algorithm.skip_first_decoder=false after imitation."
            )
        decoder = cls(StagedDecoderConfig(describe(head)), head.spec, head)
        decoder.identity.fill_(identity)
        return decoder

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk for `noise` `(B, H, A)`: tanh within the action bounds, or by the head."""
        if bool(self.identity):
            return self.head.action_normalizer.denormalize(noise.tanh())
        return self.head.decode(obs, noise)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for fresh standard normal noise."""
        reference = next(iter(obs.values()))
        with torch.no_grad():
            return self.decode(obs, self.head.draw_noise(len(reference), generator, reference.device))

    @property
    def nfe(self) -> int:
        """0 as the identity, then evaluations of the head."""
        return 0 if bool(self.identity) else self.head.nfe
