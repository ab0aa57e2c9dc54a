"""Q-chunking (QC, Li et al. 2025): temporal-difference learning on action chunks, acting by best-of-N of a cloned flow.

The critic judges whole chunks, so n-step backups carry no off-policy bias and exploration is coherent in time. The
policy is trained by imitation of everything in the memory; acting and bootstrapping take the best of N of its chunks.
With chunks of one action it is best-of-N temporal-difference learning.

Use it with demonstrations of mixed quality and sparse rewards, offline first and then online. Not where control must
react within a chunk, as chunks run open loop, nor with a tight budget of network calls: every decision costs N samples.

Deviations from the public code: the policy may be any head that can be cloned; its gradient is cut at norm 1; chunks
that the end of the episode cuts short weigh as much as whole ones (there: as much as they have steps); critics
normalise before their activations (there: behind them).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.frames.q_chunking import QChunking, QChunkingConfig
from robopolicy.constraints import Count
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.best_of_n import select


@dataclass(frozen=True)
class QCConfig(QChunkingConfig):
    """Settings of QC."""

    candidates: Count = 32  # N, samples of the policy per decision and per target


class QC(QChunking):
    """Best-of-N over chunks."""

    name = "qc"
    config_class = QCConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "li2025qc"
    config: QCConfig

    def __init__(self, config: QCConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to clone `policy` and to act with the best of its samples."""
        super().__init__(config, policy, total_updates=total_updates)
        self.player = select(self.policy, self.critic, candidates=config.candidates, reduction="mean")

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The best of N chunks by the mean of the ensemble."""
        return self.player.sample(obs, generator=generator)

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * mean Q'` at the chunk that would be played next."""
        chunk = self.player.act(batch.next_obs, generator=self.generator)
        return batch.reward + batch.discount * self.target_critic(batch.next_obs, chunk).mean(0)

    def actor_step(self, batch: Transitions) -> Info:
        """Imitation."""
        return {"imitation": self.imitate(batch)}

    def deployable(self) -> Policy:
        """The policy with its critic."""
        return self.player
