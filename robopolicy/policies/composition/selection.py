"""Selection of the parents of a composition per observation (after DynamicControl, He et al. 2024).

A selector scores the parents from the observation. It has learned to put them in order: the parents' own order is that
of their discrepancies, how far the chunk that each expects lies from the one that was shown, and the scores are those
of a Plackett-Luce distribution over such orders. The parents of the highest scores take part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.constraints import Fraction, Positive, PositiveInt, Validated
from robopolicy.critics.q import copy_normalizers
from robopolicy.nets.mlp import MLP
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, Policy


def log_probability(scores: Tensor, order: Tensor) -> Tensor:
    """Log-probability `(N, n)` of each pick; their sum is that of the ranking, or of its beginning.

    Args:
        scores: (N, K) of the items.
        order: (N, n) int, the items from first to last, or the first n <= K of them.
    """
    picked = scores.gather(1, order)
    left = torch.flip(torch.logcumsumexp(torch.flip(picked, [1]), 1), [1])
    if order.shape[1] < scores.shape[1]:
        others = torch.ones_like(scores, dtype=torch.bool).scatter(1, order, False)
        never = scores.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
        left = torch.logaddexp(left, never)
    return picked - left


@dataclass(frozen=True)
class Selection(Validated):
    """Number of active parents, and the network that ranks them."""

    top: PositiveInt = 1  # most parents that take part
    least: Fraction = 0.0  # and no parent less preferred than this share of the first one; 0 is always `top`
    hidden: tuple[PositiveInt, ...] = (64, 64)
    vision: VisionConfig = field(default_factory=VisionConfig)
    updates: PositiveInt = 1000  # gradient steps on demonstrations
    batch_size: PositiveInt = 128  # chunks per gradient step
    lr: Positive = 1e-3
    draws: PositiveInt = 8  # noise levels at which a discrepancy is measured


class Selector(nn.Module):
    """Scores `(B, M)` of M parents; their differences are log-odds of being the better one [nats]."""

    def __init__(self, config: Selection, policy: Policy, count: int) -> None:
        """Build the network with the observation statistics of `policy`."""
        super().__init__()
        self.encoder = copy_normalizers(policy, config.vision)[0]
        self.body = MLP(policy.spec.obs_horizon * self.encoder.feature_dim, config.hidden, count, activation="silu")

    def forward(self, obs: Observation) -> Tensor:
        """Score the parents at `{key: (B, To, ...)}`."""
        return self.body(self.encoder(obs).flatten(1))


def choose_parents(scores: Tensor, selection: Selection) -> Tensor:
    """Gates `(B, M)`, 1 for the parents that take part by their `scores` `(B, M)` and 0 for the others."""
    best = scores.topk(min(selection.top, scores.shape[1]), 1)
    near = best.values - best.values[:, :1]
    kept = (near.exp() >= selection.least).to(scores.dtype)
    return torch.zeros_like(scores).scatter(1, best.indices, kept)


def ordering_loss(scores: Tensor, discrepancies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-probability `(B,)` of the order of rising `discrepancies` `(B, M)` under `scores` `(B, M)`."""
    order = discrepancies.argsort(1)
    loss = -log_probability(scores, order).sum(1)
    return loss, {"first": (scores.argmax(1) == order[:, 0]).float().detach()}
