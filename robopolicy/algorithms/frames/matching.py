"""The frame of the fine-tuners that score a chunk by losses or velocities at stored points, not by a chain's density.

FPO, FPO++, AWM, AC-Flow and PolicyFlow draw noise and times once per rollout, keep them, and compare what the network
says there now with what it said before the first gradient step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.frames.fine_tuner import FineTuner, FineTunerConfig
from robopolicy.algorithms.frames.on_policy import Rows
from robopolicy.constraints import Count, NotNegative, Positive
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Policy
from robopolicy.policies.exploration.sampled import SampledPolicy, require_matched

REDUCTIONS = ("mean", "sum")


class StoredPoints(FineTuner):
    """Fine-tuner whose policy completes its records before the first gradient step."""

    policy: Any  # with `complete(obs, record, generator)`

    @abstractmethod
    def logp(self, rows: Rows) -> Tensor:
        """What stands for the log-probabilities `(B, T)` of the rows in ratios; differentiable."""

    def prepare(self, rows: Rows) -> Rows:
        """Draw the points and score them with the weights that sampled, a minibatch at a time."""
        parts = [self.complete(rows[slice(i, i + self.config.batch_size)]) for i in self._starts(rows)]
        record = {key: torch.cat([part.record[key] for part in parts]) for key in parts[0].record}
        return replace(rows, record=record, logp=torch.cat([part.logp for part in parts]))

    def complete(self, rows: Rows) -> Rows:
        """Rows with everything in their record that must not change during the iteration."""
        rows = replace(rows, record=self.policy.complete(rows.obs, rows.record, self.generator))
        return replace(rows, logp=self.logp(rows))

    def _starts(self, rows: Rows) -> range:
        return range(0, len(rows), self.config.batch_size)

    def deployable(self) -> Policy:
        """The head without its exploration."""
        return self.policy.head


@dataclass(frozen=True)
class MatchingConfig(FineTunerConfig):
    """Settings of the fine-tuners on the training loss of the head."""

    target_kl: Positive | None = None  # stop the epochs when the approximate KL of these ratios exceeds this
    pairs: Count = 8  # N, stored pairs of noise and time per chunk
    exploration_std: NotNegative = 0.0  # noise added to sampled chunks, in normalised action units
    reduction: str = "mean"  # of the loss over the executed steps of a chunk: mean | sum

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", self.reduction, REDUCTIONS)


class MatchingTuner(StoredPoints):
    """Fine-tuner on the training loss of a head at stored pairs."""

    config: MatchingConfig
    policy: SampledPolicy

    def __init__(
        self, config: MatchingConfig, policy: Policy, *, title: str, stratified: bool = False, total_updates: int
    ) -> None:
        """Wrap `policy`, which is changed in place; `title` names the algorithm where it refuses one."""
        head = require_matched(policy, title)
        sampled = SampledPolicy(head, pairs=config.pairs, exploration_std=config.exploration_std, stratified=stratified)
        super().__init__(config, sampled, head, total_updates=total_updates)

    def losses(self, rows: Rows) -> Tensor:
        """Training loss `(B, N)` of each stored pair, reduced over the executed steps."""
        return reduce_steps(self.policy.losses(rows.obs, rows.record), self.config.reduction)


def reduce_steps(loss: Tensor, reduction: str) -> Tensor:
    """Reduce `(B, N, Ta)` over the executed steps."""
    return loss.mean(-1) if reduction == "mean" else loss.sum(-1)


def velocity_distance(velocity: Tensor, other: Tensor) -> Tensor:
    """Mean squared distance of velocities `(B, N, Ta, A)`, a scalar; no gradient flows into `other`."""
    return (velocity - other.detach()).square().mean()
