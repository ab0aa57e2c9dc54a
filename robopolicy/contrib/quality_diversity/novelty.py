"""Selection by novelty and by Pareto dominance, for searches without rewards.

Behaviours are vectors `(K, C)`, measured or learned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robopolicy.core.dominance import dominance_matrix


def novelty(behaviours: Tensor, reference: Tensor, neighbours: int, *, within: bool = True) -> Tensor:
    """Mean distance `(K,)` to the nearest behaviours of a reference set (Lehman and Stanley 2011).

    Args:
        behaviours: (K, C).
        reference: (M, C).
        neighbours: Number of nearest neighbours.
        within: The behaviours are in the reference set, and their distance of 0 to themselves does not count.
    """
    first = 1 if within else 0
    nearest = torch.cdist(behaviours, reference).sort(1).values[:, first : first + neighbours]
    return nearest.mean(1) if nearest.shape[1] else torch.full((len(behaviours),), math.inf, dtype=nearest.dtype)


def pareto_ranks(first: Tensor, second: Tensor) -> Tensor:
    """Rank `(K,)` of the Pareto front of each row, 0 for the rows that no other dominates (Deb et al. 2002).

    Args:
        first: (K,) objective to maximise.
        second: (K,) the other objective.
    """
    dominated = dominance_matrix(torch.stack([first, second], 1))
    rank = torch.full((len(first),), -1)
    for place in range(len(first)):
        left = rank < 0
        if not bool(left.any()):
            break
        rank[left & ~(dominated & left[:, None]).any(0)] = place
    return rank


def crowding(first: Tensor, second: Tensor) -> Tensor:
    """Crowding distance `(K,)` in a front, in units of the range; infinite at the ends."""
    distance = torch.zeros(len(first), dtype=torch.float64)
    for values in (first.double(), second.double()):
        order = values.argsort(stable=True)
        spread = float(values.max() - values.min()) or math.inf
        distance[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / spread
        distance[order[[0, -1]]] = math.inf
    return distance


def select_diverse(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Rows of the `count` best by both objectives: front by front, with the least crowded first (NSGA-II)."""
    rank = pareto_ranks(first, second)
    distance = torch.zeros(len(rank), dtype=torch.float64)
    for place in rank.unique():
        rows = (rank == place).nonzero().flatten()
        distance[rows] = crowding(first[rows], second[rows])
    by_distance = distance.argsort(descending=True, stable=True)
    return by_distance[rank[by_distance].argsort(stable=True)][:count]
