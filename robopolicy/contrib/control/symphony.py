"""Symphony: bounded actions with weak noise, age-weighted replay and a pessimistic critic (Ishuov et al. 2025).

The algorithm has three ideas for learning on the robot itself. The policy executes `tanh(S A + n)` with a weak bounded
noise; a penalty on the strength S grows steeply near 1, and the network chooses with a tightness K how early
("swaddling" in the paper). Replay draws older transitions with decreasing probability. The value is a weighted mean of
the sorted outputs of several critics, with the largest weights on the lowest. The actor maximises the value of the
*next* observation minus its running average, in units of this average.

Use it with dense rewards where jerky actions have a cost. For the highest return in a simulator use sac. The value must
not stay near 0, because it is divided by its average: shift the reward if it does.

The formulas follow the public code, version S3. Deviations: actor and critic step in sequence, with separate draws;
Adam corrects its bias; the warm-up data is not repeated fifty times; networks have this library's activations, not one
with learned frequencies; the unit of the values has a minimum. Rewards are divided by their mean absolute value in the
first batch (the code: in the warm-up). Actions come in chunks as in SAC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.off_policy import OffPolicy, OffPolicyConfig, UpdateStats, optimizer_step
from robopolicy.constraints import NonNegative, Positive, PositiveInt, Ratio
from robopolicy.contrib.control.symphony_policy import SymphonyPolicy
from robopolicy.contrib.control.weighted_quantile_q import WeightedQuantileQ
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

GOLDEN = (5**0.5 - 1) / 2  # weight of the past in running averages and in Adam's momentum
FLOOR = 1e-3  # smallest unit of the values

_AGES = np.linspace(0, 1, 4097)  # from the oldest to the newest slot
_FADED = np.concatenate([[0.0], np.cumsum(np.tanh((math.pi * (_AGES[1:] + _AGES[:-1]) / 2) ** math.e))])


@dataclass(frozen=True)
class SymphonyConfig(OffPolicyConfig):
    """Settings of Symphony; defaults are the public code's except the actor's width (docs/methods/off_policy.md)."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(members=3, hidden=(512, 512)))
    batch_size: PositiveInt = 384  # windows per gradient step
    utd: Ratio = 3.0  # critic steps per decision of one environment
    lr: Positive = 1e-4  # learning rate of the actor
    critic_lr: Positive = 1e-4  # learning rate of the critic
    nodes: PositiveInt = 128  # outputs of each critic
    action_penalty: NonNegative = 1.0  # weight of the penalty on strength and tightness
    weight_decay: NonNegative = 0.01  # of actor and critic
    age_weighting: bool = True  # draw older transitions with decreasing probability


def symmetric_loss(error: Tensor) -> Tensor:
    """`e tanh(e / 2)` `(...)`: half a square near 0, the absolute value for large errors."""
    return error * (error / 2).tanh()


def rising_gain(advantage: Tensor) -> Tensor:
    """`|u| tanh(u / 2)` `(...)`: the size of `symmetric_loss` with the sign of u."""
    return advantage.abs() * (advantage / 2).tanh()


def action_penalty_loss(strength: Tensor, tightness: Tensor) -> Tensor:
    """Penalty `(...)` of strength S and tightness K, both in (0, 1).

    `2 atanh(S ** (1 / K)) + K S log S + 2 atanh(K ** 2)`: infinite at S = 1; it starts at S near 0 if K is near 1 and
    only close to 1 if K is small. K in the exponent is a constant; only the middle term increases it.
    """
    early = strength ** (1 / tightness.detach())
    return 2 * early.atanh() + tightness * strength * strength.log() + 2 * tightness.square().atanh()


def age_quantile(uniform: Tensor) -> Tensor:
    """Positions in [0, 1), from the oldest to the newest slot, of density `tanh((pi x) ** e)`, at quantiles `uniform`.

    The newer half is drawn almost evenly, the oldest tenth hardly ever, as in Symphony's fading replay.
    """
    ages, mass = _age_table(uniform.device)
    upper = torch.searchsorted(mass, uniform, right=True).clamp(max=len(mass) - 1)
    age, below = ages[upper - 1], mass[upper - 1]
    return (ages[upper] - age) / (mass[upper] - below) * (uniform - below) + age


