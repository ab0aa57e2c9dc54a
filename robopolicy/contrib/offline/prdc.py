"""PRDC: TD3 on a dataset, with an actor regularised to the nearest state-action pair of all data (Ran et al. 2023).

TD3+BC regularises to the action of the data in the same state, even if it is bad. PRDC searches all pairs of the
dataset for the one nearest to `[beta s, pi(s)]`, in a k-d tree, and regularises to this pair's action. So an action has
no penalty where the data contains a similar action in a similar state, and the actor may differ from the behavior of a
state without leaving the data.

Use it for offline data of mixed quality that covers its states well, with vector observations. Do not use it with few
demonstrations, in which the nearest pair is distant, nor with images, clouds, entities or embeddings. With a large
`beta` it is td3_bc.

The metric `novelty` is the distance to this pair relative to the usual one between pairs of the data: values well above
1 show that the actor has left the data (`robopolicy.contrib.offline.nearest_neighbors`, which needs the extra
`offline`).

Deviations from the public code: states are standardised by the dataset, independent of the policy; a pair contains the
executed part of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.algorithms.td3_bc import TD3BC, TD3BCConfig, chunk_distance, executed_actions
from robopolicy.constraints import NonNegative
from robopolicy.contrib.offline.nearest_neighbors import NearestPairs
from robopolicy.data.batches import Transitions
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.episodes import Array, Episodes
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy

SLICE = 8192  # frames of the dataset per read


@dataclass(frozen=True)
class PRDCConfig(TD3BCConfig):
    """Settings of PRDC; defaults are the public code's for Hopper and Walker2d."""

    beta: NonNegative = 2.0  # weight of the state in the distance; 7.5 for mazes


class PRDC(TD3BC):
    """TD3 regularised to pairs of the data."""

    name = "prdc"
    config_class = PRDCConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "ran2023prdc"
    config: PRDCConfig

    def __init__(self, config: PRDCConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`; call `attach_dataset` before the first update.

        Raises:
            UserError: The policy has observations without a distance.
        """
        super().__init__(config, policy, total_updates=total_updates)
        vectors = self.policy.encoder.layout.normalized
        others = [key for key in self.policy.spec.observation if key not in vectors]
        if others:
            raise UserError(
                f"PRDC measures distances between vectors, but '{policy.name}' observes {others}; name vectors in "
                "task.obs_keys, or use td3_bc or a2pr."
            )
        self.pairs: NearestPairs | None = None
        self._chunks = torch.zeros(0)  # (N, n, A) the pairs' executed parts, in env units
        self._masks = torch.zeros(0)  # (N, n)

    def attach_dataset(self, episodes: Episodes) -> None:
        """Build the tree; it depends on dataset and action normaliser only, so a resumed run builds the same one."""
        spec = self.policy.spec
        sampler = ChunkSampler(episodes, horizon=spec.action_horizon, obs_horizon=spec.obs_horizon)
        parts = [sampler.take(frames) for frames in torch.arange(len(episodes)).split(SLICE)]
        self._chunks = torch.cat([part.chunk for part in parts])
        self._masks = torch.cat([part.mask for part in parts])
        state = np.concatenate([self._state(part.obs) for part in parts])
        device = self.policy.device
        action = _array(executed_actions(self.policy, self._chunks.to(device)).flatten(1))
        self.pairs = NearestPairs(state, action, beta=self.config.beta, threads=torch.get_num_threads())
        self._chunks, self._masks = self._chunks.to(device), self._masks.to(device)

    def nearest(self, obs: Observation, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The data's chunk `(B, n, A)` nearest to `chunk` at `obs`, its mask `(B, n)`, and the novelty `(B,)`.

        Raises:
            UserError: No dataset is attached.
        """
        if self.pairs is None:
            raise UserError("PRDC searches the whole dataset, but none is attached; call attach_dataset first.")
        distance, row = self.pairs.nearest(self._state(obs), _array(executed_actions(self.policy, chunk).flatten(1)))
        index = torch.from_numpy(row).to(chunk.device)
        novelty = torch.from_numpy(self.pairs.novelty(distance)).to(chunk)
        return self._chunks[index], self._masks[index], novelty

    def penalty(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Info]:
        """Squared distance to the action of the nearest pair."""
        target, mask, novelty = self.nearest(batch.obs, chunk)
        return chunk_distance(self.policy, chunk, target, mask), {"novelty": novelty.mean()}

    def _state(self, obs: Observation) -> Array:
        """Flatten the vectors of a history of observations `(B, To * D)`."""
        return _array(self.policy.encoder.vectors(obs).flatten(1))

    def state_dict(self) -> dict[str, Any]:
        """States of all items and the size of the dataset, from which the tree is rebuilt."""
        return {**super().state_dict(), "pairs": len(self._chunks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`.

        Raises:
            UserError: The run was started with another dataset.
        """
        if self.pairs is not None and int(state["pairs"]) != len(self.pairs):
            raise UserError(
                f"The saved run searches {state['pairs']} frames, this dataset has {len(self.pairs)}; resume with the "
                "dataset the run was started with."
            )
        super().load_state_dict(state)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
