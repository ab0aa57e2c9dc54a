"""What the fine-tuners that score denoising chains share: how the chains of a rollout are kept until the update."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.frames.fine_tuner import ActorTuner, ActorTunerConfig
from robopolicy.algorithms.frames.on_policy import Rows
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.exploration.chain import ChainPolicy, RecomputedChain, chain_dtype
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class ChainTunerConfig(ActorTunerConfig):
    """How chains are kept; `policies/chains/recomputed_chain.py` gives the bytes."""

    chain_dtype: str = "float32"  # of recorded chains: float32 | bfloat16 (half the memory, ratios stay exact)
    recompute_chains: bool = False  # record seeds alone and draw the chains again in the update: slow, tiny


class ChainTuner(ActorTuner):
    """Put before the frame: `class ReinFlow(ChainTuner, FineTuner)`; subclasses define `chain_loss`."""

    config: ChainTunerConfig
    policy: ChainPolicy

    def __init__(self, config: ChainTunerConfig, policy: ChainPolicy, base: Policy, *, total_updates: int) -> None:
        """As the frame behind it."""
        super().__init__(config, policy, base, total_updates=total_updates)
        policy.chain_dtype = chain_dtype(config.chain_dtype)
        self._recorder = RecomputedChain(policy) if config.recompute_chains else None

    @abstractmethod
    def chain_loss(self, rows: Rows) -> tuple[Tensor, Info]:
        """As `actor_loss`, with the chains in `rows.record`."""

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration."""
        draw = self.policy.sample if self._recorder is None else self._recorder.sample
        return draw(obs, generator=generator)

    def prepare(self, rows: Rows) -> Rows:
        """Remember the weights that played."""
        if self._recorder is not None:
            self._recorder.freeze()
        return super().prepare(rows)

    def actor_loss(self, rows: Rows) -> tuple[Tensor, Info]:
        """Loss on one minibatch, its chains drawn again where only seeds were recorded."""
        if self._recorder is not None:
            with torch.no_grad():
                record, logp = self._recorder.recall(rows.obs, rows.record)
            rows = replace(rows, record=record, logp=logp)
        return self.chain_loss(rows)
