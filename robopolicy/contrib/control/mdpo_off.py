"""Mirror descent policy optimisation from replay: SAC with a KL to a lagged copy of the policy (S088).

The actor minimises `c log pi + (lambda - c) log pi_k - Q` at its own draws: entropy of weight `lambda`, of which a part
`c` binds it to pi_k, a copy of itself that is renewed every so many steps. With c = lambda, or a copy renewed in every
step, it is SAC with a fixed temperature.

Use it in place of SAC where its actor moves too fast, e.g. to start from a pretrained Gaussian, which is the first
pi_k. `mdpo` is its sibling for rollouts.

Deviations from the public code: the actor climbs the least value of the ensemble (there: the first critic alone), play
draws from the policy (there: its mean), the target takes the next action's own value and entropy (there: a value
network fitted to them), and the penalty on mean and log standard deviation is left out, as both are bounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.frames.base import Stateful, frozen_copy
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import Count, NotNegative, Positive
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.noise import normal


@dataclass(frozen=True)
class MDPOOffConfig(SACConfig):
    """Settings of off-policy MDPO; defaults are the public code's."""

    temperature: Positive = 0.2  # lambda, weight of the entropy
    temperature_lr: NotNegative = 0.0  # 0 keeps it fixed
    proximity: Positive = 1.0  # c, weight of log pi; the copy's has lambda - c
    copy_every: Count = 1000  # actor steps between renewals of pi_k


class MDPOOff(SAC):
    """SAC whose actor stays near a lagged copy of itself."""

    name = "mdpo_off"
    config_class = MDPOOffConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "tomar2020mdpo"

    def __init__(self, config: MDPOOffConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`, which is the first pi_k."""
        super().__init__(config, policy, total_updates=total_updates)
        self.config: MDPOOffConfig = config
        self.previous = frozen_copy(self.policy)

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """`c log pi + (lambda - c) log pi_k - min Q` at reparameterised chunks."""
        near = self.config.proximity
        mean, log_std = self.policy.distribution(batch.obs)
        noise = normal(mean.shape, self.generator, mean.device)
        chunk, logp = self.policy.drawn(mean, log_std, noise)
        loss = near * logp - self.critic.lowest(batch.obs, chunk)
        rest = alpha.detach() - near
        return (loss + rest * self.previous.raw_density(batch.obs, mean + log_std.exp() * noise)).mean(), logp, {}

    def actor_step(self, batch: Transitions) -> Info:
        """One step of the actor, and now and then a new copy."""
        info = super().actor_step(batch)
        if self.critic_steps // self.config.actor_delay % self.config.copy_every == 0:
            self.previous.load_state_dict(self.policy.state_dict())
        return info

    def parts(self) -> Mapping[str, Stateful]:
        """SAC's parts and the copy."""
        return {**super().parts(), "previous": self.previous}
