"""HNPG: on-policy policy gradient with a hybrid critic and states of an offline dataset (Zhou et al. 2023).

A Q network fits two targets: the returns of the rollout, and the Bellman equation of the policy on a dataset. The
policy improves in states of the rollout, as in PPO, and in states of the dataset, at its own actions, whose advantage
is Q minus the mean of Q. Good data leads to rewards that exploration would not find. In states that both cover, the
returns of the rollout correct Q.

Use it from scratch with demonstrations, or with data of any quality, where steps are cheap. It has PPO's safety and a
better start. With few steps prefer replay (`rlpd`, `cal_ql`). Data should cover the states and actions of a good
policy.

Deviations from the public code: one stationary PPO update (the code: a TRPO step for each step of a finite horizon);
the Bellman target is a copy of Q per pass (the code solves backwards in time); the baseline of the rollout is a value
network that also regresses the mean of Q at the states of the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, flatten, minibatches
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.constraints import Positive, PositiveInt
from robopolicy.contrib.control.hybrid_rollout import HybridRollout
from robopolicy.contrib.control.props import concat_rows
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import ReplaySampleSpec, Rollout, Transitions
from robopolicy.device import random_order
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class HNPGConfig(PPOConfig):
    """Settings of HNPG; settings of PPO apply to its updates."""

    offline_batch: PositiveInt = 2048  # windows of the dataset per update
    q: CriticConfig = field(default_factory=CriticConfig)  # the Q network
    q_lr: Positive = 3e-4  # Adam learning rate of Q
    q_epochs: PositiveInt = 4  # passes of Q over rollout and windows; each is a step of value iteration on the dataset
    value_samples: PositiveInt = 10  # actions whose mean Q is the value of a state of the dataset


class HNPG(PPO):
    """PPO with a hybrid critic, in states of the rollout and of a dataset."""

    name = "hnpg"
    config_class = HNPGConfig
    data_source = "hybrid"
    heads = ("decisions",)
    reference = "zhou2023hnpg"
    distributed = False
    needs_dataset = True
    supports_recurrent = False  # a dataset holds no hidden states
    supports_overlap = False  # its source adds data of a dataset to every rollout
    config: HNPGConfig

    def __init__(self, config: HNPGConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        self.q = QEnsemble(config.q, policy)
        self.q_target: QEnsemble = frozen_copy(self.q)
        self.q_optimizer = torch.optim.Adam(self.q.parameters(), lr=config.q_lr, fused=True)
        self._q_loss = 0.0  # of the last minibatch

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows to draw from the dataset."""
        spec = self.policy.spec
        return ReplaySampleSpec(
            self.config.offline_batch, spec.horizon, spec.action_horizon, self.config.gamma, spec.obs_horizon
        )

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk and record it for Q."""
        sample = super().act(obs, generator=generator)
        return Sample(sample.chunk, sample.record | {"chunk": sample.chunk}, sample.logp)

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Fit Q to both; return the rollout's decisions with GAE, and decisions in dataset states, scored by Q."""
        assert isinstance(batch, HybridRollout)
        online = super().process_rollout(batch)
        self._fit_q(online, batch.offline)
        offline = self._offline_rows(batch.offline.obs)
        record = {key: online.record[key] for key in offline.record}
        return concat_rows([replace(online, record=record), offline])

    def _fit_q(self, online: RolloutBatch, offline: Transitions) -> None:
        """Fit Q in several passes; each minibatch holds equal fractions of the dataset and of the rollout."""
        config, loss = self.config, torch.zeros(())
        for _ in range(config.q_epochs):
            self.q_target.load_state_dict(self.q.state_dict())
            target = self.bellman_target(offline)
            order = random_order(len(target), self.generator)
            count = -(-len(online) // config.batch_size)
            parts = order.repeat(-(-count // len(order))).tensor_split(count)  # repeated if the dataset is small
            batches = minibatches(online, config.batch_size, self.generator)
            for (rows, _), part in zip(batches, parts, strict=True):
                obs = {key: value[part] for key, value in offline.obs.items()}
                errors = self.q(rows.obs, rows.record["chunk"]) - rows.value_target  # (M, B)
                residuals = self.q(obs, offline.chunk[part]) - target[part]
                loss = errors.square().mean() + residuals.square().mean()
                self.q_optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.q_optimizer.step()
        self._q_loss = float(loss.detach())

    def update(self, batch: Rollout) -> Metrics:
        """Update PPO on all rows."""
        metrics = super().update(batch) | {"critic/q_loss": self._q_loss}
        self.q.encoder.update_stats(flatten(batch.obs))
        return metrics

    @torch.no_grad()
    def bellman_target(self, offline: Transitions) -> Tensor:
        """`r + gamma^n Q(s', a')` `(B,)` of the target copy, with a' drawn from the policy."""
        drawn = self.policy.sample(offline.next_obs, generator=self.generator)
        bootstrap = self.q_target(offline.next_obs, drawn.chunk).mean(0)
        return self.reward_normalizer.factor * offline.reward + offline.discount * bootstrap

    @torch.no_grad()
    def _offline_rows(self, obs: Observation) -> RolloutBatch:
        """Draw a decision of the policy in each state `obs` `(B, To, ...)`; its advantage is Q minus the mean of Q."""
        count = self.config.value_samples
        sample = self.policy.sample(obs, generator=self.generator)
        repeated = {key: value.repeat_interleave(count, 0) for key, value in obs.items()}
        others = self.policy.sample(repeated, generator=self.generator).chunk.unflatten(0, (-1, count))
        value = self.q.candidate_values(obs, others).mean((0, 2))  # (B,)
        advantage = self.q(obs, sample.chunk).mean(0) - value
        return RolloutBatch(obs, sample.record, sample.logp, advantage, value, self.critic(obs))

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of PPO, Q and its optimiser."""
        return {**super().checkpoint_items(), "q": self.q, "q_optimizer": self.q_optimizer}
