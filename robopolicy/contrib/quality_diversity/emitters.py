"""Emitters: small local populations that improve one rewarded policy each.

Source: SERENE and STAX (Paolo et al. 2021). An emitter starts with mutants of its ancestor. Every generation adds two
mutants of each member and keeps the members with the highest return. The interface is `ask` for weights to evaluate and
`tell` for their results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.contrib.quality_diversity.individuals import EvaluatedPolicies

TRIAL = 6  # generations of the trial, after which an emitter has an improvement
RECENT = 3  # generations whose mean is compared with the first ones
CHILDREN = 2  # per member and generation
WINDOW = 20  # generations that are compared to detect progress


def mutated(weights: Tensor, sigma: float, limit: float, generator: torch.Generator) -> Tensor:
    """Add noise to `weights` `(K, D)` and clip them to `limit`."""
    return (weights + sigma * torch.randn(weights.shape, generator=generator)).clamp(-limit, limit)


class Emitter:
    """Local population around one rewarded policy."""

    def __init__(self, ancestor: EvaluatedPolicies, *, sigma: float, size: int, limit: float) -> None:
        """Create the emitter of one policy.

        Args:
            ancestor: The policy, one row.
            sigma: Standard deviation of the mutation of every weight.
            size: Members.
            limit: Maximum absolute weight.
        """
        self.ancestor, self.sigma, self.size, self.limit = ancestor, sigma, size, limit
        self.members = ancestor[:0]
        self.earned: list[Tensor] = []  # fitness (size,) of the members, by generation
        self.improvement = 0.0
        self.stored: float | None = None  # fitness of the best stored member
        self.novel = ancestor[:0]  # members with record novelty
        self.most_novel = 0.0

    @property
    def is_evaluated(self) -> bool:
        """Whether its trial is over."""
        return len(self.earned) >= TRIAL

    @property
    def just_evaluated(self) -> bool:
        """Whether the trial ended with the last generation."""
        return len(self.earned) == TRIAL

    @property
    def count(self) -> int:
        """Number K of weights that `ask` returns next."""
        return CHILDREN * self.size if len(self.members) else self.size

    def ask(self, generator: torch.Generator) -> Tensor:
        """Weights `(K, D)` to evaluate next."""
        parents = self.members if len(self.members) else self.ancestor
        parents = parents.weights.repeat_interleave(self.count // len(parents), 0)
        return mutated(parents, self.sigma, self.limit, generator)

    def tell(self, found: EvaluatedPolicies) -> None:
        """Update the members with the results of `ask`."""
        everyone = self.members + found
        best = everyone.fitness.argsort(descending=True, stable=True)[: self.size]
        self.members = everyone[best]
        self.earned.append(self.members.fitness)

    def fresh(self, floor: float) -> EvaluatedPolicies:
        """Members to store: first the best one if its fitness exceeds `floor`, later those better than all before."""
        better = self.members.fitness > (floor if self.stored is None else self.stored)
        rows = better.nonzero().flatten()[: 1 if self.stored is None else None]  # members are sorted
        if len(rows):
            self.stored = float(self.members.fitness[rows[0]])
        return self.members[rows]

    def record_novel(self, found: EvaluatedPolicies, novelty: Tensor) -> None:
        """Store the policies of `found` whose `novelty` `(K,)` exceeds all earlier values."""
        self.novel = self.novel + found[novelty > self.most_novel]
        self.most_novel = max(self.most_novel, float(novelty.max()))

    def rate(self) -> None:
        """Set `improvement` to the increase of the members' return since the start, at least 0."""
        means = torch.stack(self.earned).mean(1)
        self.improvement = max(float(means[-RECENT:].mean() - means[:RECENT].mean()), 0.0)

    def stale(self, patience: int) -> bool:
        """Whether neither the median nor the maximum return of the members has risen in `patience` generations."""
        if len(self.earned) <= patience:
            return False
        earned = torch.stack(self.earned[-patience:])
        old, new = earned[:WINDOW], earned[-WINDOW:]
        return bool(old.median() >= new.median()) or bool(old.max() >= new.max())

    def state_dict(self) -> dict[str, Any]:
        """State of the emitter."""
        kept = {name: value for name, value in vars(self).items() if not isinstance(value, EvaluatedPolicies)}
        people = {name: getattr(self, name).state_dict() for name in ("ancestor", "members", "novel")}
        return {**kept, "earned": list(self.earned), "people": people}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Emitter:
        """Create the emitter of `state_dict`."""
        people = {name: EvaluatedPolicies.load(found) for name, found in state["people"].items()}
        emitter = cls(people["ancestor"], sigma=state["sigma"], size=state["size"], limit=state["limit"])
        vars(emitter).update({name: value for name, value in state.items() if name != "people"} | people)
        emitter.earned = list(state["earned"])
        return emitter
