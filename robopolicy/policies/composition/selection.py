"""Selection of the parents of a composition per observation (after DynamicControl, He et al. 2024).

A selector scores the parents from the observation. It is trained to order them by their discrepancies (how far the
expected chunk of each parent is from the demonstrated one), with a Plackett-Luce distribution over such orders. The
parents with the highest scores are active.
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
    """Log-probability `(N, n)` of each pick; their sum is the log-probability of the (partial) ranking.

    `scores` `(N, K)` belong to the items, `order` `(N, n)` int contains the first n <= K items of the ranking.
    """
    picked = scores.gather(1, order)
    remaining = torch.flip(torch.logcumsumexp(torch.flip(picked, [1]), 1), [1])
    if order.shape[1] < scores.shape[1]:
        others = torch.ones_like(scores, dtype=torch.bool).scatter(1, order, False)
        unpicked = scores.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
        remaining = torch.logaddexp(remaining, unpicked)
    return picked - remaining


@dataclass(frozen=True)
class Selection(Validated):
    """Number of active parents, and the network that ranks them."""

    top: PositiveInt = 1  # maximum number of active parents
    least: Fraction = 0.0  # minimum preference relative to the best parent; 0 always activates `top` parents
    hidden: tuple[PositiveInt, ...] = (64, 64)
    vision: VisionConfig = field(default_factory=VisionConfig)
    updates: PositiveInt = 1000  # gradient steps on demonstrations
    batch_size: PositiveInt = 128  # chunks per gradient step
    lr: Positive = 1e-3
    draws: PositiveInt = 8  # noise levels at which a discrepancy is measured


class Selector(nn.Module):
    """Scores `(B, M)` of M parents; differences are log-odds of being the better parent [nats]."""

    def __init__(self, config: Selection, policy: Policy, count: int) -> None:
        """Build the network with the observation statistics of `policy`."""
        super().__init__()
        self.encoder = copy_normalizers(policy, config.vision)[0]
        self.body = MLP(policy.spec.obs_horizon * self.encoder.feature_dim, config.hidden, count, activation="silu")

    def forward(self, obs: Observation) -> Tensor:
        """Score the parents at `{key: (B, To, ...)}`."""
        return self.body(self.encoder(obs).flatten(1))


def choose_parents(scores: Tensor, selection: Selection) -> Tensor:
    """Gates `(B, M)`: 1 for the parents selected by `scores` `(B, M)`, 0 for the others."""
    best = scores.topk(min(selection.top, scores.shape[1]), 1)
    near = best.values - best.values[:, :1]
    kept = (near.exp() >= selection.least).to(scores.dtype)
    return torch.zeros_like(scores).scatter(1, best.indices, kept)


def ordering_loss(scores: Tensor, discrepancies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-probability `(B,)` of the order of increasing `discrepancies` `(B, M)` under `scores` `(B, M)`."""
    order = discrepancies.argsort(1)
    loss = -log_probability(scores, order).sum(1)
    return loss, {"first": (scores.argmax(1) == order[:, 0]).float().detach()}
