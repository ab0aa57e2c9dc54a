"""TD3 on a dataset, with an actor that is held near it: TD3+BC, PRDC, A2PR.

The critics are TD3's. The actor climbs the first of them, divided by the mean magnitude of its values, against a
regulariser: the squared distance of its chunk to one that the dataset vouches for. Which one, each algorithm says.
Only the executed part of a chunk is held, since only that has a value.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.constraints import NotNegative
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info, chunk_mean


@dataclass(frozen=True)
class RegularizedTD3Config(TD3Config):
    """Settings that every algorithm of this frame has."""

    alpha: NotNegative = 2.5  # weight of the normalised values beside the regulariser; 0 only imitates


def regularized_loss(value: Tensor, penalty: Tensor, alpha: float) -> Tensor:
    """`mean penalty - alpha mean(Q) / mean|Q|` of values and penalties `(B,)`; the divisor has no gradient."""
    scale = alpha / value.detach().abs().mean().clamp(min=1e-6)
    return penalty.mean() - scale * value.mean()


class RegularizedTD3(TD3):
    """TD3 whose actor is pulled towards chunks of the data; subclasses say towards which."""

    needs_dataset: ClassVar[bool] = True
    config: RegularizedTD3Config

    @abstractmethod
    def penalty(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Info]:
        """Regulariser `(B,)` of the actor's `chunk` `(B, H, A)` at the batch's observations, and what to log."""

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Normalised values against the regulariser."""
        chunk = self.policy.mode(batch.obs)
        value = self.first_value(batch.obs, chunk)
        penalty, info = self.penalty(batch, chunk)
        return regularized_loss(value, penalty, self.config.alpha), {"penalty": penalty.mean(), **info}

    def executed(self, chunk: Tensor) -> Tensor:
        """The executed part `(..., n, A)` of `chunk` `(..., H, A)`, in normalised units."""
        return self.policy.action_normalizer.normalize(chunk[..., : self.policy.spec.execute, :])

    def distance(self, chunk: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
        """Mean squared distance `(B,)` of the executed parts of two chunks, over the steps with `mask` `(B, H)`."""
        error = (self.executed(chunk) - self.executed(wanted)).square().mean(-1)  # (B, n)
        return chunk_mean(error, mask[:, : error.shape[1]])
