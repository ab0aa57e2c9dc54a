"""Objectives on embeddings of trajectories that the policy is conditioned on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.preferences import preference_pairs
from robopolicy.limits import NotNegative, Positive


@dataclass(frozen=True)
class EmbeddingTriplet:
    """OPPO (S113): the best condition lies nearer to preferred trajectories than to others.

    `extra["embedding"]` (N, Z) is each trajectory's embedding, under which its log-probabilities were computed, and
    `extra["best"]` (N, Z) the learned condition of deployment, the same in all rows. Both are made anew for every
    minibatch, with their graphs: this loss trains them by
    `max(0, |best - z+|^2 - |best - z-|^2 + margin) + norm (|z| - 1)^2`.
    """

    margin: NotNegative = 1.0
    norm: Positive = 1.0  # weight of the unit length of the embeddings

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over all ordered pairs of a group, and over the embeddings of all rows."""
        embedding, best = decisions.need_extra("embedding"), decisions.need_extra("best")
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        near = (best[chosen] - embedding[chosen]).square().sum(1)
        far = (best[chosen] - embedding[rejected]).square().sum(1)
        loss = (near - far + self.margin).clamp(min=0.0).sum() / max(len(chosen), 1)
        squares = embedding.square().sum(1)
        size = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)  # with slope 0 at 0
        length = (size - 1.0).square().mean()
        ordered = (near < far).to(near.dtype).sum() / max(len(chosen), 1)
        return loss + self.norm * length, {"accuracy": ordered.detach()}
