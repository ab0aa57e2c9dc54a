"""Polychromic PPO: score sets of trajectories by return times diversity (Hamid et al. 2025).

At some decisions of every rollout the simulator is restored and several rollouts continue from there (vines,
`vine_rollout.py`). The score of a set of vines from one state is the mean return of its members times the fraction of
distinct trajectories among them, and 0 if all are the same. Every member shares the credit for its sets, so a second
solution keeps its probability, where a plain policy gradient converges to one. The first steps of a vine learn from
this set advantage, all others from GAE.

Use it to fine-tune or train where several solutions should survive: for pass@k, or for robustness to perturbations.
Returns should lie in [0, 1] (sparse rewards); the product has little meaning for negative ones. `place` defines when
trajectories differ: by the set of cells that a vine visits. The algorithm needs a backend that saves its state, and
many more steps than `ppo`, to which it reduces without vines; so budgets count updates.

No official code was found; formulas follow secondary sources. Deviations: all subsets of the vines are scored (the
paper: a few random ones), and the baseline of a vine is the mean of the sets without it, which keeps the gradient
unbiased; vines start in every environment at the same decisions; each kind of advantage is divided by its own standard
deviation.
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
from robopolicy.contrib.control.props import concat_rows
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
    """Settings of PPO, of the vines and of their distinction."""

    epochs: PositiveInt = 2  # passes over each rollout and its vines
    branch_points: PositiveInt = 2  # decisions of each rollout at which vines begin
    branches: PositiveInt = 8  # V, vines from each state
    set_size: AtLeastTwo = 4  # n, vines in a set, fewer than V
    window: PositiveInt = 5  # W, decisions of a vine that learn from the set advantage
    kl_coef: NonNegative = 0.01  # weight of the KL from the policy of the rollout
    place: PositionConfig = field(default_factory=lambda: PositionConfig(scale=0.5))  # its cells define trajectories

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.set_size >= self.branches or comb(self.branches, self.set_size) > MOST_SETS:
            raise UserError(
                f"set_size must be smaller than branches, with at most {MOST_SETS} sets; "
                f"got set_size={self.set_size} and branches={self.branches}."
            )
        if self.branch_points > self.num_steps:
            raise UserError(f"Vines need branch_points <= num_steps={self.num_steps}, got {self.branch_points}.")


def visited_sets(places: list[Tensor], valid: list[Tensor]) -> Tensor:
    """Index of the set of unit cells that each vine visited, `(K, N)`; equal sets have equal indices.

    Args:
        places: K tensors (L_k, N, D).
        valid: K tensors (L_k, N) bool, which steps count.
    """
    lengths = [len(part) for part in places]
    cells, index = torch.cat(places).floor().flatten(0, 1).unique(dim=0, return_inverse=True)
    index = index.view(-1, places[0].shape[1])
    visited = [
        torch.zeros(part.shape[1], len(cells) + 1, device=index.device).scatter_(
            1, torch.where(mask, part, len(cells)).T, 1.0
        )[:, :-1]
        for part, mask in zip(index.split(lengths), valid, strict=True)
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
    supports_recurrent = False  # vines begin without hidden states
    supports_overlap = False  # its source adds vines to every rollout
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
            valid, (steps, envs) = vine.valid.flatten(), vine.shape
            parts.append(super().process_rollout(vine)[valid])
            shared.append(own.expand(steps, envs).flatten()[valid])
            time = torch.arange(steps, device=valid.device)[:, None].expand(steps, envs)
            early.append((time < self.config.window).flatten()[valid])
        rows, inside = concat_rows(parts), torch.cat(early)
        gae = torch.empty_like(rows.advantage)
        gae[~inside] = normalize(rows.advantage[~inside])
        return replace(rows, advantage=torch.where(inside, torch.cat(shared), gae))

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """PPO loss plus the KL from the policy of the rollout."""
        output = self.policy.decisions(rows.obs, rows.record)
        advantage = normalize(rows.advantage)[:, None]
        loss, info = self.estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, log_stats=log_stats)
        return loss + self.config.kl_coef * k3(rows.logp - output.logp).mean(), info
