"""DSRL-NA: noise-aliased steering of a frozen diffusion or flow policy (Wagenmaker et al. 2025).

Many noises give the same action. So the temporal-difference critic Q_A lives on actions, and is distilled into Q_W on
noise: draw noise w, let the base turn it into a chunk P(s, w), regress Q_W(s, w) on Q_A(s, P(s, w)). The actor
maximises Q_W. Actions suffice, so demonstrations and any other logged data can be replayed (`dataset=FOLDER`).

Use it on a black box that is quick to call, and wherever there is offline data. Not on a slow or remote base: every
critic step and every distillation step calls it on a whole minibatch, while `dsrl_sac` calls it to play only. The base
must be deterministic given its noise, and must sometimes do the right thing: steering selects behaviour, it invents
none.

Deviations from the public code: noise drawn for the distillation is cut to the bound [-b, b] that the actor has, where
the code draws beyond it, and Q_W is thus never asked about noise it has not seen; truncated episodes bootstrap from
their last observation; rewards are discounted per control step; the actor has no LayerNorm. The target leaves the
entropy out, as the authors do for pi0: with a reward of 1 that ends the episode, the entropy of all further decisions
would be lost by succeeding. `backup_entropy=true` and `temperature=1` are the paper's otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
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
from robopolicy.constraints import Ratio
from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.latent import LatentPolicy


@dataclass(frozen=True)
class DSRLNAConfig(SteeringConfig):
    """Settings of DSRL-NA."""

    distill: Ratio = 0.5  # distillation steps per critic step, at least one per update (published: 10 per 20)


def distill_loss(
    noise_critic: QEnsemble, critic: QEnsemble, obs: Observation, w: Tensor, chunk: Tensor
) -> tuple[Tensor, Info]:
    """Regression of Q_W(s, w) on Q_A(s, chunk), member by member; `chunk` `(B, H, A)` is the base's for `w`."""
    with torch.no_grad():
        target = critic(obs, chunk)  # (M, B)
    output = noise_critic.output(noise_critic.encode(obs), w)
    loss = noise_critic.regression(output, target).mean(1).sum()
    error = (noise_critic.value(output.detach()) - target).square().mean()
    return loss, {"distill_loss": loss.detach(), "distill_error": error.sqrt()}


class DSRLNA(OffPolicy):
    """Actor on noise, temporal differences on actions, and a distillation between them."""

    name = "dsrl_na"
    config_class = DSRLNAConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "wagenmaker2025dsrl"
    config: DSRLNAConfig
    policy: LatentPolicy

    def __init__(self, config: DSRLNAConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy`, or continue with a policy that is steered already."""
        latent = make_latent_policy(policy, config, self.name)
        super().__init__(config, latent, total_updates=total_updates)
        self.critic.eval()  # the teacher of the distillation has no dropout
        self.temperature = Temperature(config.temperature)
        self.target_entropy = target_entropy(config, noise_dims(latent))
        self.optimizer = actor_optimizer(latent.actor, self.temperature, config)
        self.noise_critic = QEnsemble(config.critic, latent.actor)  # Q_W; no target depends on it, so it has no copy
        self.noise_critic_optimizer = torch.optim.Adam(self.noise_critic.parameters(), lr=config.critic_lr, fused=True)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The base's own noise within the bound: its success is that of the base in this noise space."""
        return self.policy.sample_prior(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Noise drawn from the actor, decoded once; the record keeps the noise."""
        sample = self.policy.sample(obs, generator=generator)
        return replace(sample, record={"noise": sample.record["noise"]})

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation, at the chunk of the actor's noise."""
        w, logp = self.policy.actor.rsample(batch.next_obs, generator=self.generator)
        chunk = self.policy.decode_free_noise(batch.next_obs, w, self.generator)
        value = self.bootstrap(batch, chunk)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def update(self, batch: Transitions) -> Metrics:
        """Steps of Q_A and the actor on every minibatch, then distillation on as many of them as the settings say."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(self.policy.actor, self.noise_critic, part.obs, alpha, self.generator)
                optimizer_step(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
                stats.actor(loss=loss, entropy=-logp.mean(), temperature=alpha)
        metrics = self.finish(batch, stats)
        minibatches = list(batch.split(self.config.batch_size))
        info: Info = {}
        for step in range(max(1, round(self.config.distill * len(minibatches)))):
            info = self.distill_step(minibatches[step % len(minibatches)].obs)
        return metrics | {f"critic/{key}": float(value) for key, value in info.items()}

    def distill_step(self, obs: Observation) -> Info:
        """One step of Q_W at freshly drawn noise."""
        reference = next(iter(obs.values()))
        w = self.policy.draw(len(reference), self.generator, reference.device)
        chunk = self.policy.decode_free_noise(obs, w, self.generator)
        loss, info = distill_loss(self.noise_critic, self.critic, obs, w, chunk)
        optimizer_step(self.noise_critic_optimizer, loss)
        return info

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones and Q_W."""
        return *super().observers(), self.noise_critic.encoder

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the temperature, the optimiser of the actor, and Q_W with its optimiser."""
        return {
            **super().checkpoint_items(),
            "temperature": self.temperature,
            "optimizer": self.optimizer,
            "noise_critic": self.noise_critic,
            "noise_critic_optimizer": self.noise_critic_optimizer,
        }
