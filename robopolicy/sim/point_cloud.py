"""Point clouds of fixed size from depth images: unprojection, cropping and farthest-point sampling.

Clouds hold positions without colours, which hurt generalisation in 3D Diffusion Policy (Ze et al. 2024). All functions
are deterministic, so that an episode is a function of its seed and actions. The size of the depth image is fixed, so
that all clouds have the same density.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Box = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Lowest and highest corner `(3,)` [m] of an axis-aligned box in world coordinates."""

DEPTH_SIZE = 96  # pixels, square, of the depth image behind a cloud


def unproject(
    depth: NDArray[np.floating], fovy: float, position: NDArray[np.float64], rotation: NDArray[np.float64]
) -> Array:
    """World coordinates `(M, 3)` [m] of the M pixels with finite depth, row by row.

    `depth` `(h, w)` [m] is measured along the optical axis; `fovy` is the vertical field of view [degrees] of square
    pixels; `position` `(3,)` [m] and `rotation` `(3, 3)` are the camera pose, the columns of the rotation pointing
    right, up and backwards, as in MuJoCo and OpenGL.
    """
    height, width = depth.shape
    step = 2.0 * np.tan(np.radians(fovy) / 2) / height  # of one pixel on the plane at distance 1
    right = step * (np.arange(width) + 0.5 - width / 2)
    up = step * (height / 2 - 0.5 - np.arange(height))
    rays = np.stack(np.broadcast_arrays(right[None, :], up[:, None], -1.0), -1)  # (h, w, 3)
    finite = np.isfinite(depth)
    points = rays[finite] * depth[finite][:, None]
    return (points @ rotation.T + position).astype(np.float32)


def crop(points: Array, box: Box) -> Array:
    """Return the points `(M, 3)` inside `box`."""
    return points[((points > box[0]) & (points < box[1])).all(1)]


def subsample(points: Array, count: int) -> Array:
    """Select `count` of the points `(M, 3)` by farthest-point sampling: `(count, 3)`.

    The first point is the farthest from the mean, each further point the farthest from all selected points, so that
    small objects keep enough points. If M < `count`, points are repeated cyclically, which does not change a maximum
    over points; an empty cloud becomes zeros.
    """
    if len(points) == 0:
        return np.zeros((count, 3), np.float32)
    if len(points) <= count:
        return np.resize(points, (count, 3))
    axes = np.ascontiguousarray(points.T)  # (3, M)
    nearest = np.full(len(points), np.inf, np.float32)  # (M,) squared distance to the selected points
    chosen = np.empty(count, np.intp)
    chosen[0] = _squared(axes, axes.mean(1)).argmax()
    for k in range(1, count):
        np.minimum(nearest, _squared(axes, axes[:, chosen[k - 1]]), out=nearest)
        chosen[k] = nearest.argmax()
    return points[chosen]


def _squared(axes: Array, point: Array) -> Array:
    difference = axes - point[:, None]
    return np.einsum("im,im->m", difference, difference)
