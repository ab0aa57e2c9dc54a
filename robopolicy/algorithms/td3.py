"""TD3: twin critics, delayed deterministic actor, smoothed targets (Fujimoto et al. 2018); FastTD3 by its settings.

The actor is the mode of a squashed Gaussian, whose spread is not used. Play adds Gaussian noise, targets add clipped
noise, and the actor steps once per `actor_delay` critic steps. FastTD3 (Seo et al. 2025) is the same for simulators on
a GPU: batches of tens of thousands of rows, a distributional critic (`critic.bins`), and noise whose size differs from
environment to environment (`noise_max`).

Use it from scratch with dense rewards, for a policy that is deterministic by design, above all with thousands of
environments. For one environment SAC explores better. Not for a pretrained diffusion or flow policy.

Deviations from the papers: the target takes the least of the ensemble's members, of which there may be more than two;
FastTD3's histogram is smoothed by a Gaussian (HL-Gauss) and the sizes of its noise are spread evenly over the
environments instead of being drawn anew per episode; actions come in chunks as in SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Stateful, frozen_copy
from robopolicy.algorithms.frames.off_policy import OffPolicy, OffPolicyConfig, descend
from robopolicy.constraints import Count, NotNegative
from robopolicy.critics.q import CriticConfig, TargetUpdate
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness, normal


@dataclass(frozen=True)
class TD3Config(OffPolicyConfig):
    """Settings of TD3; defaults are those of the authors' later code."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    actor_delay: Count = 2  # critic steps per actor step
    noise: NotNegative = 0.1  # standard deviation of the noise of play, normalised actions
    noise_max: NotNegative = 0.0  # the last environment's, the others' lie between; 0 gives all the same
    target_noise: NotNegative = 0.2  # standard deviation of the noise on the target's actions, normalised
    target_noise_clip: NotNegative = 0.5  # largest size of that noise


class TD3(OffPolicy):
    """Deterministic actor-critic."""

    name = "td3"
    config_class = TD3Config
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "fujimoto2018td3"

    def __init__(self, config: TD3Config, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train the mode of a squashed Gaussian `policy`."""
        if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
            raise UserError(f"TD3 trains a squashed Gaussian, got '{policy.name}'; pass policy=squashed_gaussian.")
        super().__init__(config, policy, total_updates=total_updates)
        self.config: TD3Config = config
        self.policy: GaussianPolicy = policy
        self.target_policy = frozen_copy(policy)
        self._policy_update = TargetUpdate(self.target_policy, policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Uniform over the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The mode with noise."""
        mode = self.policy.mode(obs)
        config = self.config
        std = torch.linspace(config.noise, config.noise_max or config.noise, len(mode), device=mode.device)
        return Sample.unscored(self._shifted(mode, std.view(-1, 1, 1) * normal(mode.shape, generator, mode.device)))

    def target(self, batch: Transitions) -> Tensor:
        """Value of the slow actor's next action with clipped noise."""
        return self.bootstrap(batch, self.next_chunk(batch))

    def next_chunk(self, batch: Transitions) -> Tensor:
        """The slow actor's chunk `(B, H, A)` at the next observation, with clipped noise."""
        mode = self.target_policy.mode(batch.next_obs)
        limit = self.config.target_noise_clip
        noise = (self.config.target_noise * normal(mode.shape, self.generator, mode.device)).clamp(-limit, limit)
        return self._shifted(mode, noise)

    def first_value(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Values `(B,)` of the first critic alone, which the actor climbs."""
        return self.critic(obs, chunk, torch.zeros(1, dtype=torch.int64, device=chunk.device))[0]

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """The negative value of the actor's chunks, and what to log."""
        return -self.first_value(batch.obs, self.policy.mode(batch.obs)).mean(), {}

    def actor_step(self, batch: Transitions) -> Info:
        """One step of the actor; then its slow copy follows."""
        loss, info = self.actor_loss(batch)
        descend(self.optimizer, loss)
        self._policy_update.step(self.config.tau)
        self._policy_update.copy_buffers()
        return {"loss": loss, **info}

    def _shifted(self, chunk: Tensor, noise: Tensor) -> Tensor:
        """`chunk` moved by normalised `noise`, within the action bounds."""
        normalizer = self.policy.action_normalizer
        return normalizer.denormalize((normalizer.normalize(chunk) + noise).clamp(-1, 1))

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts, the slow copy of the policy and the optimiser of the actor."""
        return {**super().parts(), "target_policy": self.target_policy, "optimizer": self.optimizer}
