"""Tests of the linear algebra of compositions against torch."""

import pytest
import torch

from robopolicy.policies.composition.operators import orthonormal, solve


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_elimination_equals_torch_solve(count):
    torch.manual_seed(count)
    root = torch.randn(6, count, count + 1, dtype=torch.float64)
    matrix, right = root @ root.transpose(1, 2) + 1e-3 * torch.eye(count), torch.randn(6, count, dtype=torch.float64)
    torch.testing.assert_close(solve(matrix, right), torch.linalg.solve(matrix, right))


def test_orthonormal_basis_spans_its_columns():
    torch.manual_seed(0)
    columns = torch.randn(4, 7, 3)
    columns[0, :, 2] = columns[0, :, 0] - 2 * columns[0, :, 1]  # linearly dependent
    columns[1, :, 0] = 0.0
    basis = orthonormal(columns, 1e-3)
    length = basis.square().sum(1)
    assert length.round().tolist() == [[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    torch.testing.assert_close(basis.transpose(1, 2) @ basis, torch.diag_embed(length), rtol=0, atol=1e-5)
    torch.testing.assert_close(basis @ (basis.transpose(1, 2) @ columns), columns, rtol=0, atol=1e-4)
