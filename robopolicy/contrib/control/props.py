"""PROPS: PPO with a behavior policy that reduces the sampling error of kept rollouts (Corrado and Hanna 2023).

A finite sample under-represents some of the policy's actions and over-represents others. PROPS acts with a behavior
policy: a copy of the policy that is pushed away from the actions of the kept rollouts, within bounds. New data then
fills the gaps, and rollouts of earlier policies can be kept and used for further updates.

Use it where few decisions are made per update: a real robot, a handful of environments. With thousands of environments
the sampling error is small, and PPO is cheaper.

Every `every` decisions the copy is reset and minimises `mean max(r, 1 - eps) + m / n KL(policy || copy)` over the n
decisions of the kept rollouts and of this one, with r its ratio to the policy and m the number of decisions until the
next push. To first order, m decisions of the minimiser move the mean of all n + m to the policy's mean, so the push
matches the gap.

Deviations from the public code: advantages are computed for every kept rollout (the code: for the newest only); the KL
is enabled, by the draws of the policy, and weighted as above (the code: commented out); a push takes steps on all
decisions while its loss falls (the code: epochs of minibatches, whose noise exceeds the gap once decisions are many).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Metrics, frozen_copy
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, flatten
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.constraints import OpenFraction, Positive, PositiveInt, Validated
from robopolicy.core.regularizers import k3
from robopolicy.data.batches import Rollout
from robopolicy.device import move
from robopolicy.policies.base import Observation, Policy, Record, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class BehaviourConfig(Validated):
    """Push of the behavior policy."""

    every: PositiveInt = 8  # decisions per environment between two pushes
    bound: OpenFraction = 0.3  # eps: actions are pushed down to the ratio 1 - eps at most
    target_kl: Positive = 0.1  # stop when the approximate KL to the policy exceeds this value
    kl_coef: Positive = 1.0  # weight of the KL of the policy to its copy, multiplied by m / n
    lr: Positive = 1e-3  # Adam learning rate
    steps: PositiveInt = 16  # maximum number of steps of a push


@dataclass(frozen=True)
class PROPSConfig(PPOConfig):
    """Settings of PROPS; settings of PPO apply to its updates."""

    num_kept_batches: PositiveInt = 2  # b, newest rollouts that an update uses
    behaviour: BehaviourConfig = BehaviourConfig()  # the acting policy


def push_loss(change: Tensor, bound: float) -> Tensor:
    """`max(r, 1 - eps)` of log-ratios `(B,)`: decreases with the ratio down to its bound."""
    return change.exp().clamp(min=1 - bound)


def concat_rows(parts: list[RolloutBatch]) -> RolloutBatch:
    """Concatenate the rows."""

    def cat(trees: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {key: torch.cat([tree[key] for tree in trees]) for key in trees[0]}

    names = ("logp", "advantage", "value_target", "value")
    values = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return RolloutBatch(cat([part.obs for part in parts]), cat([part.record for part in parts]), **values)


class PROPS(PPO):
    """PPO on several kept rollouts, collected by a pushed copy of the policy."""

    name = "props"
    config_class = PROPSConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "corrado2023props"
    distributed = False
    supports_recurrent = False  # kept rollouts have no order in time
    supports_overlap = False  # `act` trains the behavior policy
    config: PROPSConfig

    def __init__(self, config: PROPSConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        self.behavior_policy: Policy = frozen_copy(policy)
        self.kept_batches: list[Rollout] = []  # earlier rollouts
        self.executed: list[tuple[Observation, Record]] = []  # decisions of this rollout
        self.pushes: list[float] = []  # approximate KL of the copy to the policy after each push of this rollout

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk from the behavior policy, and push it first if due."""
        if len(self.executed) % self.config.behaviour.every == 0:
            self._update_behavior_policy(next(iter(obs.values())).shape[0] * self.config.behaviour.every)
        sample = self.behavior_policy.sample(obs, generator=generator)
        self.executed.append((obs, sample.record))
        return sample

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Score all kept decisions with the current policy and critic."""
        rows = concat_rows([super(PROPS, self).process_rollout(rollout) for rollout in [*self.kept_batches, batch]])
        with torch.no_grad():
            return replace(rows, logp=self.policy.decisions(rows.obs, rows.record).logp)

    def update(self, batch: Rollout) -> Metrics:
        """Update PPO on the kept rollouts; the next rollout starts with a new copy."""
        metrics = super().update(batch) | {"behaviour/kl": fmean(self.pushes or [0.0])}
        self.kept_batches = (
            [*self.kept_batches, batch][-(self.config.num_kept_batches - 1) :]
            if self.config.num_kept_batches > 1
            else []
        )
        self.executed, self.pushes = [], []
        return metrics

    @torch.enable_grad()
    def _update_behavior_policy(self, due: int) -> None:
        """Copy the policy, and push the copy away from the executed actions, for the next `due` decisions."""
        self.behavior_policy.load_state_dict(self.policy.state_dict())
        parts = [(flatten(rollout.obs), flatten(rollout.record)) for rollout in self.kept_batches] + self.executed
        if not parts:
            return
        obs, record = ({key: torch.cat([part[i][key] for part in parts]) for key in parts[0][i]} for i in range(2))
        with torch.no_grad():
            logp = self.policy.decisions(obs, record).logp.sum(1)
            drawn = self.policy.sample(obs, generator=self.generator)
        config, least, reached = self.config.behaviour, torch.inf, 0.0
        weights = list(self.behavior_policy.requires_grad_(True).parameters())
        optimizer = torch.optim.Adam(weights, lr=config.lr)
        before = [weight.detach().clone() for weight in weights]
        for step in range(config.steps + 1):
            change = self.behavior_policy.decisions(obs, record).logp.sum(1) - logp
            apart = self.behavior_policy.decisions(obs, drawn.record).logp.sum(1) - drawn.logp.sum(1)
            kl = k3(-apart).mean()
            loss = push_loss(change, config.bound).mean() + config.kl_coef * due / len(logp) * kl
            if loss.item() >= least or kl.item() > config.target_kl:  # the last step went too far
                for weight, value in zip(weights, before, strict=True):
                    weight.data.copy_(value)
                break
            least, reached = loss.item(), kl.item()
            if step == config.steps:
                break
            before = [weight.detach().clone() for weight in weights]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        self.behavior_policy.requires_grad_(False)
        self.pushes.append(reached)

    def state_dict(self) -> dict[str, Any]:
        """States of all items, and the kept rollouts."""
        return {**super().state_dict(), "kept": [vars(rollout) for rollout in self.kept_batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.kept_batches = [move(Rollout(**rollout), self.policy.device) for rollout in state["kept"]]
