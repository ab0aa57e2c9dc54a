"""HNPG: on-policy policy gradient with a critic and states from offline data beside it (Zhou et al. 2023).

A Q network fits two things at once: the returns of what was just played, and the Bellman equation of the policy on a
dataset. The policy then improves where it plays, as in PPO, and in states of the dataset, at actions of its own that Q
judges against their mean. Good data shows the way to rewards that play would never find; where the data lies, the
returns of play keep Q and policy honest.

Use it from scratch with demonstrations, or with data of any quality, where steps are cheap: PPO's safety with a start
that it lacks. With few steps prefer replay (`rlpd`, `cal_ql`). Data should cover what a good policy does.

Deviations from the public code: one PPO update for all times in place of a TRPO step for each step of a finite
horizon; the Bellman target is a copy of Q per pass, where the code solves backwards in time; the baseline of what was
played is a value network that also regresses the mean of Q at the states of the dataset.
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
from robopolicy.contrib.control.props import joined
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import ReplaySampleSpec, Rollout, Transitions
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class HNPGConfig(PPOConfig):
    """Settings of HNPG; those of PPO hold for its updates."""

    offline_batch: PositiveInt = 2048  # windows of the dataset per update
    q: CriticConfig = field(default_factory=CriticConfig)  # network that judges actions
    q_lr: Positive = 3e-4  # its Adam learning rate
    q_epochs: PositiveInt = (
        4  # its passes over rollout and windows; each one is a step of value iteration on the dataset
    )
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
    supports_recurrent = False  # a dataset holds no memories
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
        """Draw a chunk and note it for Q."""
        sample = super().act(obs, generator=generator)
        return Sample(sample.chunk, sample.record | {"chunk": sample.chunk}, sample.logp)

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Fit Q to both; return played decisions with GAE, and decisions in states of the dataset that Q judges."""
        assert isinstance(batch, HybridRollout)
        played = super().process_rollout(batch)
        self._fit_q(played, batch.offline)
        offline = self._judged(batch.offline.obs)
        record = {key: played.record[key] for key in offline.record}
        return joined([replace(played, record=record), offline])

    def _fit_q(self, played: RolloutBatch, offline: Transitions) -> None:
        """Several passes; in each minibatch as large a share of the dataset as of the rollout."""
        config, loss = self.config, torch.zeros(())
        for _ in range(config.q_epochs):
            self.q_target.load_state_dict(self.q.state_dict())
            target = self.bellman_target(offline)
            order = torch.randperm(len(target), generator=self.generator).to(target.device)
            count = -(-len(played) // config.batch_size)
            parts = order.repeat(-(-count // len(order))).tensor_split(count)  # again where there are few
            batches = minibatches(played, config.batch_size, self.generator)
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
        """PPO on all rows."""
        metrics = super().update(batch) | {"critic/q_loss": self._q_loss}
        self.q.encoder.update_stats(flatten(batch.obs))
        return metrics

    @torch.no_grad()
    def bellman_target(self, offline: Transitions) -> Tensor:
        """`r + gamma^n Q(s', a')` `(B,)` of the target copy, with a' of the policy."""
        drawn = self.policy.sample(offline.next_obs, generator=self.generator)
        bootstrap = self.q_target(offline.next_obs, drawn.chunk).mean(0)
        return self.reward_normalizer.factor * offline.reward + offline.discount * bootstrap

    @torch.no_grad()
    def _judged(self, obs: Observation) -> RolloutBatch:
        """A decision of the policy in each state `obs` `(B, To, ...)`, its advantage Q minus the mean of Q."""
        count = self.config.value_samples
        sample = self.policy.sample(obs, generator=self.generator)
        repeated = {key: value.repeat_interleave(count, 0) for key, value in obs.items()}
        others = self.policy.sample(repeated, generator=self.generator).chunk.unflatten(0, (-1, count))
        value = self.q.candidate_values(obs, others).mean((0, 2))  # (B,)
        advantage = self.q(obs, sample.chunk).mean(0) - value
        return RolloutBatch(obs, sample.record, sample.logp, advantage, value, self.critic(obs))

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """PPO's parts, Q and its optimiser."""
        return {**super().checkpoint_items(), "q": self.q, "q_optimizer": self.q_optimizer}
