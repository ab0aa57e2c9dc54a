"""Symphony: limited strength under weak noise, a fading memory, wary critics (Ishuov et al. 2025).

Three ideas for learning on the robot itself. The policy plays `tanh(S A + n)` with a weak bounded noise; *swaddling*
penalises the strength S, the more steeply the closer it is to 1, and lets the network choose with a tightness K how
early. The memory fades: what lies far back is drawn ever more rarely. And a value is the weighted mean of the sorted
nodes of several critics, in which the low nodes count most. The actor climbs the value of the *next* observation over
its running average, in units of that average.

Use it with dense rewards where jerky actions cost something. For the highest return in a simulator use sac. The value
must not hover around 0, its own unit here: shift the reward if it does.

Formulas are those of the public code, version S3. Deviations: actor and critic step one after the other, with draws of
their own; Adam corrects its bias; the play of the warm-up is not tiled fifty times over; networks have this library's
activations, not one with learned frequencies; the unit of the values has a floor. Rewards are divided by the mean size
of those in the first batch (there: in the warm-up). Actions come in chunks as in SAC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.off_policy import OffPolicy, OffPolicyConfig, UpdateStats, optimizer_step
from robopolicy.constraints import NonNegative, Positive, PositiveInt, Ratio
from robopolicy.contrib.control.symphony_policy import SwaddledPolicy
from robopolicy.contrib.control.weighted_quantile_q import WeightedQuantileQ
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

GOLDEN = (5**0.5 - 1) / 2  # share of the past in running averages and in Adam's momentum
FLOOR = 1e-3  # smallest unit of the values

_AGES = np.linspace(0, 1, 4097)  # from the oldest to the newest slot
_FADED = np.concatenate([[0.0], np.cumsum(np.tanh((math.pi * (_AGES[1:] + _AGES[:-1]) / 2) ** math.e))])


@dataclass(frozen=True)
class SymphonyConfig(OffPolicyConfig):
    """Settings of Symphony; defaults are the public code's, the actor's width excepted (docs/methods/off_policy.md)."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(members=3, hidden=(512, 512)))
    batch_size: PositiveInt = 384  # windows per gradient step
    utd: Ratio = 3.0  # critic steps per decision of one environment
    lr: Positive = 1e-4  # learning rate of the actor
    critic_lr: Positive = 1e-4  # learning rate of the critic
    nodes: PositiveInt = 128  # outputs of each critic
    action_penalty: NonNegative = 1.0  # weight of the penalty on strength and tightness
    weight_decay: NonNegative = 0.01  # of actor and critic
    age_weighting: bool = True  # draw what was played long ago ever more rarely


def symmetric_loss(error: Tensor) -> Tensor:
    """`e tanh(e / 2)` `(...)`: half a square near 0, the absolute value far out."""
    return error * (error / 2).tanh()


def rising_gain(advantage: Tensor) -> Tensor:
    """`|u| tanh(u / 2)` `(...)`: as `symmetric_loss` in size, with the sign of u."""
    return advantage.abs() * (advantage / 2).tanh()


def action_penalty_loss(strength: Tensor, tightness: Tensor) -> Tensor:
    """Penalty `(...)` of strength S and tightness K, both in (0, 1).

    `2 atanh(S ** (1 / K)) + K S log S + 2 atanh(K ** 2)`: infinite at S = 1, from S near 0 on if K is near 1 and only
    close to 1 if K is small. K in the exponent is a constant; it grows by the middle term alone.
    """
    early = strength ** (1 / tightness.detach())
    return 2 * early.atanh() + tightness * strength * strength.log() + 2 * tightness.square().atanh()


