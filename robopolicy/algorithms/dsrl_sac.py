"""DSRL-SAC: soft actor-critic over the noise of a frozen diffusion or flow policy (Wagenmaker et al. 2025).

The noise is the action: the base policy is part of the environment, and SAC learns Q(s, w) and pi(w | s) in the box
[-b, b], one decision per chunk. The base never changes and is called once per executed chunk.

Use it with a black-box policy, especially a slow or remote one, because updates do not call the base. It cannot use
demonstrations, whose noise is unknown, and is less sample-efficient than `dsrl_na`. The base must be deterministic
given its noise and must sometimes succeed, because steering only selects among its behaviours.

Deviations from the public code: every chunk is decoded once (there: twice); truncated episodes bootstrap from their
last observation; rewards are discounted per control step (the paper's discount per chunk of n steps is gamma ** n); the
actor has no LayerNorm; the target has no entropy term, see `dsrl_na`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import (
    SteeringConfig,
    Temperature,
    make_latent_policy,
    noise_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, make_adam, optimizer_step
from robopolicy.algorithms.sac import actor_loss, soft_target
from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.latent import LatentPolicy


@dataclass(frozen=True)
class DSRLSACConfig(SteeringConfig):
    """Settings of DSRL-SAC."""


class DSRLSAC(OffPolicy):
    """SAC on the noise of a frozen policy."""

    name = "dsrl_sac"
    config_class = DSRLSACConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "wagenmaker2025dsrl"
    chunk_starts_only = True  # the noise is known only at decisions
    config: DSRLSACConfig
    policy: LatentPolicy

    def __init__(self, config: DSRLSACConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy`, or continue with a policy that has a noise actor."""
        if config.n_step % (steps := policy.spec.action_horizon):
            raise UserError(f"algorithm.n_step must be a multiple of the {steps} executed steps, got {config.n_step}.")
        latent = make_latent_policy(policy, config, self.name)
        super().__init__(config, latent, total_updates=total_updates)
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, noise_dims(latent))
        self.optimizer = make_adam(latent.actor, config.lr, config.weight_decay)

    def make_critic(self) -> QEnsemble:
        """Build Q(s, w) on the free noise divided by its bound."""
        return QEnsemble(self.config.critic, self.policy.actor)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw from the base's own noise distribution within the bound."""
        return self.policy.sample_prior(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw noise from the actor and decode it; the record has the noise."""
        sample = self.policy.sample(obs, generator=generator)
        return replace(sample, record={"noise": sample.record["noise"]})

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        w, logp = self.policy.actor.rsample(batch.next_obs, generator=self.generator)
        value = self.next_value(batch, w)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def update(self, batch: Transitions) -> Metrics:
        """Run SAC steps on the replayed noise instead of the replayed actions."""
        if "noise" not in batch.record:
            raise UserError("DSRL-SAC needs the noise of actions, which datasets lack; use algorithm=dsrl_na.")
        batch = replace(batch, chunk=batch.record["noise"])
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(self.policy.actor, self.critic, part.obs, alpha, self.generator)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature and actor optimiser."""
        return {**super().checkpoint_items(), **self.temperature.checkpoint_items(), "optimizer": self.optimizer}