@cache
def _age_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions and their cumulative distribution, copied to the device once."""
    return torch.from_numpy(_AGES).to(device), torch.from_numpy(_FADED / _FADED[-1]).to(device)


class RewardScaler(nn.Module):
    """Scale of the rewards, set by the first batch with nonzero rewards, and running average of the values."""

    reward: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reward", torch.zeros(()))
        self.register_buffer("average", torch.zeros(()))

    def scaled(self, reward: Tensor) -> Tensor:
        """Rewards `(B,)` in units of their mean absolute value."""
        self.reward.copy_(torch.where(self.reward == 0, reward.abs().mean(), self.reward))
        return reward / torch.where(self.reward == 0, torch.ones_like(self.reward), self.reward)

    def advantage(self, value: Tensor) -> Tensor:
        """Relative advantage `(B,)` of each value over the average, which is updated."""
        average = GOLDEN * self.average + (1 - GOLDEN) * value.detach()
        self.average.copy_(average.mean())
        return (value - average) / average.abs().clamp(min=FLOOR)


class Symphony(OffPolicy):
    """Symphony: an actor with penalised strength, a critic of sorted quantiles and age-weighted replay."""

    name = "symphony"
    config_class = SymphonyConfig
    data_source = "replay"
    heads = ("swaddled",)
    reference = "ishuov2025symphony"
    uses_full_ensemble = True
    critic: WeightedQuantileQ
    target_critic: WeightedQuantileQ

    def __init__(self, config: SymphonyConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a `swaddled` policy."""
        if not isinstance(policy, SymphonyPolicy):
            raise UserError(f"Symphony trains a policy of limited strength, got '{policy.name}'; pass policy=swaddled.")
        super().__init__(config, policy, total_updates=total_updates)
        self.config: SymphonyConfig = config
        self.policy: SymphonyPolicy = policy
        self.scaler = RewardScaler()
        self.optimizer = self._adam(policy, config.lr)
        self.critic_optimizer = self._adam(self.critic, config.critic_lr)

    def _adam(self, module: nn.Module, lr: float) -> torch.optim.Optimizer:
        decay = self.config.weight_decay
        return torch.optim.AdamW(module.parameters(), lr=lr, betas=(GOLDEN, 0.995), weight_decay=decay, fused=True)

    def make_critic(self) -> WeightedQuantileQ:
        """Build several networks of many outputs."""
        return WeightedQuantileQ(self.config.critic, self.policy, nodes=self.config.nodes)

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows of the shared specification, with age-weighted sampling."""
        return replace(super().sample_spec, age_quantile=age_quantile if self.config.age_weighting else None)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """Scaled reward and value of the next observation at a noisy action."""
        chunk, _, _ = self.policy.rsample(batch.next_obs, generator=self.generator)
        return self.scaler.scaled(batch.reward) + batch.discount * self.target_critic.min_q(batch.next_obs, chunk)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Loss of every output to the same target, averaged over outputs and batch."""
        nodes = self.critic.nodes(batch.obs, batch.chunk)
        with torch.no_grad():
            target = self.target(batch)
        error = nodes - target.unsqueeze(1)
        loss = (symmetric_loss(error).mean(1) * batch.weight).mean()
        info = {"value": nodes.mean(), "target": target.mean(), "reward_unit": self.scaler.reward}
        return loss, {**info, "td_errors": error.detach().abs().mean(1)}

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Penalty minus the gain of the next observation's value over its average, and the log."""
        chunk, strength, tightness = self.policy.rsample(batch.next_obs, generator=self.generator)
        gain = rising_gain(self.scaler.advantage(self.target_critic.min_q(batch.next_obs, chunk))).mean()
        executed = slice(self.policy.spec.action_horizon)
        penalty = action_penalty_loss(strength[:, executed], tightness[:, executed]).mean()
        loss = self.config.action_penalty * penalty - gain
        return loss, {"gain": gain, "swaddling": penalty, "strength": strength.mean()}

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with steps of the actor in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                stats.actor(loss=loss, **info)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared items, the scaler and the optimiser of the actor."""
        return {**super().checkpoint_items(), "units": self.scaler, "optimizer": self.optimizer}
