"""PMOE on rollouts (Ren et al. 2021): PPO on the density of a mixture, whose router learns which expert is best.

The ratio uses the density of the whole mixture, so no gradient passes through the choice of an expert. In addition a Q
network learns the returns of the rollout. Every expert proposes a chunk in every state, Q selects the best, and the
router regresses the frequency with which each expert is selected (the frequency loss of `pmoe`).

Use it in place of `ppo` on a mixture whose experts should stay distinct, where steps are cheap; elsewhere use `pmoe`.
`ppo` trains the router by the policy gradient only and needs no Q network.

The formulas follow the authors' public code, with the mixture's density in the ratio: the code scores the executed
action under every expert, which does not fit the shapes of its own loss. Deviations: Q is fitted to the rollout before
the actor's epochs, by a separate optimiser (the code: in the same steps), and evaluates fresh draws of all experts (the
code: the executed actions). Rewards are scaled as in `ppo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, flatten, minibatches
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.contrib.control.pmoe import frequency_loss
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.mixture import MixturePolicy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class PMOEPPOConfig(PPOConfig):
    """Settings of PPO, the router and the Q network, whose size is the public code's."""

    router_coef: NonNegative = 1.0  # weight of the frequency loss
    q: CriticConfig = field(
        default_factory=lambda: CriticConfig(members=1, hidden=(64, 64, 64), activation="relu", layer_norm=False)
    )
    q_lr: Positive = 3e-4  # Adam learning rate of Q
    q_epochs: PositiveInt = 10  # passes of Q over each rollout


class PMOEPPO(PPO):
    """PPO for a mixture of experts, with a Q network that trains the router."""

    name = "pmoe_ppo"
    config_class = PMOEPPOConfig
    data_source = "rollout"
    heads = ("mixture", "squashed_mixture")
    reference = "ren2021pmoe"
    distributed = False
    supports_recurrent = False  # Q takes observations only, without hidden states
    config: PMOEPPOConfig
    policy: MixturePolicy

    def __init__(self, config: PMOEPPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a mixture `policy` for `total_updates` rollouts."""
        if not isinstance(policy, MixturePolicy):
            raise UserError(f"PMOE trains a mixture, got '{policy.name}'; pass policy=mixture.")
        super().__init__(config, policy, total_updates=total_updates)
        self.q = QEnsemble(config.q, policy)
        self.q_optimizer = torch.optim.Adam(self.q.parameters(), lr=config.q_lr, fused=True)
        self._q_loss = 0.0  # of the last minibatch

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk and record it for Q."""
        sample = super().act(obs, generator=generator)
        return Sample(sample.chunk, sample.record | {"chunk": sample.chunk}, sample.logp)

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Fit Q to the rows of PPO, and return these."""
        rows = super().process_rollout(batch)
        self._q_loss = self._fit_q(rows)
        return rows

    def update(self, batch: Rollout) -> Metrics:
        """Fit Q, then run the epochs of PPO."""
        metrics = super().update(batch) | {"critic/q_loss": self._q_loss}
        self.q.encoder.update_stats(flatten(batch.obs))
        return metrics

    def _fit_q(self, rows: RolloutBatch) -> float:
        loss = torch.zeros(())
        for _ in range(self.config.q_epochs):
            for part, _ in minibatches(rows, self.config.batch_size, self.generator):
                output = self.q.output(self.q.encode(part.obs), part.record["chunk"])
                loss = self.q.regression(output, part.value_target).mean(1).sum()
                self.q_optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.q_optimizer.step()
        return float(loss.detach())

    def best(self, obs: Observation, chunks: Tensor) -> Tensor:
        """The expert `(B,)` whose chunk, of `(B, M, H, A)`, has the highest Q value."""
        with torch.no_grad():
            return self.q.candidate_values(obs, chunks).mean(0).argmax(1)

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """PPO loss plus the frequency loss of the router."""
        loss, info = super().loss(rows, log_stats=log_stats)
        chunks, _, log_weight = self.policy.rsample_experts(rows.obs, generator=self.generator)
        router, more = frequency_loss(log_weight, self.best(rows.obs, chunks))
        loss = loss + self.config.router_coef * router
        return loss, {**info, **more, "router_loss": router.detach()} if log_stats else info

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of PPO, Q and its optimiser."""
        return {**super().checkpoint_items(), "q": self.q, "q_optimizer": self.q_optimizer}
