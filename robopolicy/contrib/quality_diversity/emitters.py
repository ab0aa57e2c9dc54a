"""Emitters: small populations that climb from one policy that was paid, each in its own place.

As in SERENE and STAX (Paolo et al. 2021). An emitter starts with mutants of the policy that it was made for. Every
generation adds two mutants of each of its members and keeps those that earn most. Ask for what is to be played, tell
what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.contrib.quality_diversity.individuals import Individuals

TRIAL = 6  # generations after which an emitter has shown whether it gets anywhere
RECENT = 3  # generations whose mean is compared with that of the first ones
CHILDREN = 2  # per member and generation
WINDOW = 20  # generations that are compared to see whether there is progress still


def mutated(weights: Tensor, sigma: float, limit: float, generator: torch.Generator) -> Tensor:
    """`weights` `(K, D)` with noise on every number, kept within `limit`."""
    return (weights + sigma * torch.randn(weights.shape, generator=generator)).clamp(-limit, limit)


class Emitter:
    """One of them."""

    def __init__(self, ancestor: Individuals, *, sigma: float, size: int, limit: float) -> None:
        """Make it for one policy.

        Args:
            ancestor: The policy, one row.
            sigma: Standard deviation of the mutation of every weight.
            size: Members.
            limit: Largest absolute weight.
        """
        self.ancestor, self.sigma, self.size, self.limit = ancestor, sigma, size, limit
        self.members = ancestor[:0]
        self.earned: list[Tensor] = []  # fitness (size,) of the members, by generation
        self.improvement = 0.0
        self.stored: float | None = None  # fitness of the best one that was put by
        self.novel = ancestor[:0]  # those that were more unlike others than any before them
        self.most_novel = 0.0

    @property
    def tried(self) -> bool:
        """Whether its trial is over."""
        return len(self.earned) >= TRIAL

    @property
    def just_tried(self) -> bool:
        """Whether it has ended with the last generation."""
        return len(self.earned) == TRIAL

    @property
    def count(self) -> int:
        """K of the next `ask`."""
        return CHILDREN * self.size if len(self.members) else self.size

    def ask(self, generator: torch.Generator) -> Tensor:
        """Weights `(K, D)` to play next."""
        parents = self.members if len(self.members) else self.ancestor
        parents = parents.weights.repeat_interleave(self.count // len(parents), 0)
        return mutated(parents, self.sigma, self.limit, generator)

    def tell(self, found: Individuals) -> None:
        """Hear what came of them."""
        everyone = self.members + found
        best = everyone.fitness.argsort(descending=True, stable=True)[: self.size]
        self.members = everyone[best]
        self.earned.append(self.members.fitness)

    def fresh(self, floor: float) -> Individuals:
        """Members to put by: the best one if it earns more than `floor`, later those better than all before."""
        better = self.members.fitness > (floor if self.stored is None else self.stored)
        rows = better.nonzero().flatten()[: 1 if self.stored is None else None]  # members are sorted
        if len(rows):
            self.stored = float(self.members.fitness[rows[0]])
        return self.members[rows]

    def note(self, found: Individuals, novelty: Tensor) -> None:
        """Remember those of `found` whose `novelty` `(K,)` is greater than that of all before."""
        self.novel = self.novel + found[novelty > self.most_novel]
        self.most_novel = max(self.most_novel, float(novelty.max()))

    def rate(self) -> None:
        """Measure by how much its members earn more than in the beginning; 0 where they earn less."""
        means = torch.stack(self.earned).mean(1)
        self.improvement = max(float(means[-RECENT:].mean() - means[:RECENT].mean()), 0.0)

    def stale(self, patience: int) -> bool:
        """Whether neither the members in the middle nor the best one earn more than `patience` generations ago."""
        if len(self.earned) <= patience:
            return False
        earned = torch.stack(self.earned[-patience:])
        old, new = earned[:WINDOW], earned[-WINDOW:]
        return bool(old.median() >= new.median()) or bool(old.max() >= new.max())

    def state_dict(self) -> dict[str, Any]:
        """Everything."""
        kept = {name: value for name, value in vars(self).items() if not isinstance(value, Individuals)}
        people = {name: getattr(self, name).state_dict() for name in ("ancestor", "members", "novel")}
        return {**kept, "earned": list(self.earned), "people": people}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Emitter:
        """The emitter of `state_dict`."""
        people = {name: Individuals.load(found) for name, found in state["people"].items()}
        emitter = cls(people["ancestor"], sigma=state["sigma"], size=state["size"], limit=state["limit"])
        vars(emitter).update({name: value for name, value in state.items() if name != "people"} | people)
        emitter.earned = list(state["earned"])
        return emitter
