"""Kinematics of the Panda as kernels of Warp, one thread per robot: what `kinematics` computes, in single precision.

Importing this module imports Warp, which reads the annotations of kernels at once.
"""
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportAssignmentType=false

import torch
import warp as wp
from torch import Tensor

from robopolicy.sim.backends.warp_physics import import_packages, on_torch_stream
from robopolicy_tasks.manipulation import kinematics

import_packages()  # initialises Warp without output
Joints = wp.types.vector(length=7, dtype=wp.float32)
Axes = wp.types.matrix(shape=(7, 3), dtype=wp.float32)
Wrench = wp.types.vector(length=6, dtype=wp.float32)
Square = wp.types.matrix(shape=(6, 6), dtype=wp.float32)
Jacobian = wp.types.matrix(shape=(6, 7), dtype=wp.float32)


@wp.struct
class Chain:
    """Pose of the tool, and origins and axes of the joints, in the base frame."""

    position: wp.vec3
    x: wp.vec3
    y: wp.vec3
    z: wp.vec3
    origins: Axes
    axes: Axes


_A = Joints(*[row[0] for row in kinematics.DH])
_D = Joints(*[row[1] for row in kinematics.DH])
_TWIST = Joints(*[float(row[2]) for row in kinematics.DH])
_LOW, _HIGH = Joints(*kinematics.JOINT_LOW), Joints(*kinematics.JOINT_HIGH)
_TOOL = wp.constant(float(kinematics.TOOL_OFFSET))
_ITERATIONS, _DAMPING = wp.constant(kinematics.ITERATIONS), wp.constant(kinematics.DAMPING)
_COS, _SIN = wp.constant(kinematics.COS_HAND), wp.constant(kinematics.SIN_HAND)


@wp.func
def chain(q: Joints) -> Chain:
    """Forward kinematics at joint positions `q` [rad]."""
    found = Chain()
    x = wp.vec3(1.0, 0.0, 0.0)
    y = wp.vec3(0.0, 1.0, 0.0)
    z = wp.vec3(0.0, 0.0, 1.0)
    position = wp.vec3(0.0, 0.0, 0.0)
    for i in range(7):
        position += _A[i] * x
        if _TWIST[i] != 0.0:
            up = z
            z = -_TWIST[i] * y
            y = _TWIST[i] * up
        position += _D[i] * z
        c = wp.cos(q[i])
        s = wp.sin(q[i])
        turned = c * x + s * y
        y = c * y - s * x
        x = turned
        for k in range(3):
            found.origins[i, k] = position[k]
            found.axes[i, k] = z[k]
    found.position = position + _TOOL * z
    found.x = _COS * x + _SIN * y
    found.y = _COS * y - _SIN * x
    found.z = z
    return found


@wp.func
def solved(matrix: Square, right: Wrench) -> Wrench:
    """Solution of a symmetric positive definite system, by Cholesky's decomposition."""
    factor = Square()
    for i in range(6):
        for j in range(i + 1):
            total = matrix[i, j]
            for k in range(j):
                total -= factor[i, k] * factor[j, k]
            if i == j:
                factor[i, j] = wp.sqrt(total)
            else:
                factor[i, j] = total / factor[j, j]
    middle = Wrench()
    for i in range(6):
        total = right[i]
        for k in range(i):
            total -= factor[i, k] * middle[k]
        middle[i] = total / factor[i, i]
    solution = Wrench()
    for n in range(6):
        i = 5 - n
        total = middle[i]
        for k in range(i + 1, 6):
            total -= factor[k, i] * solution[k]
        solution[i] = total / factor[i, i]
    return solution


@wp.kernel(enable_backward=False)
def forward_kernel(
    joints: wp.array2d[wp.float32],
    position: wp.array2d[wp.float32],
    rotation: wp.array3d[wp.float32],
):
    """Tool poses."""
    row = wp.tid()
    q = Joints()
    for i in range(7):
        q[i] = joints[row, i]
    found = chain(q)
    for k in range(3):
        position[row, k] = found.position[k]
        rotation[row, k, 0] = found.x[k]
        rotation[row, k, 1] = found.y[k]
        rotation[row, k, 2] = found.z[k]


@wp.kernel(enable_backward=False)
def inverse_kernel(
    joints: wp.array2d[wp.float32],
    target: wp.array2d[wp.float32],
    yaw: wp.array1d[wp.float32],
    posture: Joints,
    result: wp.array2d[wp.float32],
):
    """Damped least squares towards tools that point down with heading `yaw`."""
    row = wp.tid()
    q = Joints()
    for i in range(7):
        q[i] = joints[row, i]
    goal = wp.vec3(target[row, 0], target[row, 1], target[row, 2])
    cos = wp.cos(yaw[row])
    sin = wp.sin(yaw[row])
    goal_x = wp.vec3(cos, sin, 0.0)
    goal_y = wp.vec3(sin, -cos, 0.0)
    goal_z = wp.vec3(0.0, 0.0, -1.0)
    for _ in range(_ITERATIONS):
        found = chain(q)
        jacobian = Jacobian()
        for i in range(7):
            axis = wp.vec3(found.axes[i, 0], found.axes[i, 1], found.axes[i, 2])
            origin = wp.vec3(found.origins[i, 0], found.origins[i, 1], found.origins[i, 2])
            linear = wp.cross(axis, found.position - origin)
            for k in range(3):
                jacobian[k, i] = linear[k]
                jacobian[3 + k, i] = axis[k]
        offset = goal - found.position
        turn = 0.5 * (wp.cross(found.x, goal_x) + wp.cross(found.y, goal_y) + wp.cross(found.z, goal_z))
        attraction = 0.1 * (posture - q)
        error = Wrench(offset[0], offset[1], offset[2], turn[0], turn[1], turn[2]) - jacobian * attraction
        matrix = jacobian * wp.transpose(jacobian)
        for k in range(6):
            matrix[k, k] = matrix[k, k] + _DAMPING * _DAMPING
        q = q + attraction + wp.transpose(jacobian) * solved(matrix, error)
        for i in range(7):
            q[i] = wp.clamp(q[i], _LOW[i], _HIGH[i])
    for i in range(7):
        result[row, i] = q[i]


# Operators of torch, so that every device with a kernel of Warp finds it, and a graph can contain the launch.
@torch.library.custom_op("robopolicy::panda_forward", mutates_args=(), device_types=("cpu", "cuda"))
def panda_forward(joints: Tensor) -> tuple[Tensor, Tensor]:
    """Positions `(N, 3)` [m] and rotations `(N, 3, 3)` of the tool at joint positions `(N, 7)` [rad]."""
    position, rotation = joints.new_empty(len(joints), 3), joints.new_empty(len(joints), 3, 3)
    _launch(forward_kernel, joints, position, rotation)
    return position, rotation


@torch.library.custom_op("robopolicy::panda_inverse", mutates_args=(), device_types=("cpu", "cuda"))
def panda_inverse(joints: Tensor, position: Tensor, yaw: Tensor, posture: list[float]) -> Tensor:
    """Joint positions `(N, 7)` [rad]; see `kinematics.inverse_downward`."""
    result = torch.empty_like(joints, memory_format=torch.contiguous_format)
    _launch(inverse_kernel, joints, position, yaw, Joints(*posture), result)
    return result


def _launch(kernel: wp.Kernel, joints: Tensor, *rest: Tensor | Joints) -> None:
    arguments = [wp.from_torch(value) if isinstance(value, Tensor) else value for value in (joints, *rest)]
    with on_torch_stream(joints.device):
        wp.launch(kernel, dim=len(joints), inputs=arguments, device=wp.device_from_torch(joints.device))
