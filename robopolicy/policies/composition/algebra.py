"""Linear algebra in as many dimensions as there are parents, written out in operations that an exported graph has."""

from __future__ import annotations

import torch
from torch import Tensor


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """`x` `(B, M)` of `matrix x = right`, by elimination in order: for positive definite matrices `(B, M, M)`."""
    rows = [torch.cat([row, value], 1) for row, value in zip(matrix.unbind(1), right[..., None].unbind(1), strict=True)]
    count = len(rows)
    for k in range(count):
        rows[k] = rows[k] / rows[k][:, k : k + 1]
        for i in range(count):
            if i != k:
                rows[i] = rows[i] - rows[i][:, k : k + 1] * rows[k]
    return torch.stack([row[:, -1] for row in rows], 1)


def orthonormal(columns: Tensor, least: float) -> Tensor:
    """Basis `(B, N, K)` of what `columns` `(B, N, K)` span: 0 where one adds less than the length `least` to it."""
    basis: list[Tensor] = []
    for column in columns.unbind(2):
        rest = column
        for _ in range(2):  # twice is enough: the second pass takes away what rounding left
            for known in basis:
                rest = rest - known * (known * rest).sum(1, keepdim=True)
        size = rest.square().sum(1, keepdim=True).sqrt()
        basis.append(torch.where(size > least, rest / size.clamp(min=least), 0.0))
    return torch.stack(basis, 2)
