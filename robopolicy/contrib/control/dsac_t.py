"""DSAC-T: soft actor-critic whose critics predict the distribution of the return (Duan et al. 2023).

Each critic predicts mean and standard deviation of the soft return. The mean is regressed onto the expected target of
the critic with the least mean, as in SAC. The standard deviation is fitted to sampled targets, clipped at three times
its running average. Both gradients are scaled by the standard deviation, so that the scale of the rewards does not
matter.

Use it in place of SAC where the scale of rewards differs between tasks, or where the standard deviation of the return
is needed at run time. It has no histogram to tune. For a pretrained diffusion or flow policy use a fine-tuning
algorithm.

Deviations from the public code: the variance is compared with the whole squared error (the code: with a Huber loss,
half the square, which converges to the truth / sqrt(2)); actions come in chunks as in SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.common.off_policy import UpdateStats, optimizer_step
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import NonNegativeInt, Positive, PositiveInt
from robopolicy.contrib.control.gaussian_critic import GaussianQ
from robopolicy.critics.q import CriticConfig, TargetUpdate
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.noise import normal

BIAS = 0.1  # bounds divisions by a small standard deviation
WEIGHT_RANGE = (0.1, 10.0)  # of the scale of a row's gradient


@dataclass(frozen=True)
class DSACTConfig(SACConfig):
    """Settings of DSAC-T; defaults are the public code's except for those in docs/methods/off_policy.md."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256, 256), activation="gelu", layer_norm=False)
    )
    lr: Positive = 1e-4  # learning rate of the actor
    critic_lr: Positive = 1e-4  # learning rate of the critic
    policy_delay: PositiveInt = 2  # critic steps per actor step
    critic_target_interval: NonNegativeInt = 0  # critic steps per update of the target critic; 0: policy_delay
    spread_clip: Positive = 3.0  # sampled targets are clipped at this many average standard deviations from the mean
    huber: Positive = 50.0  # error of the mean beyond which its loss is linear

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused("dsac_t", self, "average_members")


class RunningStd(nn.Module):
    """Running average of each member's standard deviation `(M,)`, initialised by the first batch."""

    average: Tensor

    def __init__(self, members: int, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("average", torch.zeros(members))

    def observe(self, std: Tensor) -> None:
        """Update the average with a batch of standard deviations `(M, B)`."""
        mean = std.detach().mean(1)
        self.average.copy_(torch.where(self.average == 0, mean, self.average.lerp(mean, self.rate)))


def distribution_loss(
    mean: Tensor, std: Tensor, target: Tensor, sampled: Tensor, average: Tensor, config: DSACTConfig
) -> Tensor:
    """Loss `(M, B)` of predicted moments.

    Args:
        mean: (M, B) predicted mean of the return.
        std: (M, B) predicted standard deviation.
        target: (B,) expected target of the mean.
        sampled: (B,) sampled target of the standard deviation.
        average: (M, 1) running average of the standard deviation.
        config: Clip and Huber range.
    """
    fixed, center = std.detach(), mean.detach()
    limit = config.spread_clip * average
    error = torch.clamp(sampled - center, -limit, limit)
    weight = (average.square() / (fixed.square() + BIAS)).clamp(*WEIGHT_RANGE)
    of_mean = nn.functional.huber_loss(mean, target.expand_as(mean), reduction="none", delta=config.huber)
    of_std = std * (fixed.square() - error.square()) / (fixed + BIAS)
    return weight * (of_mean + of_std)


class DSACT(SAC):
    """SAC with Gaussian critics and a target copy of the policy."""

    name = "dsac_t"
    config_class = DSACTConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "duan2023dsact"
    uses_full_ensemble = True
    config: DSACTConfig
    critic: GaussianQ
    target_critic: GaussianQ

    def __init__(self, config: DSACTConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, policy, total_updates=total_updates)
        self.spread = RunningStd(config.critic.members, config.tau)
        self.target_policy = frozen_copy(self.policy)
        self._policy_update = TargetUpdate(self.target_policy, self.policy)

    def make_critic(self) -> GaussianQ:
        """Build the critic of means and standard deviations."""
        return GaussianQ(self.config.critic, self.policy)

    @torch.no_grad()
    def targets(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """Expected and sampled target `(B,)`, both from the member with the least mean."""
        chunk, logp = self.target_policy.rsample(batch.next_obs, generator=self.generator)
        mean, std = self.target_critic.moments(batch.next_obs, chunk)
        least, member = mean.min(0)
        z = normal(least.shape, self.generator, least.device).clamp(-3, 3)
        drawn = least + std.gather(0, member[None]).squeeze(0) * z
        entropy = self.temperature.value * logp if self.config.backup_entropy else 0.0
        return (batch.reward + batch.discount * (value - entropy) for value in (least, drawn))  # type: ignore[return-value]

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Distribution loss, summed over the members and averaged over the batch."""
        mean, std = self.critic.moments(batch.obs, batch.chunk)
        self.spread.observe(std)
        target, sampled = self.targets(batch)
        loss = distribution_loss(mean, std, target, sampled, self.spread.average[:, None], self.config)
        info = {"value": mean.mean(), "target": target.mean(), "spread": std.mean()}
        errors = (mean - target).abs().mean(0).detach()
        return (loss * batch.weight).mean(1).sum(), {**info, "td_errors": errors}

    def update(self, batch: Transitions) -> Metrics:
        """Update as in SAC, on the least mean; every actor step also updates both targets."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(part, alpha)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha, **info)
                self._policy_update.step(self.config.tau)
                self._policy_update.copy_buffers()
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of SAC, the average standard deviation and the target policy."""
        return {**super().checkpoint_items(), "spread": self.spread, "target_policy": self.target_policy}
