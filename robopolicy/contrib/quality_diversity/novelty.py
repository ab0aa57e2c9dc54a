"""What makes a policy worth keeping when nothing has paid yet: being unlike others, and not being beaten by any.

Behaviours are vectors `(K, C)`, whatever measures or learns them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def novelty(behaviours: Tensor, reference: Tensor, neighbours: int, *, within: bool = True) -> Tensor:
    """Mean distance `(K,)` to the nearest behaviours of a reference set (Lehman and Stanley 2011).

    Args:
        behaviours: (K, C).
        reference: (M, C).
        neighbours: How many of the nearest.
        within: Every behaviour is in the reference set itself, and that one distance of 0 does not count.
    """
    first = 1 if within else 0
    nearest = torch.cdist(behaviours, reference).sort(1).values[:, first : first + neighbours]
    return nearest.mean(1) if nearest.shape[1] else torch.full((len(behaviours),), math.inf, dtype=nearest.dtype)


def beats(values: Tensor) -> Tensor:
    """Whether `[i, j]` row i of objectives `(K, O)`, higher is better, is nowhere worse than j and somewhere better."""
    mine, other = values[:, None], values
    return (mine >= other).all(2) & (mine > other).any(2)


def front_numbers(first: Tensor, second: Tensor) -> Tensor:
    """Rank `(K,)` of the front each one is in, 0 for those that no other beats (Deb et al. 2002).

    Args:
        first: (K,) objective to maximise.
        second: (K,) the other one.
    """
    beaten = beats(torch.stack([first, second], 1))
    rank = torch.full((len(first),), -1)
    for place in range(len(first)):
        left = rank < 0
        if not bool(left.any()):
            break
        rank[left & ~(beaten & left[:, None]).any(0)] = place
    return rank


def crowding(first: Tensor, second: Tensor) -> Tensor:
    """Room `(K,)` that each one of a front has to itself, in units of the spread; infinite at the ends."""
    room = torch.zeros(len(first), dtype=torch.float64)
    for values in (first.double(), second.double()):
        order = values.argsort(stable=True)
        spread = float(values.max() - values.min()) or math.inf
        room[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / spread
        room[order[[0, -1]]] = math.inf
    return room


def spread_out(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Rows of the `count` best by both objectives: front by front, first those with the most room (NSGA-II)."""
    rank = front_numbers(first, second)
    room = torch.zeros(len(rank), dtype=torch.float64)
    for place in rank.unique():
        rows = (rank == place).nonzero().flatten()
        room[rows] = crowding(first[rows], second[rows])
    by_room = room.argsort(descending=True, stable=True)
    return by_room[rank[by_room].argsort(stable=True)][:count]
