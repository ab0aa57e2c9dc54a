"""On-policy learners with a value for every part of the reward: HAMNet's, and those of constraints.

A simulator may say which parts its reward has (`Step.info["reward.NAME"]`, `Rollout.terms`). What the named ones leave
of the reward is one more part, the last. A `RolloutBatch` then holds `(B, R)` advantages, values and targets.
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
    """PPO with GAE and value regression of R parts of the reward; `make_critic` gives a critic of R values."""

    critic: TermValues

    @abstractmethod
    def named_terms(self) -> tuple[str, ...]:
        """Parts that have a value of their own."""

    def rewards(self, batch: Rollout) -> Tensor:
        """Parts `(T, N, R)` that add up to the reward; parts of a diverged step are lost with it.

        Raises:
            UserError: The simulator does not show a part that is named.
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
        """GAE of every part by itself."""
        (steps, envs), obs, value = batch.shape, flatten(batch.obs), self.critic.by_term
        values = value(obs).view(steps, envs, -1)  # (T, N, R)
        successor = torch.cat([values[1:], value(batch.last_obs).unsqueeze(0)])
        successor[batch.truncated & ~batch.terminated] = value(batch.final_obs)

        def wide(x: Tensor) -> Tensor:  # one column per environment and part
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
        parts = (x.view(steps * envs, -1) for x in (advantage, target, values))
        return RolloutBatch(obs, flatten(batch.record), batch.logp.flatten(0, 1), *parts)

    def critic_loss(self, rows: RolloutBatch) -> Tensor:
        """Regression of all values."""
        return value_loss(self.critic.by_term(rows.obs), rows, self.config.value_clip)
