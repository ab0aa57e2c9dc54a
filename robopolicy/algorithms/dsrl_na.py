"""DSRL-NA: noise-aliased steering of a frozen diffusion or flow policy (Wagenmaker et al. 2025).

Many noises give the same action, so a temporal-difference critic Q_A on actions is distilled into Q_W on noise: draw
noise w, decode it with the base into a chunk P(s, w), and regress Q_W(s, w) on Q_A(s, P(s, w)). The actor maximises
Q_W. Q_A needs only actions, so demonstrations and other logged data can be replayed (`dataset=FOLDER`).

Use it with a black-box policy that is fast to call, and with offline data. With a slow or remote base use `dsrl_sac`:
here every critic and distillation step calls the base on a minibatch. The base must be deterministic given its noise
and must sometimes succeed, because steering only selects among its behaviours.

Deviations from the public code: the noise of the distillation is clipped to the bound [-b, b] of the actor (there it
exceeds it, `clip_noise=false`), so Q_W is evaluated only on noise it was trained on; truncated episodes bootstrap from
their last observation; rewards are discounted per control step; the actor has no LayerNorm. The target has no entropy
term, as in the authors' pi0 runs: with a reward of 1 that ends the episode, success would lose the entropy of all
further decisions. Otherwise the paper uses `backup_entropy=true` and `temperature=1`.

With `train_base=true` the base is not frozen: it learns by imitation of the replay buffer, and its Polyak average is
steered, so that no policy has to be trained before (Li and Levine 2026, baseline of QAM).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer, make_metrics
from robopolicy.algorithms.common.max_entropy import (
    SteeringConfig,
    Temperature,
    make_latent_policy,
    noise_dims,
    target_entropy,
)
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, make_adam, optimizer_step
from robopolicy.algorithms.common.offline import imitation_loss, require_imitation
from robopolicy.algorithms.sac import actor_loss, soft_target
from robopolicy.constraints import Ratio
from robopolicy.critics.q import QEnsemble, TargetUpdate
from robopolicy.data.batches import Transitions
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.best_of_n import REDUCTIONS
from robopolicy.policies.wrappers.latent import LatentPolicy


@dataclass(frozen=True)
class DSRLNAConfig(SteeringConfig):
    """Settings of DSRL-NA."""

    distill: Ratio = 0.5  # distillation steps per critic step, at least one per update (published: 10 per 20)
    clip_noise: bool = True  # clip the noise of the distillation to the bound of the actor (published: false)
    actor_value: str = "min"  # value that the actor maximises: min | mean over the members of Q_W
    train_base: bool = False  # train the base by imitation of the replay, and steer its Polyak average

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.actor_value not in REDUCTIONS:
            raise unknown_name("actor_value", self.actor_value, REDUCTIONS)


def distill_loss(
    noise_critic: QEnsemble, critic: QEnsemble, obs: Observation, w: Tensor, chunk: Tensor
) -> tuple[Tensor, Info]:
    """Regression of Q_W(s, w) on Q_A(s, chunk) per member; `chunk` `(B, H, A)` is decoded from `w`."""
    with torch.no_grad():
        target = critic(obs, chunk)  # (M, B)
    output = noise_critic.output(noise_critic.encode(obs), w)
    loss = noise_critic.regression(output, target).mean(1).sum()
    error = (noise_critic.value(output.detach()) - target).square().mean()
    return loss, {"distill_loss": loss.detach(), "distill_error": error.sqrt()}


class DSRLNA(OffPolicy):
    """Actor on noise, temporal-difference critic on actions, and a distilled critic on noise."""

    name = "dsrl_na"
    config_class = DSRLNAConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "wagenmaker2025dsrl"
    supports_rho = True
    config: DSRLNAConfig
    policy: LatentPolicy

    def __init__(self, config: DSRLNAConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy`, or continue with a policy that has a noise actor."""
        latent = make_latent_policy(policy, config, self.name)
        super().__init__(config, latent, total_updates=total_updates)
        self.critic.eval()  # no dropout in the teacher of the distillation
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, noise_dims(latent))
        self.optimizer = make_adam(latent.actor, config.lr, config.weight_decay)
        self.noise_critic = QEnsemble(config.critic, latent.actor)  # Q_W, which needs no target network
        self.noise_critic_optimizer = torch.optim.Adam(self.noise_critic.parameters(), lr=config.critic_lr, fused=True)
        self.clone: Policy | None = None  # policy that imitates the replay, whose average is the base
        if config.train_base:
            self.clone = copy.deepcopy(require_imitation(latent.base, self.name)).requires_grad_(True)
            self.clone_optimizer = torch.optim.Adam(self.clone.parameters(), lr=config.lr, fused=True)
            self._base_update = TargetUpdate(latent.base, self.clone)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw from the base's own noise distribution within the bound."""
        return self.policy.sample_prior(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw noise from the actor and decode it; the record has the noise."""
        sample = self.policy.sample(obs, generator=generator)
        return replace(sample, record={"noise": sample.record["noise"]})

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation at the decoded noise of the actor."""
        w, logp = self.policy.actor.rsample(batch.next_obs, generator=self.generator)
        chunk = self.policy.decode_free_noise(batch.next_obs, w, self.generator)
        value = self.next_value(batch, chunk)
        return soft_target(batch, value, logp, self.temperature.value, self.config)

    def update(self, batch: Transitions) -> Metrics:
        """Take steps of Q_A and the actor on every minibatch, then distillation steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(
                    self.policy.actor,
                    self.noise_critic,
                    part.obs,
                    alpha,
                    self.generator,
                    reduction=self.config.actor_value,
                )
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha)
            if self.clone is not None:
                stats.actor(imitation=self.imitation_step(self.clone, part))
        metrics = self.finish(batch, stats)
        minibatches = list(batch.split(self.config.batch_size))
        info: Info = {}
        for step in range(max(1, round(self.config.distill * len(minibatches)))):
            with self.mixed_precision(batch):
                info = self.distill_step(minibatches[step % len(minibatches)].obs)
        return metrics | make_metrics({f"critic/{key}": value for key, value in info.items()})

    def imitation_step(self, clone: Policy, batch: Transitions) -> Tensor:
        """Take a step of the imitating policy, and move the base towards it by `tau`; returns the mean loss."""
        generator, progress = self.generator, self.progress
        losses = imitation_loss(clone, batch.obs, batch.chunk, mask=batch.mask, generator=generator, progress=progress)
        loss = losses.mean()
        optimizer_step(self.clone_optimizer, loss)
        self._base_update.step(self.config.tau)
        self._base_update.copy_buffers()
        return loss

    def distill_step(self, obs: Observation) -> Info:
        """Take a step of Q_W on newly drawn noise."""
        reference = next(iter(obs.values()))
        w = self.policy.draw(len(reference), self.generator, reference.device, clip=self.config.clip_noise)
        chunk = self.policy.decode_free_noise(obs, w, self.generator)
        loss, info = distill_loss(self.noise_critic, self.critic, obs, w, chunk)
        optimizer_step(self.noise_critic_optimizer, loss)
        return info

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class, Q_W and the imitating policy."""
        clone = () if self.clone is None else (self.clone,)
        return *super().observers(), self.noise_critic.encoder, *clone

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature, actor optimiser, Q_W and the imitating policy with their optimisers."""
        clone = {} if self.clone is None else {"clone": self.clone, "clone_optimizer": self.clone_optimizer}
        return {
            **super().checkpoint_items(),
            **clone,
            **self.temperature.checkpoint_items(),
            "optimizer": self.optimizer,
            "noise_critic": self.noise_critic,
            "noise_critic_optimizer": self.noise_critic_optimizer,
        }
