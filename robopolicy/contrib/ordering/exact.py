"""Shortest paths through a few points, by dynamic programming (Held and Karp 1962), and path lengths.

Points are `(B, n, d)` with Euclidean distances; every path begins at `start` `(B, d)` and ends at `end` `(B, d)`, if
given. An order `(B, n)` contains the indices of the points in the order of their visits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.errors import UserError

MOST = 12  # maximum number of points


def path_length(points: Tensor, order: Tensor, start: Tensor, end: Tensor | None = None) -> Tensor:
    """Length `(B,)` of the path from `start` through the points in `order`, and to `end`."""
    stops = [start[:, None], points.gather(1, order[..., None].expand(-1, -1, points.shape[-1]))]
    way = torch.cat([*stops, *([end[:, None]] if end is not None else [])], 1)
    return way.diff(dim=1).norm(dim=-1).sum(1)


def nearest_orders(points: Tensor, start: Tensor) -> Tensor:
    """Order `(B, n)` of the nearest neighbour heuristic, the baseline."""
    here, left = start, torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
    order: list[Tensor] = []
    for _ in range(points.shape[1]):
        distance = (points - here[:, None]).norm(dim=-1).masked_fill(~left, torch.inf)
        chosen = distance.argmin(1)
        order.append(chosen)
        left = left.scatter(1, chosen[:, None], False)
        here = points[torch.arange(len(points), device=points.device), chosen]
    return torch.stack(order, 1) if order else points.new_zeros(len(points), 0, dtype=torch.long)


def shortest_orders(points: Tensor, start: Tensor, end: Tensor | None = None) -> Tensor:
    """Order `(B, n)` of the shortest path.

    Raises:
        UserError: There are more than `MOST` points, which would take too long.
    """
    rows, count = points.shape[:2]
    if count > MOST:
        raise UserError(f"{count} visits are too many to order exactly, at most {MOST}; pass a trained policy.")
    if count == 0:
        return points.new_zeros(rows, 0, dtype=torch.long)
    between = torch.cdist(points, points)  # (B, n, n)
    first = (points - start[:, None]).norm(dim=-1)  # (B, n)
    last = torch.zeros_like(first) if end is None else (points - end[:, None]).norm(dim=-1)
    # cost[visited][:, j]: shortest path through the set `visited` that ends at its element j
    cost = points.new_full((1 << count, rows, count), torch.inf)
    before = torch.zeros(1 << count, rows, count, dtype=torch.long, device=points.device)
    for j in range(count):
        cost[1 << j, :, j] = first[:, j]
    for visited in range(1, 1 << count):
        for j in range(count):
            rest = visited & ~(1 << j)
            if not visited >> j & 1 or not rest:
                continue
            cost[visited, :, j], before[visited, :, j] = (cost[rest] + between[:, :, j]).min(1)
    visited = torch.full((rows,), (1 << count) - 1, device=points.device)
    here = (cost[-1] + last).argmin(1)
    row = torch.arange(rows, device=points.device)
    order = [here]
    for _ in range(count - 1):
        previous = before[visited, row, here]
        visited = visited & ~(1 << here)
        here = previous
        order.append(here)
    return torch.stack(order[::-1], 1)
