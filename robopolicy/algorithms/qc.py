"""Q-chunking (QC, Li et al. 2025): temporal-difference learning on chunks, with best-of-N acting of a cloned flow.

The critic evaluates whole chunks, so n-step backups have no off-policy bias and exploration is coherent in time. The
policy is trained by imitation of the replay buffer; acting and bootstrapping use the best of N of its chunks. With
chunks of one action it is best-of-N temporal-difference learning.

Use it with demonstrations of mixed quality and sparse rewards, offline first and then online. Chunks run open loop, so
it cannot react within a chunk, and every decision costs N samples.

Deviations from the public code: the policy may be any head that can be cloned; its gradient is clipped to norm 1;
chunks cut short by the end of an episode have the same imitation weight as whole ones (there: weighted by their steps);
critics normalise before activations (there: after, `critic.norm_after_activation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats
from robopolicy.algorithms.common.offline import QChunkingConfig, complete_chunk_loss, imitation_step, require_imitation
from robopolicy.constraints import PositiveInt
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.best_of_n import make_best_of_n


@dataclass(frozen=True)
class QCConfig(QChunkingConfig):
    """Settings of QC."""

    candidates: PositiveInt = 32  # N, samples of the policy per decision and per target


class QC(OffPolicy):
    """Q-learning on chunks with best-of-N acting."""

    name = "qc"
    config_class = QCConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "li2025qc"
    uses_full_ensemble = True
    supports_rho = True
    config: QCConfig

    def __init__(self, config: QCConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to clone `policy` in place and to act with its best samples."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is active only in its own loss
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
        self.acting_policy = make_best_of_n(policy, self.critic, candidates=config.candidates, reduction="mean")

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw the best of N chunks by the mean of the ensemble."""
        return self.acting_policy.sample(obs, generator=generator)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the cloned policy, without the untrained critic."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * Q'` at the best of N chunks: the mean of all members, or by `rho`."""
        chunk = self.acting_policy.act(batch.next_obs, generator=self.generator)
        return self.bootstrap(batch, chunk)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of complete chunks."""
        return complete_chunk_loss(self.critic, batch, self.target, self.sample_spec.steps)

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed imitation steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                stats.actor(imitation=imitation_step(self, part.obs, part.chunk, mask=part.mask))
        return self.finish(batch, stats)

    def inference_policy(self) -> Policy:
        """The policy with best-of-N selection by the critic."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class and policy optimiser."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer}
