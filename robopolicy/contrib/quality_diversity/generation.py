"""Data of a population: candidates, their scores, and windows for gradient steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.data.batches import Transitions


@dataclass(frozen=True)
class EvaluationBatch:
    """P members to be evaluated for one episode each."""

    members: Tensor  # (P, D + C) weights and constant descriptor
    asked: Tensor  # (P,) bool, whether this constant is the target descriptor

    def __len__(self) -> int:
        return len(self.members)

    def rows(self, rows: slice) -> EvaluationBatch:
        """A slice of the members."""
        return EvaluationBatch(self.members[rows], self.asked[rows])


@dataclass(frozen=True)
class Scores:
    """Fitness and descriptors of P candidates."""

    fitness: Tensor  # (P,) float64, undiscounted return
    descriptor: Tensor  # (P, C), in [0, 1]


@dataclass(frozen=True)
class PopulationBatch:
    """One round of variation and selection."""

    candidates: EvaluationBatch
    scores: Scores
    windows: Transitions  # with the records `achieved` and `wanted` (B, C), the descriptors of their episodes
