"""Search for pushes, and for paths around the block to the start of a push."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robopolicy_tasks.push_t import tee
from robopolicy_tasks.push_t.tee import FINGER, HULL, INNER, OUTLINE, Array

GAP = 7.0  # [px] initial gap between finger and block
MAX_STROKE = 130.0  # [px] length of one push, including the gap to the block
STRIDE = 2.0  # [px] resolution of the lengths of the first push
COARSE = 4.0  # [px] resolution for later pushes
SPACING = 9.0  # [px] between neighbouring contact points
BEAM = 48  # beam width of the search
DEPTH = 3  # pushes to look ahead
PUSH_COST = 2.5  # [px] cost of one more push
WAY_COST = 0.01  # cost of path length [px of error per px]
WALLS = (9.0, 503.0)  # [px] range of the corners of the block
REACH = (3.0, 509.0)  # [px] range of the finger
CLEAR = 17.5  # [px] minimum distance of the finger centre from the block on paths
AROUND = 32.0  # [px] from the corners of the block to the waypoints
_DIAGONALS = np.array([[-1, -1], [1, -1], [1, 1], [1, 1], [-1, 1], [-1, 1]]) / np.sqrt(
    2
)  # outwards at each hull corner


@dataclass(frozen=True)
class Push:
    """Straight stroke of the finger."""

    start: Array  # (2,) [px] in the arena, clear of the block
    end: Array  # (2,) [px]

    @property
    def length(self) -> float:
        """Length of the stroke [px]."""
        return float(np.linalg.norm(self.end - self.start))

    @property
    def direction(self) -> Array:
        """Direction of the stroke, a unit vector `(2,)`."""
        return (self.end - self.start) / self.length


def _contacts() -> tuple[Array, Array]:
    """Contact points on the outline `(C, 2)`, accessible to the finger, and directions into the block `(C, 2)`."""
    points: list[Array] = []
    normals: list[Array] = []
    for k in range(len(OUTLINE)):
        a, b = OUTLINE[k], OUTLINE[(k + 1) % len(OUTLINE)]
        side = (b - a) / np.linalg.norm(b - a)
        normal = np.array([-side[1], side[0]])  # the outline runs counter-clockwise, so this points inwards
        first = FINGER + 2.0 if k in INNER else 3.0
        last = np.linalg.norm(b - a) - (FINGER + 2.0 if (k + 1) % len(OUTLINE) in INNER else 3.0)
        for along in np.linspace(first, last, max(2, round((last - first) / SPACING) + 1)):
            points.append(a + along * side)
            normals.append(normal)
    return np.stack(points), np.stack(normals)


CONTACTS, NORMALS = _contacts()


def plan(pose: Array, finger: Array, rng: np.random.Generator) -> Push | None:
    """First of up to `DEPTH` pushes that bring the block at `pose` `(3,)` closest to its target; None if unreachable.

    Pushes and the paths to them have costs, so that a small push nearby is not always preferred to a good push on the
    other side. `rng` breaks ties.
    """
    root = _strokes(pose[None], STRIDE)
    spent = PUSH_COST + WAY_COST * _distance(root.start[0], finger)  # (C,)
    total = _score(root) + spent + rng.uniform(0.0, 0.3, spent.shape)  # (S, C)
    total[(root.poses == pose).all(-1)] = np.inf  # strokes that do not reach the block
    best = total.copy()  # (S, C) lowest total of the plans with this first push
    level, first, stride = root, np.arange(total.size), STRIDE
    for _ in range(1, DEPTH):
        chosen = _beam(total.reshape(-1), level.poses.reshape(-1, 3))  # (B,)
        if not len(chosen):
            break
        step, column = np.unravel_index(chosen, total.shape)
        ends = level.ends(column, stride * (step + 1.0))
        poses, first, spent = level.poses[step, column], first[chosen], spent[column]
        level, stride = _strokes(poses, COARSE), COARSE
        paths = _distance(level.start, ends[:, None])  # (B, C)
        spent = (spent[:, None] + PUSH_COST + WAY_COST * paths).reshape(-1)
        total = _score(level) + spent  # (S, B C)
        first = np.tile(first.repeat(len(CONTACTS)), len(total))
        np.minimum.at(best.reshape(-1), first, total.reshape(-1))
    for contact in best.min(0).argsort().tolist():
        start, direction = root.start[0, contact], root.direction[0, contact]
        if np.isfinite(best[:, contact]).any() and waypoint(finger, start, pose) is not None:
            return Push(start, start + (int(best[:, contact].argmin()) + 1) * STRIDE * direction)
    return None


def _distance(points: Array, other: Array) -> Array:
    """Distance `(...)` [px] of points `(..., 2)` from `other`."""
    return np.sqrt(np.square(points - other).sum(-1))


@dataclass(frozen=True)
class _Strokes:
    """Pushes at all contact points of K poses: column `k C + c` is contact c of pose k."""

    start: Array  # (K, C, 2)
    direction: Array  # (K, C, 2)
    poses: Array  # (S, K C, 3) along the strokes
    unreachable: NDArray[np.bool_]  # (K C,) start outside of the arena

    def ends(self, column: NDArray[np.intp], length: NDArray[np.floating]) -> Array:
        """Position `(B, 2)` of the finger after `length` `(B,)` [px] of the strokes in `column` `(B,)`."""
        return self.start.reshape(-1, 2)[column] + length[:, None] * self.direction.reshape(-1, 2)[column]


def _strokes(pose: Array, stride: float) -> _Strokes:
    start = tee.to_world(CONTACTS - (FINGER + GAP) * NORMALS, pose)
    direction = tee.to_world(NORMALS, np.concatenate([np.zeros((len(pose), 2)), pose[:, 2:]], 1))
    many = pose.repeat(len(CONTACTS), axis=0)
    poses = tee.push(many, start.reshape(-1, 2), direction.reshape(-1, 2), MAX_STROKE, stride)
    unreachable = ((start < REACH[0]) | (start > REACH[1])).any(-1).reshape(-1)
    return _Strokes(start, direction, poses, unreachable)


def _score(strokes: _Strokes) -> Array:
    """Error of the poses `(S, K C)` [px], including violations of the walls."""
    flat = strokes.poses.reshape(-1, 3)
    corners = tee.to_world(OUTLINE, flat)
    outside = np.maximum(WALLS[0] - corners, corners - WALLS[1]).clip(0.0).max((1, 2))
    total = (tee.error(flat) + 3.0 * outside).reshape(strokes.poses.shape[:2])
    return np.where(strokes.unreachable[None, :], np.inf, total)


def _beam(score: Array, poses: Array) -> NDArray[np.intp]:
    """Select the `BEAM` best entries that differ by a few pixels or degrees."""
    chosen: dict[tuple[int, ...], int] = {}
    order = score.argsort()[: min(40 * BEAM, int(np.isfinite(score).sum()))]
    for index in order.tolist():
        cell = tuple(np.round(poses[index] / (6.0, 6.0, 0.1)).astype(int).tolist())
        chosen.setdefault(cell, index)
        if len(chosen) == BEAM:
            break
    return np.array(list(chosen.values()), np.intp)


def waypoint(finger: Array, target: Array, pose: Array) -> Array | None:
    """Next point `(2,)` of the shortest contact-free path from `finger` to `target` `(2,)`; None if there is none."""
    corners = tee.to_world(OUTLINE[list(HULL)] + AROUND * _DIAGONALS, pose[None])[0]
    inside = ((corners > REACH[0]) & (corners < REACH[1])).all(1)
    nodes = np.concatenate([finger[None], target[None], corners[inside]])
    free, length = _visibility_graph(nodes, pose)
    before = _dijkstra(free, length)
    if before[1] < 0:
        return None
    node = 1
    while before[node] != 0:
        node = before[node]
    return target if node == 1 else nodes[node]


def _visibility_graph(nodes: Array, pose: Array) -> tuple[NDArray[np.bool_], Array]:
    """Visibility graph around the block: mask of free edges and their lengths, `(P, P)` each."""
    fraction = np.linspace(0.0, 1.0, 33)[:, None]
    line = nodes[:, None, None] * (1.0 - fraction) + nodes[None, :, None] * fraction  # (P, P, 33, 2)
    gaps = tee.clearance(tee.to_block(line.reshape(1, -1, 2), pose[None])).reshape(line.shape[:3])
    ends = np.minimum(gaps[..., 0], gaps[..., -1])  # a finger that is too close may move away
    free = gaps.min(-1) >= np.minimum(CLEAR, ends - 0.1)
    return free, np.sqrt(np.square(nodes[:, None] - nodes[None]).sum(-1))


def _dijkstra(free: NDArray[np.bool_], length: Array) -> list[int]:
    """Predecessor of every node on the shortest path from node 0, -1 if there is none."""
    before, distance = [-1] * len(length), [np.inf] * len(length)
    distance[0] = 0.0
    queue = [(0.0, 0)]
    while queue:
        far, node = heapq.heappop(queue)
        if far > distance[node]:
            continue
        for other in np.flatnonzero(free[node]).tolist():
            reached = far + float(length[node, other])
            if reached < distance[other]:
                distance[other], before[other] = reached, node
                heapq.heappush(queue, (reached, other))
    return before
