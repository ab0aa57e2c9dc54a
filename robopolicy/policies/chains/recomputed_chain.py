"""Chains kept as seeds: what a rollout records shrinks to one number per decision, and time pays for it.

A rollout has to score every denoising step again in the update. For a chunk of H actions of A dimensions and T scored
steps, a decision needs, besides its T log-probabilities,

    float32 chain    4 (T + 1) H A  bytes     e.g. T = 10, H = 16, A = 7:   4928
    bfloat16 chain   2 (T + 1) H A  bytes                                   2464
    seed             8              bytes                                      8

The chain of a seed is drawn again, minibatch by minibatch, by a frozen snapshot of the policy that played: all sampler
steps without gradients, in every epoch, and one copy of the weights. The log-probabilities of the redrawn chain
replace the recorded ones, so the first ratio is as exact as with stored chains.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from robopolicy.errors import unknown_name
from robopolicy.policies.base import Observation, Record, Sample
from robopolicy.policies.chains.chain import ChainPolicy
from robopolicy.policies.noise import Randomness, RowStreams, normal

CHAIN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def chain_dtype(name: str) -> torch.dtype:
    """Type of recorded iterates by name.

    Raises:
        UserError: It is neither float32 nor bfloat16.
    """
    if name not in CHAIN_DTYPES:
        raise unknown_name("chain_dtype", name, CHAIN_DTYPES)
    return CHAIN_DTYPES[name]


class RecomputedChain:
    """Draws chunks of a chain policy with one seed per row, and draws the same chains again during the update."""

    def __init__(self, chain: ChainPolicy) -> None:
        """Wrap `chain`, which is shared; `freeze` takes a copy."""
        self.chain = chain
        self._behaviour: ChainPolicy | None = None

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """As `ChainPolicy.sample`; the record is `seed` `(B,)` int64."""
        first = next(iter(obs.values()))
        # The bits of two normal draws are the seed, so that any source of randomness will do.
        seed = normal((len(first), 2), generator, first.device).view(torch.int64).squeeze(1)
        sample = self.chain.sample(obs, generator=_streams(seed))
        return Sample(sample.chunk, {"seed": seed}, sample.logp)

    def freeze(self) -> None:
        """Remember the weights that played; call it before the first gradient step of an update."""
        if self._behaviour is None:
            self._behaviour = copy.deepcopy(self.chain).requires_grad_(False)
        else:
            self._behaviour.load_state_dict(self.chain.state_dict())

    def recall(self, obs: Observation, record: Record) -> tuple[Record, Tensor]:
        """Record and log-probabilities `(B, T)` of the chains that the seeds of `record` stand for."""
        if self._behaviour is None:
            raise RuntimeError("Call freeze before recall.")
        sample = self._behaviour.sample(obs, generator=_streams(record["seed"]))
        return sample.record, sample.logp


def _streams(seed: Tensor) -> RowStreams:
    return RowStreams(seed.tolist(), [0] * len(seed))
