"""SL-MGAC on soft actor-critic: a critic that also learns, supervised, what its chunks earn (Liu et al. 2024).

Beside the value every critic predicts the reward of the window, from the same trunk. That is regression on what was
seen, which no error of a bootstrap reaches, and it keeps in the trunk what rewards depend on. The prediction also
replaces part of the seen reward in the target of the value: noise of rewards then enters the temporal-difference error
less. Values may be discretised (`critic.bins`), and a task or a group that the policy sees as `embedding.*` has a
projection of its own in the critic.

Use it in place of SAC where rewards are noisy, or differ from group to group. Where they are exact it only costs: a
prediction is wrong before it is learned. `reward_coef=0 reward_trust_coef=0` is SAC with normalised layers.

Reconstructed from the abstract and a summary; the source allocates live streams. Own choices: one predicted reward
(there: several tasks), and its use in the target. In our measurements the supervised loss alone changed the variance of
critics little; in the target its prediction removes the noise of rewards. Not built: networks for each group, the
distillation of the policy, and the reward and constraint of the application.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import Fraction, NonNegative
from robopolicy.contrib.control.reward_predicting_q import RewardPredictingQ
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class SLMGACConfig(SACConfig):
    """Settings of SL-MGAC; the weights are our own."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=True)
    )
    reward_coef: NonNegative = 1.0  # weight of the squared error of predicted rewards
    reward_trust_coef: Fraction = 0.5  # share of the prediction in the reward of the target; 0 takes the seen reward


def supervised_loss(prediction: Tensor, reward: Tensor) -> Tensor:
    """Squared error `(M, B)` of predicted rewards `(M, B)` towards the seen ones `(B,)`."""
    return (prediction - reward).square()


class SLMGAC(SAC):
    """SAC whose critic predicts rewards as well."""

    name = "sl_mgac"
    config_class = SLMGACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "liu2024slmgac"
    config: SLMGACConfig
    critic: RewardPredictingQ
    target_critic: RewardPredictingQ

    def make_critic(self) -> RewardPredictingQ:
        """Values and rewards."""
        return RewardPredictingQ(self.config.critic, self.policy)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss and that of the rewards, summed over the members and averaged over the batch."""
        output = self.critic.output(self.critic.encode(batch.obs), batch.chunk)
        with torch.no_grad():
            target = self.target(self.smoothed(batch))
        supervised = supervised_loss(self.critic.reward(output), batch.reward)
        loss = self.critic.regression(output, target) + self.config.reward_coef * supervised
        value = self.critic.value(output.detach())
        info = {"value": value.mean(), "target": target.mean(), "reward_loss": supervised.detach().mean()}
        info |= {
            "td_variance": (target - value).var(1, correction=0).mean(),
            "td_errors": (value - target).abs().mean(0),
        }
        return (loss * batch.weight).mean(1).sum(), info

    def smoothed(self, batch: Transitions) -> Transitions:
        """The windows with rewards between the seen ones and those that the slow critic predicts."""
        critic = self.target_critic
        expected = critic.reward(critic.output(critic.encode(batch.obs), batch.chunk)).mean(0)
        return replace(batch, reward=batch.reward.lerp(expected, self.config.reward_trust_coef))