def age_quantile(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Places in [0, 1), from the oldest to the newest slot, of density `tanh((pi x) ** e)`, at points of its mass.

    The newer half is drawn all but evenly, the oldest tenth hardly ever, as in Symphony's fading replay.
    """
    return np.interp(uniform, _FADED / _FADED[-1], _AGES)


class RewardScaler(nn.Module):
    """Size of the rewards, set by the first batch that has any, and the running average of the values."""

    reward: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reward", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))

    def scaled(self, reward: Tensor) -> Tensor:
        """Rewards `(B,)` in units of their mean size."""
        self.reward.copy_(torch.where(self.reward == 0, reward.abs().mean(), self.reward))
        return reward / torch.where(self.reward == 0, torch.ones_like(self.reward), self.reward)

    def advantage(self, value: Tensor) -> Tensor:
        """Relative lead `(B,)` of each value over the average, which moves towards the values."""
        average = GOLDEN * self.average + (1 - GOLDEN) * value.detach()
        self.average.copy_(average.mean())
        return (value - average) / average.abs().clamp(min=FLOOR)


class Symphony(OffPolicy):
    """Swaddled actor, sorted critic, fading memory."""

    name = "symphony"
    config_class = SymphonyConfig
    data_source = "replay"
    heads = ("swaddled",)
    reference = "ishuov2025symphony"
    uses_full_ensemble = True
    critic: WeightedQuantileQ
    target_critic: WeightedQuantileQ

    def __init__(self, config: SymphonyConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a swaddled `policy`."""
        if not isinstance(policy, SwaddledPolicy):
            raise UserError(f"Symphony trains a policy of limited strength, got '{policy.name}'; pass policy=swaddled.")
        super().__init__(config, policy, total_updates=total_updates)
        self.config: SymphonyConfig = config
        self.policy: SwaddledPolicy = policy
        self.scaler = RewardScaler()
        self.optimizer = self._adam(policy, config.lr)
        self.critic_optimizer = self._adam(self.critic, config.critic_lr)

    def _adam(self, module: nn.Module, lr: float) -> torch.optim.Optimizer:
        decay = self.config.weight_decay
        return torch.optim.AdamW(module.parameters(), lr=lr, betas=(GOLDEN, 0.995), weight_decay=decay, fused=True)

    def make_critic(self) -> WeightedQuantileQ:
        """Several networks of many nodes."""
        return WeightedQuantileQ(self.config.critic, self.policy, nodes=self.config.nodes)

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """As every algorithm, from a fading memory."""
        return replace(super().sample_spec, age_quantile=age_quantile if self.config.age_weighting else None)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Uniform over the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """Scaled reward and value of the next observation at a noisy action."""
        chunk, _, _ = self.policy.rsample(batch.next_obs, generator=self.generator)
        return self.scaler.scaled(batch.reward) + batch.discount * self.target_critic.min_q(batch.next_obs, chunk)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Every node follows the same target; averaged over nodes and batch."""
        nodes = self.critic.nodes(batch.obs, batch.chunk)
        with torch.no_grad():
            target = self.target(batch)
        error = nodes - target.unsqueeze(1)
        loss = (symmetric_loss(error).mean(1) * batch.weight).mean()
        info = {"value": nodes.mean(), "target": target.mean(), "reward_unit": self.scaler.reward}
        return loss, {**info, "td_errors": error.detach().abs().mean(1)}

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Penalty minus the gain of the next observation's value over its average, and what to log."""
        chunk, strength, tightness = self.policy.rsample(batch.next_obs, generator=self.generator)
        gain = rising_gain(self.scaler.advantage(self.target_critic.min_q(batch.next_obs, chunk))).mean()
        executed = slice(self.policy.spec.action_horizon)
        penalty = action_penalty_loss(strength[:, executed], tightness[:, executed]).mean()
        loss = self.config.action_penalty * penalty - gain
        return loss, {"gain": gain, "swaddling": penalty, "strength": strength.mean()}

    def update(self, batch: Transitions) -> Metrics:
        """Critic steps on consecutive minibatches, steps of the actor in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                stats.actor(loss=loss, **info)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the units and the optimiser of the actor."""
        return {**super().checkpoint_items(), "units": self.scaler, "optimizer": self.optimizer}
