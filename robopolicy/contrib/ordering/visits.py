"""Visit orders by a network, and its training by imitation of shortest paths (BQ-NCO, Drakulic et al. 2023).

    policy = train_visits(VisitConfig(), updates=2000)
    order = order_visits(points, start, end, policy=policy)

After every visit the remaining problem is an instance of the same kind, with a new start and fewer points. The end of a
shortest path is a shortest path, so one solved instance of n points gives n - 1 training steps. The network learns the
next point by cross-entropy; at run time the best one is taken, without a search.

Use it above a policy: it selects the next goal, and the policy moves there. Up to twelve visits are ordered exactly,
which is faster; use the network for more, or for large batches.

Deviations: Euclidean paths with a free or a given end only, not the paper's asymmetric, capacitated, orienteering and
knapsack problems; labels are exact paths through few points instead of a solver's through a hundred; pre-norm blocks
instead of ReZero; coordinates are relative to the current position, in units of the farthest point.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.contrib.ordering.exact import MOST, nearest_orders, path_length, shortest_orders
from robopolicy.contrib.ordering.network import VisitConfig, VisitPolicy
from robopolicy.errors import UserError

INSTANCES = 2048  # solved instances of a training run


@torch.no_grad()
def order_visits(
    points: Tensor, start: Tensor, end: Tensor | None = None, *, policy: VisitPolicy | None = None
) -> Tensor:
    """Order points for a visit: indices `(n,)`, or `(B, n)` for a batch.

    Args:
        points: `(n, d)` or `(B, n, d)`, in any unit.
        start: `(d,)` or `(B, d)` current position.
        end: `(d,)` or `(B, d)` final position; None: at any of the points. For a round trip pass `start`.
        policy: Trained network; None: the shortest path, for few points.

    Raises:
        UserError: Shapes do not fit, numbers are not finite, or there are too many points for the exact solution.
    """
    given = [points, start, *([] if end is None else [end])]
    batched = points.dim() == 3
    expected = points.shape[:-2] + points.shape[-1:]
    if points.dim() not in (2, 3) or any(value.shape != expected for value in given[1:]):
        found = " and ".join(str(tuple(value.shape)) for value in given)
        raise UserError(f"Visits need points (n, d) or (B, n, d), start and end (d,) or (B, d), got {found}.")
    if not all(bool(value.isfinite().all()) for value in given):
        raise UserError("Visits need finite coordinates; remove NaN and infinite ones.")
    if policy is not None and points.shape[-1] != policy.config.dim:
        raise UserError(f"The policy orders points of {policy.config.dim} coordinates, got {points.shape[-1]}.")
    if not batched:
        points, start, end = points[None], start[None], None if end is None else end[None]
    order = shortest_orders(points, start, end) if policy is None else _roll_out(policy, points, start, end)
    return order if batched else order[0]


EXACT = 8  # maximum visits for which the table contains shortest paths


def _roll_out(policy: VisitPolicy, points: Tensor, start: Tensor, end: Tensor | None) -> Tensor:
    """Select one visit after the other."""
    rows, count = points.shape[:2]
    row = torch.arange(rows, device=points.device)
    left = torch.arange(count, device=points.device).expand(rows, -1)  # (B, points left)
    here, order = start, list[Tensor]()
    for _ in range(count):
        rest = points.gather(1, left[..., None].expand(-1, -1, points.shape[-1]))
        chosen = policy(rest, here, end).argmax(1)
        here = rest[row, chosen]
        order.append(left[row, chosen])
        kept = torch.ones_like(left, dtype=torch.bool).scatter(1, chosen[:, None], False)
        left = left[kept].view(rows, -1)
    return torch.stack(order, 1) if order else left


def optimal_steps(points: Tensor, order: Tensor, start: Tensor, done: int) -> tuple[Tensor, Tensor, Tensor]:
    """State after the first `done` visits of a path, and the index of the next point.

    Args:
        points: `(B, n, d)`.
        order: `(B, n)` shortest paths.
        start: `(B, d)`.
        done: Completed visits, less than n.

    Returns:
        Remaining points `(B, n - done, d)` in index order, position `(B, d)`, index `(B,)` of the next point.
    """
    left = order[:, done:].sort(1).values
    rest = points.gather(1, left[..., None].expand(-1, -1, points.shape[-1]))
    row = torch.arange(len(points), device=points.device)
    here = points[row, order[:, done - 1]] if done else start
    return rest, here, (left == order[:, done : done + 1]).long().argmax(1)


def train_visits(
    config: VisitConfig,
    *,
    updates: int = 2000,
    visits: int = 8,
    batch: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> VisitPolicy:
    """Train a policy on shortest paths through points drawn from the unit cube.

    Args:
        config: Size of the network.
        updates: Gradient steps of Adam, with cosine decay to 0.
        visits: Points per instance; half of the instances have a free end, the others a given one.
        batch: Steps per update, all with the same number of remaining points.
        lr: Initial learning rate.
        seed: Of weights, instances and batches.
        progress: Called after every update with their number and the loss.

    Raises:
        UserError: There are too many points for exact paths, or fewer than two.
    """
    if not 2 <= visits <= MOST or min(updates, batch) < 1:
        raise UserError(f"Training needs 2 to {MOST} visits, updates and batch >= 1, got {visits}, {updates}, {batch}.")
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = VisitPolicy(config)
    shape = (INSTANCES, visits, config.dim)
    points = torch.rand(shape, generator=generator)
    start, end = (torch.rand(INSTANCES, config.dim, generator=generator) for _ in range(2))
    ways = {False: shortest_orders(points, start), True: shortest_orders(points, start, end)}
    optimizer = torch.optim.Adam(policy.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for update in range(updates):
        rows = torch.randint(INSTANCES, (batch,), generator=generator)
        done, ends = int(torch.randint(visits - 1, (1,), generator=generator)), update % 2 == 1
        rest, here, following = optimal_steps(points[rows], ways[ends][rows], start[rows], done)
        loss = torch.nn.functional.cross_entropy(policy(rest, here, end[rows] if ends else None), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(update + 1, loss.item())
    return policy.eval()


def ratios(policy: VisitPolicy, count: int, instances: int = 128, seed: int = 1) -> tuple[float, float | None]:
    """Mean path length relative to the nearest neighbour's and, up to `EXACT` visits, to the shortest path's."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(instances, count, policy.config.dim, generator=generator)
    start = torch.rand(instances, policy.config.dim, generator=generator)
    length = path_length(points, order_visits(points, start, policy=policy), start).mean()
    near = path_length(points, nearest_orders(points, start), start).mean()
    if count > EXACT:
        return float(length / near), None
    best = path_length(points, shortest_orders(points, start), start).mean()
    return float(length / near), float(length / best)
