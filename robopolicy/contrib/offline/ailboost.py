"""AILBoost: adversarial imitation by boosting (Chang et al. 2024), on soft actor-critic.

A discriminator separates demonstrations from the agent's data, and its output is the reward of the next learner. Plain
adversarial imitation from replay (discriminator-actor-critic, DAC) treats the whole replay buffer as data of the
current policy. Here the learner is the mixture of all policies so far: as in boosting, a new one enters with a small
weight, and the replay buffer carries these weights, so that the discriminator compares the demonstrations with the
distribution of the mixture. Each learner maximises one reward, given by the discriminator at its start; the first one
follows the discriminator during training.

Use it with few demonstrations and a simulator, without rewards: it also works with one demonstration, where behavior
cloning drifts. Demonstrations must match the simulator, start states above all. With rewards use rlpd; without a
simulator, bc. One learner that never ends (`learner_decisions` beyond the budget) is DAC, with this discriminator's
loss.

Deviations from the public code: a learner's part of the buffer is the data collected during its training (the code:
separate episodes, which cost as many steps again), and the discriminator's steps are spread over this time; the end of
an episode is an input of the discriminator, as in DAC (the paper's tasks do not end); the policy of the last learner is
deployed (the code: one of all, drawn for each episode). Batch sizes and learning rates of policy and critics follow our
SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
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
    """Settings of AILBoost; defaults of discriminator and mixture are the public code's for states."""

    mixture_rate: PositiveFraction = 0.05  # eta, weight of a new learner in the mixture
    learner_decisions: PositiveInt = 250  # decisions of an environment per learner; the code: 1000 of one environment
    discriminator: DiscriminatorConfig = field(default_factory=DiscriminatorConfig)
    discriminator_lr: Positive = 1e-4  # learning rate of the discriminator
    discriminator_delay: PositiveInt = 10  # critic steps per discriminator step

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_step:
            raise UserError(f"AILBoost rewards single chunks; leave algorithm.n_step=0, got {self.n_step}.")
        if not 0 < self.gamma < 1:
            raise UserError(f"AILBoost needs gamma < 1, because episodes never end for it, got {self.gamma}.")


