"""Experience of a population: who was played, what came of it, and what algorithms learn from beside that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.data.batches import Transitions


@dataclass(frozen=True)
class EvaluationBatch:
    """P members to be played for one episode each."""

    members: Tensor  # (P, D + C) weights, and the constant seen as descriptor
    asked: Tensor  # (P,) bool, whether that constant is the behaviour that is wanted of it

    def __len__(self) -> int:
        return len(self.members)

    def rows(self, rows: slice) -> EvaluationBatch:
        """Some of them."""
        return EvaluationBatch(self.members[rows], self.asked[rows])


@dataclass(frozen=True)
class Scores:
    """What the episodes of P candidates were worth, and how they behaved."""

    fitness: Tensor  # (P,) float64, undiscounted return
    descriptor: Tensor  # (P, C), from 0 to 1


@dataclass(frozen=True)
class PopulationBatch:
    """One round of variation and selection."""

    candidates: EvaluationBatch
    scores: Scores
    windows: Transitions  # with the records `achieved` and `wanted` (B, C), the descriptors of their episodes
