"""A generative head that stands aside until it has been trained: the decoder of GoRL (S043).

While `identity` holds, noise passes straight through a tanh to the action bounds, so that a Gaussian over the noise is
a tanh-Gaussian policy; afterwards the head turns noise into actions. Which of the two is part of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.nested import describe, rebuild


@dataclass(frozen=True)
class StagedDecoderConfig:
    """What a `StagedDecoder` consists of; `StagedDecoder.around` fills it in."""

    head: dict[str, Any] = field(default_factory=dict)  # description of the head (`nested.describe`)


class StagedDecoder(Policy):
    """The identity, then a head; verbs `act` and `decode`."""

    name: ClassVar[str] = "staged_decoder"
    config_class = StagedDecoderConfig
    identity: Tensor

    def __init__(self, config: StagedDecoderConfig, spec: PolicySpec, head: GenerativePolicy | None = None) -> None:
        """Start as the identity around `head`, or around a fresh head of the description in `config`."""
        super().__init__()
        self.config = config
        self.spec = spec
        inner = rebuild(config.head) if head is None else head
        if not isinstance(inner, GenerativePolicy):
            raise UserError(f"A decoder is a denoising head such as flow or diffusion, got '{inner.name}'.")
        self.head = inner
        self.register_buffer("identity", torch.tensor(True))

    @classmethod
    def around(cls, head: GenerativePolicy, *, identity: bool) -> StagedDecoder:
        """Wrap `head`, which is shared, not copied.

        Raises:
            UserError: It should start as the identity, and the head does not know the action bounds.
        """
        mode = head.action_normalizer.mode
        if identity and mode != "minmax":
            raise UserError(
                f"An untrained decoder plays up to the action bounds, unknown to action_normalization '{mode}'; set "
                "policy.action_normalization=minmax, or algorithm.identity_start=false after imitation."
            )
        decoder = cls(StagedDecoderConfig(describe(head)), head.spec, head)
        decoder.identity.fill_(identity)
        return decoder

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk for `noise` `(B, H, A)`: tanh within the action bounds, or the head's."""
        if bool(self.identity):
            return self.head.action_normalizer.denormalize(noise.tanh())
        return self.head.decode(obs, noise)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for fresh standard normal noise."""
        reference = next(iter(obs.values()))
        with torch.no_grad():
            return self.decode(obs, self.head.draw_noise(len(reference), generator, reference.device))

    @property
    def network_calls(self) -> int:
        """None as the identity, then the head's."""
        return 0 if bool(self.identity) else self.head.network_calls
