"""Optimistic actor-critic with rare critic switches (after Tan et al. 2025).

The algorithm adds three ideas from a theory of sample efficiency to soft actor-critic. The targets of the critics use
the best chunk of the next observation instead of the policy's, so they do not depend on the acting policy. The actor
maximises an upper quantile of the ensemble, which is high where the members have little data. The actor uses a kept
copy of the critic, which is replaced only when it fits the data clearly worse than the current one; the policy is then
reset to its initial weights.

Use it where rewards are rare and out of reach of random exploration, with few action dimensions and cheap episodes.
With a dataset the critics can learn from it first (`replay.offline_updates`), and optimism can be disabled
(`quantile=0.5`). It is not made for the last percent of performance: after a switch the policy is poor for a while, as
the evaluations show. Bound the values (`critic.bins`, `value_min`, `value_max`) where targets diverge.

Reconstructed from the abstract. Own choices: an ensemble (the paper: the set of all critics that fit), members with
separate targets, the best of a few drawn chunks (the paper: a maximum), and soft actor-critic (the paper: exponential
weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.common.off_policy import UpdateStats, optimizer_step
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.constraints import (
    FractionBelowOne,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
)
from robopolicy.contrib.control.optimism import LazyUpdate, upper_value
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.noise import uniform


@dataclass(frozen=True)
class OptimisticACConfig(SACConfig):
    """Settings of the optimistic actor-critic; all defaults are our own."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(members=5, hidden=(256, 256), activation="relu", layer_norm=True)
    )
    temperature: Positive = 0.1  # initial weight of the entropy
    quantile: PositiveFraction = 0.9  # quantile of the ensemble that the actor maximises; 1 is the maximum
    candidates: PositiveInt = 8  # chunks drawn from the bounds for every target, in addition to one of the policy
    factor: Positive = 2.0  # ratio of the kept critic's Bellman error to the current one's at which it is replaced
    switch_margin: NonNegative = 0.01  # additional excess that is allowed, in squared units of value
    memory: FractionBelowOne = 0.99  # fraction of the average errors that every actor step keeps
    min_switch_interval: NonNegativeInt = 1000  # minimum number of actor steps between two switches

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused("optimistic_ac", self, "average_members")
        if not self.backup_entropy:
            raise UserError(
                "The targets of optimistic_ac are values of the best chunks and never contain entropy, so "
                "algorithm.backup_entropy=false has no effect; leave it out."
            )


def best_next(critic: QEnsemble, batch: Transitions, chunks: Tensor) -> Tensor:
    """Bellman targets `(M, B)`, separate for each member, at its best chunk of `(B, C, H, A)`."""
    return batch.reward + batch.discount * critic.candidate_values(batch.next_obs, chunks).amax(-1)


def bellman_error(critic: QEnsemble, batch: Transitions, chunks: Tensor, quantile: float) -> Tensor:
    """Mean squared Bellman error of an optimistic value, at the best of `chunks` `(B, C, H, A)`."""
    value = upper_value(critic(batch.obs, batch.chunk), quantile)
    ahead = upper_value(critic.candidate_values(batch.next_obs, chunks), quantile).amax(-1)
    return (value - batch.reward - batch.discount * ahead).square().mean()


class OptimisticAC(SAC):
    """SAC that maximises an optimistic critic, switches it rarely, and then resets the actor."""

    name = "optimistic_ac"
    config_class = OptimisticACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "tan2025actorcritics"
    uses_full_ensemble = True
    config: OptimisticACConfig

    def __init__(self, config: OptimisticACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`, whose initial weights return at every switch."""
        super().__init__(config, policy, total_updates=total_updates)
        self.start: Policy = frozen_copy(self.policy)
        self.kept: QEnsemble = frozen_copy(self.critic)  # the critic that the actor maximises
        self.switch = LazyUpdate(
            config.factor,
            config.switch_margin,
            memory=config.memory,
            min_switch_interval=config.min_switch_interval,
        )

    def candidates(self, batch: Transitions) -> Tensor:
        """Chunks `(B, C + 1, H, A)` for the next observations: one of the policy, the others from the bounds."""
        own = self.policy.act(batch.next_obs, generator=self.generator).unsqueeze(1)
        shape = (len(own), self.config.candidates, *own.shape[2:])
        drawn = 2 * uniform(shape, self.generator, own.device) - 1
        return torch.cat([own, self.policy.action_normalizer.denormalize(drawn)], 1)

    def target(self, batch: Transitions) -> Tensor:
        """Targets `(M, B)`; every member of the target ensemble maximises separately."""
        return best_next(self.target_critic, batch, self.candidates(batch))

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """`alpha log pi` minus the optimistic value of the kept critic, at the actor's draws."""
        chunk, logp = self.policy.rsample(batch.obs, generator=self.generator)
        value = upper_value(self.kept(batch.obs, chunk), self.config.quantile)
        return (alpha * logp - value).mean(), logp, {"optimism": value.detach().mean()}

    def update(self, batch: Transitions) -> Metrics:
        """Update as in SAC; before every actor step replace the kept critic if it is due."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                errors = self.switch_critic(part)
                alpha = self.temperature.value
                loss, logp, info = self.actor_loss(part, alpha)
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha, **info, **errors)
        return self.finish(batch, stats)

    def switch_critic(self, batch: Transitions) -> Info:
        """Compare the Bellman errors of the kept and the current critic, and switch if it is due; return the log."""
        with torch.no_grad(), evaluation_mode(self.critic):
            chunks, quantile = self.candidates(batch), self.config.quantile
            kept, current = (bellman_error(critic, batch, chunks, quantile) for critic in (self.kept, self.critic))
        if self.switch.due(float(kept), float(current)):
            self.reset_actor()
        return {"kept_error": kept, "current_error": current, "switches": torch.tensor(float(self.switch.changes))}

    @torch.no_grad()
    def reset_actor(self) -> None:
        """Maximise the current critic from now on, starting from the initial policy; observation statistics stay."""
        self.kept.load_state_dict(self.critic.state_dict())
        for mine, first in zip(self.policy.parameters(), self.start.parameters(), strict=True):
            mine.copy_(first)
        self.optimizer.state.clear()

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of SAC, the initial policy, the kept critic and the switch."""
        return {**super().checkpoint_items(), "start": self.start, "kept": self.kept, "switch": self.switch}
