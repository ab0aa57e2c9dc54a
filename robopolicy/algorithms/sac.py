"""Soft actor-critic (Haarnoja et al. 2018) with a tanh-Gaussian policy and a learned temperature.

Use it to learn from scratch with dense rewards, or through RLPD with demonstrations in every batch. For a pretrained
diffusion or flow policy use a fine-tuner: SAC's own policy cannot represent several modes.

Deviations from the paper: the critics may be an ensemble with subsampled minimum (REDQ) and LayerNorm, actions come in
chunks where the policy has a horizon, and truncated episodes bootstrap from their last observation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.frames.soft import SoftConfig, SoftOffPolicy, actor_loss
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class SACConfig(SoftConfig):
    """Settings of SAC."""


class SAC(SoftOffPolicy):
    """Soft actor-critic on chunks."""

    name = "sac"
    config_class = SACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "haarnoja2018sac"
    policy: GaussianPolicy

    def __init__(self, config: SACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
            raise UserError(
                f"Algorithm '{self.name}' trains a squashed Gaussian, got '{policy.name}'; "
                "pass policy=squashed_gaussian."
            )
        super().__init__(config, policy, total_updates=total_updates)
        self.config: SACConfig = config

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        chunk, logp = self.policy.rsample(batch.next_obs, generator=self.generator)
        return self.soft(batch, self.bootstrap(batch, chunk), logp)

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """`alpha log pi - min Q` at the actor's draws."""
        return *actor_loss(self.policy, self.critic, batch.obs, alpha, self.generator), {}
