"""AILBoost: adversarial imitation by boosting (Chang et al. 2024), on soft actor-critic.

A discriminator tells demonstrations from what was played, and what it says is the reward of the next learner. Plain
adversarial imitation from replay (discriminator-actor-critic, DAC) shows it the whole memory as if the current policy
had played it. Here the learner is the mixture of all policies so far: as in boosting a new one enters with a small
weight, and the memory carries these weights, so that what the discriminator compares with the demonstrations is a
distribution that somebody plays. Each learner climbs one reward, that of the discriminator when it began; the first one
follows the discriminator as that is learned.

Use it with few demonstrations and a simulator, where neither has rewards: even one demonstration is continued where
cloning drifts off. Demonstrations must show what the simulator will show, start states above all. With rewards use
rlpd; without a simulator, bc. One learner that never ends (`learner_decisions` beyond the budget) is DAC, with this
discriminator's loss.

Deviations from the public code: a learner's share of the memory is what was played while it learned (there: episodes
of their own, which cost as many steps again), and the discriminator's steps are spread over that time; the end of an
episode is judged, as in DAC (there tasks do not end); the policy of the last learner is deployed (there: one of all of
them, drawn for each episode). Batch sizes and rates of policy and critics are those of our SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.off_policy import UpdateStats, optimizer_step
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import OpenFraction, Positive, PositiveFraction, PositiveInt, Validated
from robopolicy.contrib.offline.discriminator import (
    Discriminator,
    DiscriminatorConfig,
    gradient_penalty,
    reverse_kl_loss,
)
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.noise import uniform


@dataclass(frozen=True)
class AILBoostConfig(SACConfig):
    """Settings of AILBoost; those of discriminator and mixture are the public code's for states."""

    mixture_rate: PositiveFraction = 0.05  # eta, weight of a new learner in the mixture
    learner_decisions: PositiveInt = 250  # decisions of an environment that make a learner; there 1000 of a single one
    discriminator: DiscriminatorConfig = field(default_factory=DiscriminatorConfig)
    discriminator_lr: Positive = 1e-4  # learning rate of the discriminator
    discriminator_delay: PositiveInt = 10  # critic steps per discriminator step

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_step:
            raise UserError(f"AILBoost judges one chunk at a time; leave algorithm.n_step=0, got {self.n_step}.")
        if not 0 < self.gamma < 1:
            raise UserError(f"AILBoost goes on after the end of an episode and needs gamma < 1, got {self.gamma}.")