@dataclass(frozen=True)
class LearnerMixture(Validated):
    """Weights of replay slots that turn the data of successive learners into their mixture.

    A new learner gets the fraction `mixture_rate` of the mass and leaves the rest to the earlier ones, as boosting
    mixes weak learners. Each learner has `block` slots of a lane; the oldest one also has the slots that do not fill a
    block. With a single learner all slots have equal weights.
    """

    mixture_rate: OpenFraction  # eta, mass of the newest learner
    block: PositiveInt  # slots of a lane

    def masses(self, learners: int) -> Tensor:
        """Weights `(K,)` of the learners, the newest first; their sum is 1."""
        return self._mass(torch.arange(learners), torch.tensor(learners - 1))

    def __call__(self, newer: Tensor, filled: Tensor) -> Tensor:
        """Weights `(B,)`, on average 1 over a lane.

        Args:
            newer: (B,) slots of the lane that were written later.
            filled: (B,) slots of the lane in use.
        """
        oldest = (filled // self.block).clamp(min=1) - 1
        age = torch.minimum(newer // self.block, oldest)
        slots = torch.where(age == oldest, filled - oldest * self.block, self.block)
        return self._mass(age, oldest) * filled / slots

    def _mass(self, age: Tensor, oldest: Tensor) -> Tensor:
        mass = torch.pow(1.0 - self.mixture_rate, age.double())
        return torch.where(age == oldest, mass, self.mixture_rate * mass)


def discriminator_loss(
    discriminator: Discriminator, expert: Transitions, agent: Transitions, mix: Tensor, penalty: float
) -> tuple[Tensor, Info]:
    """Reverse-KL loss with gradient penalty; windows that terminate also contribute an end state.

    Args:
        discriminator: Discriminator to train.
        expert: Windows of the demonstrations.
        agent: Windows of the agent with their weights in the mixture.
        mix: (B,) numbers in [0, 1], at least as many as the smaller of both has rows.
        penalty: Weight of the gradient penalty.
    """
    rows, weights = zip(*(_with_ends(discriminator, part) for part in (expert, agent)), strict=True)
    output = [discriminator(inputs) for inputs in rows]
    loss = reverse_kl_loss(output[0], output[1], weights[0], weights[1])
    count = min(len(expert), len(agent))
    smooth = gradient_penalty(discriminator, rows[0][:count], rows[1][:count], mix[:count, None])
    info = {
        "divergence": 1 - loss.detach(),  # at most KL(mixture || demonstrations), reached by the best discriminator
        "expert": output[0].detach().mean(),
        "played": output[1].detach().mean(),
    }
    return loss + penalty * smooth, info


def _with_ends(discriminator: Discriminator, windows: Transitions) -> tuple[Tensor, Tensor]:
    """Inputs of the discriminator and their weights: all windows, and an end state for those that terminate."""
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
        self.reward_discriminator: Discriminator = frozen_copy(self.discriminator)  # its output is the reward
        self.discriminator_optimizer = torch.optim.Adam(
            self.discriminator.parameters(), lr=config.discriminator_lr, fused=True
        )

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Specification of SAC, with weights of the mixture."""
        return replace(super().sample_spec, weighting=self.mixture)

    @property
    def learner(self) -> int:
        """Number of learners before the current one."""
        return self.updates * self.config.num_steps // self.config.learner_decisions

    def update(self, batch: Transitions) -> Metrics:
        """Update SAC on the agent's windows; at the end of a learner the next one gets the current reward."""
        learner = self.learner
        stats = UpdateStats()
        for part in self.minibatches(batch):
            agent, expert = part.select(part.online), part.select(~part.online)
            due = self.critic_steps % self.config.discriminator_delay == 0
            info = self.discriminator_step(expert, agent) if due else {}
            stats.critic(self.critic_step(self.imitation_reward(agent)) | info)
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(agent, alpha)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha, **info)
        metrics = self.finish(batch, stats)
        self.discriminator.encoder.update_stats(batch.obs)
        if not learner or self.learner > learner:
            self.reward_discriminator.load_state_dict(self.discriminator.state_dict())
        return metrics | {"critic/learner": float(learner)}

    def discriminator_step(self, expert: Transitions, agent: Transitions) -> Info:
        """Take one step of the discriminator; return the log.

        Raises:
            UserError: The minibatch contains no demonstrations or no data of the agent.
        """
        if not len(expert) or not len(agent):
            raise UserError(
                "AILBoost compares demonstrations with the agent's data in every batch; set "
                "0 < replay.offline_fraction < 1 and "
                "replay.offline_updates=0."
            )
        mix = uniform((min(len(expert), len(agent)),), self.generator, expert.reward.device)
        loss, info = discriminator_loss(self.discriminator, expert, agent, mix, self.config.discriminator.penalty)
        optimizer_step(self.discriminator_optimizer, loss)
        return info

    @torch.no_grad()
    def imitation_reward(self, agent: Transitions) -> Transitions:
        """Windows with the discriminator's reward and equal weights; an end has the value of its infinite future."""
        critic = self.reward_discriminator
        reward = critic(critic.inputs(agent.obs, agent.chunk))
        forever = critic(critic.ended(1)) / (1 - self.config.gamma**self.policy.spec.action_horizon)
        after = self.config.gamma**agent.steps * forever
        reward = reward + torch.where(agent.discount == 0, after, 0.0)
        return replace(agent, reward=reward, weight=torch.ones_like(agent.weight))

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of SAC, the discriminator, its optimiser and the copy that gives the reward."""
        own = {"discriminator": self.discriminator, "discriminator_optimizer": self.discriminator_optimizer}
        return {**super().checkpoint_items(), **own, "judge": self.reward_discriminator}
