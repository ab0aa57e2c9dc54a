"""On-policy algorithms with a separate value for every reward term: the base of HAMNet and of constrained PPO.

A simulator may report the terms of its reward (`Step.info["reward.NAME"]`, `Rollout.terms`). The rest of the reward is
one more term, the last. A `RolloutBatch` then holds `(B, R)` advantages, values and targets.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from robopolicy.algorithms.common.on_policy import value_loss
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, flatten
from robopolicy.algorithms.ppo import PPO
from robopolicy.contrib.control.vector_value import TermValues
from robopolicy.core.returns import chunk_discount, gae
from robopolicy.data.batches import Rollout
from robopolicy.errors import unknown_name


class MultiRewardCritic(PPO):
    """PPO with GAE and value regression of R reward terms; `make_critic` returns a critic of R values."""

    critic: TermValues

    @abstractmethod
    def named_terms(self) -> tuple[str, ...]:
        """Reward terms that have a value of their own."""

    def rewards(self, batch: Rollout) -> Tensor:
        """Reward terms `(T, N, R)` that sum to the reward; terms of a diverged step are 0.

        Raises:
            UserError: The simulator does not report a named term.
        """
        parts: list[Tensor] = []
        for name in self.named_terms():
            if name not in batch.terms:
                raise unknown_name("reward term", name, batch.terms, f"in algorithm={self.name}")
            parts.append(batch.terms[name].nan_to_num(0.0, 0.0, 0.0))
        rest = batch.reward - sum(parts, torch.zeros_like(batch.reward))
        return torch.stack([*parts, rest], -1)

    @torch.no_grad()
    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Compute GAE separately for every term."""
        (steps, envs), obs, value = batch.shape, flatten(batch.obs), self.critic.by_term
        values = value(obs).view(steps, envs, -1)  # (T, N, R)
        successor = torch.cat([values[1:], value(batch.last_obs).unsqueeze(0)])
        successor[batch.truncated & ~batch.terminated] = value(batch.final_obs)

        def wide(x: Tensor) -> Tensor:  # one column per environment and term
            return x.unsqueeze(-1).expand(values.shape).flatten(1)

        advantage, target = gae(
            self.reward_normalizer(self.rewards(batch)).flatten(1),
            values.flatten(1),
            successor.flatten(1),
            wide(batch.terminated),
            wide(batch.truncated),
            wide(chunk_discount(self.config.gamma, batch.steps)),
            self.config.gae_lambda,
        )
        if batch.weight is not None:
            advantage = advantage * wide(batch.weight)
        parts = (x.view(steps * envs, -1) for x in (advantage, target, values))
        return RolloutBatch(obs, flatten(batch.record), batch.logp.flatten(0, 1), *parts)

    def critic_loss(self, rows: RolloutBatch) -> Tensor:
        """Regression loss of all values."""
        return value_loss(self.critic.by_term(rows.obs), rows, self.config.value_clip)
