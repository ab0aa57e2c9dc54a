"""DSRL-SAC: soft actor-critic over the noise of a frozen diffusion or flow policy (Wagenmaker et al. 2025).

The noise is the action: the base policy becomes part of the environment, and plain SAC learns Q(s, w) and pi(w | s) in
the box [-b, b], one decision per chunk. The base is only called, once per chunk played, and never changes.

Use it on a black box, above all on a slow or remote one: updates do not call the base. Not with demonstrations, whose
noise is unknown, and less sample-efficient than `dsrl_na` where the base is quick to call. The base must be
deterministic given its noise, and must sometimes do the right thing: steering selects behaviour, it invents none.

Deviations from the public code: it denoises a second time while playing, here every chunk is decoded exactly once;
truncated episodes bootstrap from their last observation; rewards are discounted per control step (the paper's one
discount per chunk of n steps is gamma ** n); the actor has no LayerNorm; the target leaves the entropy out, see
`dsrl_na`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import (
    SteeringConfig,
    Temperature,
    actor_optimizer,
    make_latent_policy,
    noise_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step
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
    """SAC whose actions are noise."""

    name = "dsrl_sac"
    config_class = DSRLSACConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "wagenmaker2025dsrl"
    chunk_starts_only = True  # the noise is known where a chunk was chosen
    config: DSRLSACConfig
    policy: LatentPolicy

    def __init__(self, config: DSRLSACConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy`, or continue with a policy that is steered already."""
        if config.n_step % policy.spec.action_horizon:
            raise UserError(
                f"Noise decides {policy.spec.action_horizon} actions at once, so algorithm.n_step must be a "
                f"multiple of that, "
                f"got {config.n_step}."
            )
        latent = make_latent_policy(policy, config, self.name)
        super().__init__(config, latent, total_updates=total_updates)
        self.temperature = Temperature(config.temperature)
        self.target_entropy = target_entropy(config, noise_dims(latent))
        self.optimizer = actor_optimizer(latent.actor, self.temperature, config)

    def make_critic(self) -> QEnsemble:
        """Q(s, w) on the free noise, divided by its bound."""
        return QEnsemble(self.config.critic, self.policy.actor)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The base's own noise within the bound: its success is that of the base in this noise space."""
        return self.policy.sample_prior(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Noise drawn from the actor, decoded once; the record keeps the noise."""
        sample = self.policy.sample(obs, generator=generator)
        return replace(sample, record={"noise": sample.record["noise"]})

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        w, logp = self.policy.actor.rsample(batch.next_obs, generator=self.generator)
        value = self.bootstrap(batch, w)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def update(self, batch: Transitions) -> Metrics:
        """SAC on the replayed noise in place of the replayed actions."""
        if "noise" not in batch.record:
            raise UserError(
                "DSRL-SAC learns from the noise behind each action, which a dataset does not hold; "
                "use algorithm=dsrl_na with a dataset, or leave dataset= out."
            )
        batch = replace(batch, chunk=batch.record["noise"])
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(self.policy.actor, self.critic, part.obs, alpha, self.generator)
                optimizer_step(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
                stats.actor(loss=loss, entropy=-logp.mean(), temperature=alpha)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the temperature and the optimiser of actor and temperature."""
        return {**super().checkpoint_items(), "temperature": self.temperature, "optimizer": self.optimizer}
