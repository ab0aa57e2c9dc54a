"""Rotations as matrices, and the types in which datasets store them.

    axis_angle       unit axis times the angle [rad]
    quaternion_xyzw  unit quaternion with the real part last, as in ROS and robosuite
    quaternion_wxyz  unit quaternion with the real part first, as in MuJoCo
    rot6d            first two columns of the matrix (Zhou et al. 2019)
    rot6d_rows       first two rows of the matrix, as in PyTorch3D, robomimic, Diffusion Policy and UMI

Two quaternions, and any number of axis-angle vectors, are one rotation; `from_matrix` returns the one nearest to a
reference, so that a sequence of rotations has no jumps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

SIZES = {"axis_angle": 3, "quaternion_xyzw": 4, "quaternion_wxyz": 4, "rot6d": 6, "rot6d_rows": 6}
_EPS = 1e-12


def to_matrix(values: Tensor, kind: str) -> Tensor:
    """Rotation matrices `(..., 3, 3)` of `values` `(..., n)` of a type in `SIZES`, which are normalised first."""
    if kind.startswith("rot6d"):
        first = normalize(values[..., :3], dim=-1, eps=_EPS)
        second = values[..., 3:] - (first * values[..., 3:]).sum(-1, keepdim=True) * first
        second = normalize(second, dim=-1, eps=_EPS)
        return torch.stack([first, second, _cross(first, second)], -1 if kind == "rot6d" else -2)
    if kind == "axis_angle":
        half = values.norm(dim=-1, keepdim=True) / 2
        real, imaginary = half.cos(), half.sin() * normalize(values, dim=-1, eps=_EPS)
    else:
        unit = normalize(values, dim=-1, eps=_EPS)
        first = kind == "quaternion_wxyz"
        real, imaginary = (unit[..., :1], unit[..., 1:]) if first else (unit[..., 3:], unit[..., :3])
    w, (x, y, z) = real[..., 0], imaginary.unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def from_matrix(matrix: Tensor, kind: str, near: Tensor | None = None) -> Tensor:
    """Inverse of `to_matrix`.

    Args:
        matrix: Rotation matrices `(..., 3, 3)`.
        kind: Type in `SIZES`.
        near: Reference `(..., n)` of this type for quaternions and axis-angle vectors; None: the angle is at most pi.
    """
    if kind == "rot6d":
        return torch.cat([matrix[..., :, 0], matrix[..., :, 1]], -1)
    if kind == "rot6d_rows":
        return torch.cat([matrix[..., 0, :], matrix[..., 1, :]], -1)
    quaternion = _quaternion(matrix)
    if kind == "axis_angle":
        return _axis_angle(quaternion, near)
    stored = quaternion if kind == "quaternion_wxyz" else quaternion.roll(-1, -1)
    return stored if near is None else torch.where((stored * near).sum(-1, keepdim=True) < 0, -stored, stored)


def deviation(values: Tensor, kind: str) -> float:
    """Largest difference of the lengths of `values` `(..., n)` from 1, and of the products of their axes from 0."""
    if kind == "axis_angle":
        return 0.0
    axes = values.reshape(*values.shape[:-1], -1, 3 if kind.startswith("rot6d") else 4)
    products = axes @ axes.mT
    return float((products - torch.eye(axes.shape[-2], dtype=values.dtype)).abs().max())


def _quaternion(matrix: Tensor) -> Tensor:
    """Unit quaternions `(..., 4)` with w first and w >= 0, from the largest of their four elements (Shepperd 1978)."""
    m = [[matrix[..., row, column] for column in range(3)] for row in range(3)]
    twist = (m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1])
    squares = (  # 4 w^2, 4 x^2, 4 y^2, 4 z^2
        1 + m[0][0] + m[1][1] + m[2][2],
        1 + m[0][0] - m[1][1] - m[2][2],
        1 - m[0][0] + m[1][1] - m[2][2],
        1 - m[0][0] - m[1][1] + m[2][2],
    )
    xy, xz, yz = m[0][1] + m[1][0], m[0][2] + m[2][0], m[1][2] + m[2][1]
    products = (  # row i is 4 q_i (w, x, y, z)
        (squares[0], *twist),
        (twist[0], squares[1], xy, xz),
        (twist[1], xy, squares[2], yz),
        (twist[2], xz, yz, squares[3]),
    )
    candidates = torch.stack([torch.stack(row, -1) for row in products], -2)  # (..., 4, 4)
    largest = torch.stack(squares, -1).argmax(-1)[..., None, None].expand(*matrix.shape[:-2], 1, 4)
    found = normalize(candidates.gather(-2, largest).squeeze(-2), dim=-1, eps=_EPS)
    return torch.where(found[..., :1] < 0, -found, found)


def _axis_angle(quaternion: Tensor, near: Tensor | None) -> Tensor:
    """Axis times angle `(..., 3)` of quaternions with w >= 0."""
    imaginary = quaternion[..., 1:]
    axis = normalize(imaginary, dim=-1, eps=_EPS)
    angle = 2 * torch.atan2(imaginary.norm(dim=-1, keepdim=True), quaternion[..., :1])
    if near is not None:
        turns = ((axis * near).sum(-1, keepdim=True) - angle) / (2 * math.pi)
        angle = angle + 2 * math.pi * turns.round()
    return axis * angle


def _cross(first: Tensor, second: Tensor) -> Tensor:
    """Cross product `(..., 3)`, in operations that every exported graph has."""
    (a, b, c), (x, y, z) = first.unbind(-1), second.unbind(-1)
    return torch.stack([b * z - c * y, c * x - a * z, a * y - b * x], -1)
