"""Mirror descent policy optimisation from replay: SAC with a KL to a lagged copy of the policy (Tomar et al. 2020).

The actor minimises `c log pi + (lambda - c) log pi_k - Q` at its own draws: an entropy of weight `lambda`, of which the
part `c` is a KL to pi_k, a copy of the actor that is updated at a fixed interval. With c = lambda, or a copy updated in
every step, it is SAC with a fixed temperature.

Use it in place of SAC where its actor moves too fast, e.g. to start from a pretrained Gaussian, which is the first
pi_k. `mdpo` is the variant for rollouts.

Deviations from the public code: the actor maximises the least value of the ensemble (the code: the first critic);
exploration draws from the policy (the code: its mean); the target takes value and entropy of the next action (the code:
a value network fitted to them); the penalty on mean and log standard deviation is omitted, because both are bounded
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.common.off_policy import UpdateStats, optimizer_step
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.noise import normal


@dataclass(frozen=True)
class MDPOOffConfig(SACConfig):
    """Settings of off-policy MDPO; defaults are the public code's."""

    temperature: Positive = 0.2  # lambda, weight of the entropy
    temperature_lr: NonNegative = 0.0  # 0 keeps the temperature fixed
    kl_coef: Positive = 1.0  # c, weight of log pi; log pi_k has lambda - c
    target_update_interval: PositiveInt = 1000  # actor steps between updates of pi_k

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused("mdpo_off", self, "average_members")


class MDPOOff(SAC):
    """SAC whose actor stays near a lagged copy of itself."""

    name = "mdpo_off"
    config_class = MDPOOffConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "tomar2020mdpo"
    config: MDPOOffConfig

    def __init__(self, config: MDPOOffConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`, which is the first pi_k."""
        super().__init__(config, policy, total_updates=total_updates)
        self.previous = frozen_copy(self.policy)

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """`c log pi + (lambda - c) log pi_k - min Q` at reparameterised chunks."""
        kl_coef = self.config.kl_coef
        mean, log_std = self.policy.distribution(batch.obs)
        noise = normal(mean.shape, self.generator, mean.device)
        chunk, logp = self.policy.rsample_from(mean, log_std, noise)
        loss = kl_coef * logp - self.critic.min_q(batch.obs, chunk)
        rest = alpha - kl_coef
        return (loss + rest * self.previous.raw_density(batch.obs, mean + log_std.exp() * noise)).mean(), logp, {}

    def update(self, batch: Transitions) -> Metrics:
        """Update as in SAC; the copy takes the weights of the policy at a fixed interval of actor steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(part, alpha)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha, **info)
                if self.critic_steps // self.config.policy_delay % self.config.target_update_interval == 0:
                    self.previous.load_state_dict(self.policy.state_dict())
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of SAC and the copy."""
        return {**super().checkpoint_items(), "previous": self.previous}
