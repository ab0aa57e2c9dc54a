"""What the Q-chunking family shares: values of whole chunks, learned from complete ones only, and a cloned policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Stateful
from robopolicy.algorithms.frames.imitation import imitation_loss, require_imitation
from robopolicy.algorithms.frames.off_policy import OffPolicy, OffPolicyConfig, descend
from robopolicy.constraints import Positive
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class QChunkingConfig(OffPolicyConfig):
    """Settings that the whole family has; networks are smaller than the published 4 x 512."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(activation="gelu"))
    grad_clip: Positive = 1.0  # largest gradient norm of the policy


def known_errors(errors: Tensor, known: Tensor) -> Tensor:
    """Errors `(B,)` where they are `known` `(B,)` bool, elsewhere the mean of those.

    Rows that carry no loss would keep a large error for ever, and be drawn again and again by their priority.
    """
    mean = torch.where(known, errors, 0.0).sum() / known.sum().clamp(min=1)
    return torch.where(known, errors, mean)


class QChunking(OffPolicy):
    """A critic over executed chunks and a policy cloned from the memory; subclasses say how they act and bootstrap."""

    config: QChunkingConfig
    whole_ensemble = True

    def __init__(self, config: QChunkingConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to clone `policy`, which is trained in place."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is for its own loss: it also chooses what is played
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the cloned policy: an untrained critic would only do harm."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """As usual, but chunks that the end of an episode cut short carry no loss: nobody knows their tail."""
        complete = (batch.steps == self.request.steps).to(batch.weight.dtype)
        loss, info = super().critic_loss(replace(batch, weight=batch.weight * complete))
        errors = known_errors(info["errors"], complete > 0)
        return loss, info | {"complete": complete.mean(), "errors": errors}

    def imitate(self, batch: Transitions) -> Tensor:
        """One step of the policy towards the played chunks; returns the loss."""
        horizon = self.policy.spec.horizon
        chunk, mask = batch.chunk[:, :horizon], batch.mask[:, :horizon]
        loss = imitation_loss(
            self.policy, batch.obs, chunk, mask=mask, generator=self.generator, progress=self.progress
        )
        descend(self.optimizer, loss.mean(), self.policy, self.config.grad_clip)
        return loss.mean()

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts and the optimiser of the policy."""
        return {**super().parts(), "optimizer": self.optimizer}