@dataclass(frozen=True)
class LearnerMixture(Validated):
    """What slots weigh if a memory is to stand for a mixture of the learners that filled it in turn.

    A new learner gets the share `mixture_rate` of the mass and leaves the rest to those before, as boosting mixes its
    weak learners. Each has played `block` slots of a lane, the oldest one that is left also what does not fill a block.
    A memory of a single learner weighs all slots alike.
    """

    mixture_rate: OpenFraction  # eta, mass of the newest learner
    block: PositiveInt  # slots of a lane

    def masses(self, learners: int) -> NDArray[np.float64]:
        """Weights `(K,)` of the learners, the newest first; their sum is 1."""
        return self._mass(np.arange(learners), np.array(learners - 1))

    def __call__(self, newer: NDArray[np.int64], filled: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights `(B,)`, on average 1 over a lane.

        Args:
            newer: (B,) slots of the lane that were written later.
            filled: (B,) slots of the lane in use.
        """
        oldest = np.maximum(filled // self.block, 1) - 1
        age = np.minimum(newer // self.block, oldest)
        slots = np.where(age == oldest, filled - oldest * self.block, self.block)
        return self._mass(age, oldest) * filled / slots

    def _mass(self, age: NDArray[np.int64], oldest: NDArray[np.int64]) -> NDArray[np.float64]:
        first = np.where(age == oldest, 1.0, self.mixture_rate)
        return first * np.power(1.0 - self.mixture_rate, age, dtype=np.float64)


def discriminator_loss(
    discriminator: Discriminator, expert: Transitions, played: Transitions, mix: Tensor, penalty: float
) -> tuple[Tensor, Info]:
    """Reverse-KL loss with gradient penalty; windows that terminate also show the end.

    Args:
        discriminator: Judges.
        expert: Windows of the demonstrations.
        played: Windows of play with their weights in the mixture.
        mix: (B,) numbers in [0, 1], at least as many as the fewer of both have rows.
        penalty: Weight of the gradient penalty.
    """
    rows, weights = zip(*(_shown(discriminator, part) for part in (expert, played)), strict=True)
    output = [discriminator(inputs) for inputs in rows]
    loss = reverse_kl_loss(output[0], output[1], weights[0], weights[1])
    count = min(len(expert), len(played))
    smooth = gradient_penalty(discriminator, rows[0][:count], rows[1][:count], mix[:count, None])
    info = {
        "divergence": 1 - loss.detach(),  # at least KL(mixture || demonstrations) at the best discriminator
        "expert": output[0].detach().mean(),
        "played": output[1].detach().mean(),
    }
    return loss + penalty * smooth, info


def _shown(discriminator: Discriminator, windows: Transitions) -> tuple[Tensor, Tensor]:
    """Rows to judge and their weights: all windows, and the end of those that terminate."""
    ended = windows.discount == 0
    inputs = torch.cat([discriminator.inputs(windows.obs, windows.chunk), discriminator.ended(int(ended.sum()))])
    return inputs, torch.cat([windows.weight, windows.weight[ended]])


class AILBoost(SAC):
    """SAC on the reward of a discriminator that compares demonstrations with a mixture of learners."""

    name = "ailboost"
    config_class = AILBoostConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "chang2024ailboost"
    config: AILBoostConfig
    needs_dataset: ClassVar[bool] = True
    needs_reward: ClassVar[bool] = False

    def __init__(self, config: AILBoostConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`."""
        super().__init__(config, policy, total_updates=total_updates)
        self.mixture = LearnerMixture(config.mixture_rate, config.learner_decisions * self.policy.spec.action_horizon)
        self.discriminator = Discriminator(config.discriminator, self.policy)
        self.reward_discriminator: Discriminator = frozen_copy(self.discriminator)  # whose output is the reward
        self.discriminator_optimizer = torch.optim.Adam(
            self.discriminator.parameters(), lr=config.discriminator_lr, fused=True
        )

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """As SAC, with weights in the mixture."""
        return replace(super().sample_spec, weighting=self.mixture)

    @property
    def learner(self) -> int:
        """How many learners came before the one that is learning."""
        return self.updates * self.config.num_steps // self.config.learner_decisions

    def update(self, batch: Transitions) -> Metrics:
        """As SAC on what was played; where a learner ends, the next one gets the reward of now."""
        learner = self.learner
        stats = UpdateStats()
        for part in self.minibatches(batch):
            played, expert = part.select(part.online), part.select(~part.online)
            due = self.critic_steps % self.config.discriminator_delay == 0
            info = self.discriminator_step(expert, played) if due else {}
            stats.critic(self.critic_step(self.imitation_reward(played)) | info)
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(played, alpha)
                optimizer_step(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
                stats.actor(loss=loss, entropy=-logp.mean(), temperature=alpha, **info)
        metrics = self.finish(batch, stats)
        self.discriminator.encoder.update_stats(batch.obs)
        if not learner or self.learner > learner:
            self.reward_discriminator.load_state_dict(self.discriminator.state_dict())
        return metrics | {"critic/learner": float(learner)}

    def discriminator_step(self, expert: Transitions, played: Transitions) -> Info:
        """One step of the discriminator; what to log.

        Raises:
            UserError: There are no demonstrations or no play in the minibatch.
        """
        if not len(expert) or not len(played):
            raise UserError(
                "AILBoost compares demonstrations with play in every batch; set 0 < replay.offline_fraction < 1 and "
                "replay.offline_updates=0."
            )
        mix = uniform((min(len(expert), len(played)),), self.generator, expert.reward.device)
        loss, info = discriminator_loss(self.discriminator, expert, played, mix, self.config.discriminator.penalty)
        optimizer_step(self.discriminator_optimizer, loss)
        return info

    @torch.no_grad()
    def imitation_reward(self, played: Transitions) -> Transitions:
        """The windows with the discriminator's reward, all of one weight; an end is worth what it earns for ever."""
        critic = self.reward_discriminator
        reward = critic(critic.inputs(played.obs, played.chunk))
        forever = critic(critic.ended(1)) / (1 - self.config.gamma**self.policy.spec.action_horizon)
        after = self.config.gamma**played.steps * forever
        reward = reward + torch.where(played.discount == 0, after, 0.0)
        return replace(played, reward=reward, weight=torch.ones_like(played.weight))

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """SAC's parts, the discriminator, its optimiser and the one that rewards."""
        own = {"discriminator": self.discriminator, "discriminator_optimizer": self.discriminator_optimizer}
        return {**super().checkpoint_items(), **own, "judge": self.reward_discriminator}
