"""SL-MGAC on soft actor-critic: a critic that also learns, supervised, the reward of its chunks (Liu et al. 2024).

In addition to the value every critic predicts the reward of the window, from the same trunk. This is regression on
data, without bootstrap error, and it keeps reward-relevant features in the trunk. The prediction also replaces a part
of the observed reward in the target of the value, which reduces the effect of reward noise on the temporal-difference
error. Values may be discretised (`critic.bins`), and a task or group in the observation `embedding.*` has its own
projection in the critic.

Use it in place of SAC where rewards are noisy, or differ between groups. With exact rewards it has only a cost, because
predictions are wrong at first. `reward_coef=0 reward_trust_coef=0` is SAC with normalised layers.

Reconstructed from the abstract and a summary; the source allocates live streams. Own choices: one predicted reward (the
paper: several tasks), and its use in the target. In our measurements the supervised loss without the target changed the
variance of critics little; the prediction in the target removes the noise of rewards. Not implemented: networks for
each group, the distillation of the policy, and the reward and constraint of the application.
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
    reward_trust_coef: Fraction = 0.5  # weight of the prediction in the reward of the target; 0 ignores it


def supervised_loss(prediction: Tensor, reward: Tensor) -> Tensor:
    """Squared error `(M, B)` of predicted rewards `(M, B)` to observed ones `(B,)`."""
    return (prediction - reward).square()


class SLMGAC(SAC):
    """SAC with a critic that also predicts rewards."""

    name = "sl_mgac"
    config_class = SLMGACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "liu2024slmgac"
    config: SLMGACConfig
    critic: RewardPredictingQ
    target_critic: RewardPredictingQ

    def make_critic(self) -> RewardPredictingQ:
        """Build the critic of values and rewards."""
        return RewardPredictingQ(self.config.critic, self.policy)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss plus reward loss, summed over the members and averaged over the batch."""
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
        """Interpolate the rewards of the windows between observed ones and predictions of the target critic."""
        critic = self.target_critic
        expected = critic.reward(critic.output(critic.encode(batch.obs), batch.chunk)).mean(0)
        return replace(batch, reward=batch.reward.lerp(expected, self.config.reward_trust_coef))
