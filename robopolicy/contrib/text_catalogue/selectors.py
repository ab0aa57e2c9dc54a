"""Selectors of single methods for the training rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, PositiveInt
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions, by_group, by_trajectory, first_rows
from robopolicy.core.segments import Segments


def positive(
    decisions: Decisions, generator: torch.Generator | None, *, key: str = "mean_ref", share: Fraction = 1.0
) -> Tensor:
    """Select trajectories better than the mean of the reference policy, weighted by the difference.

    Source: A-LoL, Baheti et al. 2023.

    `extra[key]` (N,) is the mean outcome of the reference policy. A `share` of the trajectories above it is drawn in
    proportion to the advantage, without replacement; 1 selects all.
    """
    first = first_rows(decisions)
    advantage = (outcome(decisions) - decisions.require_extra(key, per_decision=True))[first, 0].clamp(min=0.0)
    count = int((advantage > 0).sum())
    if count == 0:
        return first[:0]
    size = count if share >= 1.0 else max(int(share * count), 1)
    place = "cpu" if generator is None else generator.device
    drawn = torch.multinomial(advantage.to(place), size, generator=generator).to(first.device)
    return _with_all_rows(decisions, first[drawn])


def unlikely(
    decisions: Decisions, generator: torch.Generator | None, *, key: str = "likelihood", below: float = 1.0
) -> Tensor:
    """Select groups whose solution is unlikely under the base policy, `extra[key]` (N,) in [0, 1].

    Source: SELF, Nguyen et al. 2025.
    """
    return torch.nonzero(decisions.require_extra(key) <= below).squeeze(1)


@dataclass(frozen=True)
class Diverse:
    """The most different trajectories of every group (DED, Wu et al. 2025).

    The distance is the Jaccard distance of their pairs of consecutive decisions, `extra["chosen"]` (N, T) int. Starting
    from the first trajectory, the farthest from all selected ones is added.
    """

    keep: PositiveInt = 2  # of a group

    def __call__(self, decisions: Decisions, generator: torch.Generator | None) -> Tensor:
        """Select row indices (M,)."""
        chosen = decisions.require_extra("chosen")
        ids = _integers(by_trajectory(decisions).squeeze(1))
        pairs: dict[int, set[tuple[int, int]]] = {}
        for owner, row, valid in zip(ids, chosen, decisions.valid(), strict=True):
            pairs.setdefault(owner, set()).update(pairwise(_integers(row[valid])))
        first = first_rows(decisions)
        groups: dict[int, list[int]] = {}
        for place, group in zip(_integers(first), _integers(decisions.require("group")[first]), strict=True):
            groups.setdefault(group, []).append(place)
        kept = [
            place for places in groups.values() for place in self._farthest(places, [pairs[ids[p]] for p in places])
        ]
        return _with_all_rows(decisions, torch.tensor(sorted(kept), dtype=torch.int64, device=first.device))

    def _farthest(self, places: list[int], sets: list[set[tuple[int, int]]]) -> list[int]:
        chosen, near = [0], [_distance(sets[0], other) for other in sets]
        while len(chosen) < min(self.keep, len(places)):
            rest = [number for number in range(len(places)) if number not in chosen]
            best = max(rest, key=lambda number: near[number])
            chosen.append(best)
            near = [min(old, _distance(sets[best], other)) for old, other in zip(near, sets, strict=True)]
        return [places[number] for number in chosen]


def _distance(one: set[tuple[int, int]], other: set[tuple[int, int]]) -> float:
    """Compute the Jaccard distance, 0 for equal sets and 1 for disjoint ones."""
    union = len(one | other)
    return 1.0 - len(one & other) / union if union else 0.0


@dataclass(frozen=True)
class Extremes:
    """Best and worst trajectory of every group, for reward models that are reliable at the extremes.

    Source: PF-PPO, Shen and Zhang 2024.

    A random fraction `rest` of the others is added.
    """

    rest: Fraction = 0.0  # share in [0, 1]

    def __call__(self, decisions: Decisions, generator: torch.Generator | None) -> Tensor:
        """Select row indices (M,)."""
        chosen: list[Tensor] = []
        place = "cpu" if generator is None else generator.device
        for rows, reward in _groups(decisions):
            order = torch.argsort(reward, stable=True)
            others = order[1:-1]
            drawn = torch.randperm(len(others), generator=generator, device=place)[: round(self.rest * len(others))]
            ends = order[[0, -1]] if len(order) > 1 else order
            chosen.append(rows[torch.cat([ends, others[drawn.to(others.device)]])])
        return _with_all_rows(decisions, torch.cat(chosen))


@dataclass(frozen=True)
class Contrast:
    """Best and worst trajectories of every group, `keep` in total (trajectory selection, Cheng et al. 2026).

    Among equal outcomes, shorter trajectories count as better.
    """

    keep: PositiveInt = 4

    def __call__(self, decisions: Decisions, generator: torch.Generator | None) -> Tensor:
        """Select row indices (M,)."""
        length = Segments(by_trajectory(decisions), decisions.valid())
        steps = length.broadcast(length.count)[:, 0]
        chosen: list[Tensor] = []
        for rows, reward in _groups(decisions):
            order = torch.argsort(steps[rows], descending=True, stable=True)
            order = order[torch.argsort(reward[order], stable=True)]  # worst and longest first
            ends = [order[: self.keep // 2], order[len(order) - (self.keep + 1) // 2 :]]
            chosen.append(rows[torch.cat(ends) if len(order) > self.keep else order])
        return _with_all_rows(decisions, torch.cat(chosen))


@dataclass(frozen=True)
class DemonstrationSwitch:
    """Either the rows of the policy or the demonstrations of a group (HPT, Lv et al. 2025).

    Groups with at most `gate` successes of the policy keep only the rows of other sources, if there are any; all other
    groups keep only rows of source 0. With a negative gate, nothing is imitated.
    """

    gate: int = 0
    above: float = 0.0  # outcomes above are successes

    def __call__(self, decisions: Decisions, generator: torch.Generator | None) -> Tensor:
        """Select row indices (M,)."""
        group, own = by_group(decisions), (decisions.require("source") == 0).unsqueeze(1)
        first = torch.zeros_like(own)
        first[first_rows(decisions)] = True
        successes = Segments(group, first & own)
        solved = successes.broadcast(successes.sum((outcome(decisions) > self.above).to(decisions.logp_old.dtype)))
        shown = Segments(group, ~own)
        imitate = (solved <= self.gate) & (shown.broadcast(shown.count) > 0)
        return torch.nonzero((imitate != own).squeeze(1)).squeeze(1)


def _groups(decisions: Decisions) -> list[tuple[Tensor, Tensor]]:
    """Return first row (K,) and outcome (K,) of the trajectories of each group."""
    first = first_rows(decisions)
    group, reward = by_group(decisions)[first, 0], outcome(decisions)[first, 0]
    ids = Segments(group, torch.ones_like(reward, dtype=torch.bool))
    return [(first[ids.index == i], reward[ids.index == i]) for i in range(ids.size)]


def _with_all_rows(decisions: Decisions, first: Tensor) -> Tensor:
    """Return all rows, in order, of the trajectories of the given rows."""
    trajectory = by_trajectory(decisions).squeeze(1)
    return torch.nonzero(torch.isin(trajectory, trajectory[first])).squeeze(1)


def _integers(values: Tensor) -> list[int]:
    return [int(value) for value in values]
