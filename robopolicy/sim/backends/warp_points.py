"""Warp kernel for point clouds: `robopolicy.sim.point_cloud` for all worlds at once, on the device.

Importing this module requires the package `warp`.
"""
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# ruff: noqa: UP018, RUF046  (in a kernel, `float(0.0)` is a variable and `0.0` a constant)

import warp as wp

BLOCK = 256  # threads per world on a GPU; the CPU has one


@wp.func
def farthest(value: float, index: int) -> int:
    """Index of the largest value of all threads of the block."""
    thread = wp.tile_argmax(wp.tile(value))
    return wp.tile_extract(wp.tile(index), wp.tile_extract(thread, 0))


@wp.func
def total(value: float) -> float:
    """Sum over all threads of the block."""
    return wp.tile_extract(wp.tile_sum(wp.tile(value)), 0)


@wp.kernel(enable_backward=False)
def select_points(
    depth: wp.array2d[float],  # (N, pixels) [m] along the optical axis, 0 for the background
    rays: wp.array[wp.vec3],  # (pixels,) in the frame of the camera, at distance 1 along the optical axis
    camera: int,
    position: wp.array2d[wp.vec3],  # (N, cameras) [m]
    rotation: wp.array2d[wp.mat33],  # (N, cameras)
    low: wp.vec3,  # corners of the box that contains all points [m]
    high: wp.vec3,
    points: wp.array2d[wp.vec3],  # (N, pixels) scratch
    nearest: wp.array2d[float],  # (N, pixels) scratch: squared distance to the selected points, -1 outside the box
    chosen: wp.array2d[wp.vec3],  # (N, count) result
):
    """Select `count` points of each world by farthest-point sampling, as `subsample` does.

    Launch one block per world. If the box contains fewer points, one of them is repeated; if none, all are zeros.
    """
    world, thread = wp.tid()
    pixels = rays.shape[0]
    found = float(0.0)
    sum_x = float(0.0)
    sum_y = float(0.0)
    sum_z = float(0.0)
    for i in range(thread, pixels, wp.block_dim()):
        point = rotation[world, camera] * rays[i] * depth[world, i] + position[world, camera]
        points[world, i] = point
        inside = depth[world, i] > 0.0
        for axis in range(3):
            inside = inside and point[axis] > low[axis] and point[axis] < high[axis]
        nearest[world, i] = -1.0
        if inside:
            nearest[world, i] = wp.inf
            found += 1.0
            sum_x += point[0]
            sum_y += point[1]
            sum_z += point[2]
    count = total(found)
    last = wp.vec3(total(sum_x), total(sum_y), total(sum_z)) / wp.max(count, 1.0)  # the mean
    for k in range(chosen.shape[1]):
        best = float(-1.0)
        index = int(0)
        for i in range(thread, pixels, wp.block_dim()):
            near = nearest[world, i]
            if near >= 0.0:
                distance = wp.length_sq(points[world, i] - last)
                if k > 0:
                    distance = wp.min(near, distance)
                    nearest[world, i] = distance
                if distance > best:
                    best = distance
                    index = i
        last = points[world, farthest(best, index)]
        if count == 0.0:
            last = wp.vec3(0.0, 0.0, 0.0)
        if thread == 0:
            chosen[world, k] = last
