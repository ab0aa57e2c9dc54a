"""Polychromic PPO: score sets of trajectories by return times diversity (Hamid et al. 2025).

At some moments of every rollout the simulator is restored and played on several times (vines, `samplers/vine.py`). A
set of vines from one state is worth the mean return of its members times the share of different ways among them, 0 if
all went the same way. Every member shares the credit for its sets, so a second way to succeed is worth keeping, where a
plain policy gradient ends with one. The first steps of a vine learn from this set advantage, all else from GAE.

Use it to fine-tune or train where several ways should survive: for pass@k, for play under perturbations. Returns should
lie in [0, 1] (sparse rewards): the product means little for negative ones. `place` says what a way is: the set of cells
that a vine visits. It needs a backend that saves its state, and many more steps than
`ppo`, which it is without vines; so budgets count updates.

No official code was found; formulas are those of the paper as secondary sources give them. Deviations: all subsets of
the vines are scored (there: a few random ones), and the baseline of a vine is the mean of the sets without it, which
leaves the gradient unbiased; vines grow in every environment at the same moments; either kind of advantage counts in
units of its own spread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import comb

import torch
from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, normalize
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.constraints import AtLeastTwo, NonNegative, PositiveInt
from robopolicy.contrib.control.positions import PositionConfig
from robopolicy.contrib.control.props import joined
from robopolicy.contrib.control.stages import set_advantage
from robopolicy.contrib.control.vine_batch import VineRollout
from robopolicy.core.decisions import Decisions
from robopolicy.core.regularizers import k3
from robopolicy.data.batches import GroupRollout, Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy

MOST_SETS = 1000


@dataclass(frozen=True)
class PolychromicConfig(PPOConfig):
    """Settings of PPO, of the vines and of what makes two of them different."""

    epochs: PositiveInt = 2  # passes over each rollout and its vines
    branch_points: PositiveInt = 2  # moments of each rollout at which vines begin
    branches: PositiveInt = 8  # V, vines from each state
    set_size: AtLeastTwo = 4  # n, vines in a set, fewer than V
    window: PositiveInt = 5  # W, decisions of a vine that learn from the set advantage
    kl_coef: NonNegative = 0.01  # weight of the KL from the policy that played
    place: PositionConfig = field(default_factory=lambda: PositionConfig(scale=0.5))  # ways are sets of its cells

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.set_size >= self.branches or comb(self.branches, self.set_size) > MOST_SETS:
            raise UserError(
                f"A set has fewer members than there are vines, and there are at most {MOST_SETS} sets; "
                f"got {self.set_size} of {self.branches}."
            )
        if self.branch_points > self.num_steps:
            raise UserError(f"Vines need branch_points <= num_steps={self.num_steps}, got {self.branch_points}.")


def visited_sets(places: list[Tensor], played: list[Tensor]) -> Tensor:
    """Number of the set of unit cells that each vine visited, `(K, N)`; equal sets have equal numbers.

    Args:
        places: K tensors (L_k, N, D).
        played: K tensors (L_k, N) bool.
    """
    lengths = [len(part) for part in places]
    cells, index = torch.cat(places).floor().flatten(0, 1).unique(dim=0, return_inverse=True)
    index = index.view(-1, places[0].shape[1])
    visited = [
        torch.zeros(part.shape[1], len(cells) + 1, device=index.device).scatter_(
            1, torch.where(mask, part, len(cells)).T, 1.0
        )[:, :-1]
        for part, mask in zip(index.split(lengths), played, strict=True)
    ]
    stacked = torch.stack(visited)  # (K, N, C)
    return stacked.flatten(0, 1).unique(dim=0, return_inverse=True)[1].view(stacked.shape[:2])


class Polychromic(PPO):
    """PPO on rollouts and sets of vines."""

    name = "polychromic"
    config_class = PolychromicConfig
    data_source = "vine"
    heads = ("decisions",)
    reference = "hamid2025polychromic"
    distributed = False
    supports_recurrent = False  # vines begin without memories
    config: PolychromicConfig

    def __init__(self, config: PolychromicConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        config.place.check(policy)
        super().__init__(config, policy, total_updates=total_updates)

    def advantages(self, branches: tuple[GroupRollout, ...]) -> Tensor:
        """Set advantage of every vine, `(K, N)`."""
        places, count = [self.config.place.extract(vine.obs) for vine in branches], self.config.branches
        ways = visited_sets(places, [vine.valid for vine in branches])
        returns = torch.stack([vine.returns for vine in branches])

        def grouped(values: Tensor) -> Tensor:  # (F V, N) -> (F N, V)
            return values.unflatten(0, (-1, count)).transpose(1, 2).flatten(0, 1)

        advantage = set_advantage(grouped(returns), grouped(ways), self.config.set_size)
        return advantage.unflatten(0, (-1, returns.shape[1])).transpose(1, 2).flatten(0, 1)

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Decisions of the rollout and of the vines; those in the window of a vine have its set advantage."""
        assert isinstance(batch, VineRollout)
        advantage = self.advantages(batch.branches)
        advantage = advantage / advantage.square().mean().sqrt().clamp(min=1e-8)
        parts, shared = [super().process_rollout(batch)], [torch.zeros(batch.shape, device=advantage.device).flatten()]
        early = [torch.zeros_like(shared[0], dtype=torch.bool)]
        for vine, own in zip(batch.branches, advantage, strict=True):
            played, (steps, envs) = vine.valid.flatten(), vine.shape
            parts.append(super().process_rollout(vine)[played])
            shared.append(own.expand(steps, envs).flatten()[played])
            time = torch.arange(steps, device=played.device)[:, None].expand(steps, envs)
            early.append((time < self.config.window).flatten()[played])
        rows, inside = joined(parts), torch.cat(early)
        gae = torch.empty_like(rows.advantage)
        gae[~inside] = normalize(rows.advantage[~inside])
        return replace(rows, advantage=torch.where(inside, torch.cat(shared), gae))

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """That of PPO, and the KL from the policy that played."""
        output = self.policy.decisions(rows.obs, rows.record)
        advantage = normalize(rows.advantage)[:, None]
        loss, info = self.estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, log_stats=log_stats)
        return loss + self.config.kl_coef * k3(rows.logp - output.logp).mean(), info
