"""Tests of the elite archive: one elite per cell, metrics by hand, and exact resumption."""

from __future__ import annotations

import pytest
import torch

from robopolicy.errors import UserError

pytest.importorskip("ribs")

from robopolicy.contrib.quality_diversity.elites import EliteArchive

CORNERS = torch.tensor([[0.1, 0.1], [0.9, 0.1], [0.1, 0.9], [0.9, 0.9]])


def archive(cells: int = 4, floor: float = 0.0) -> EliteArchive:
    return EliteArchive(3, 2, cells, floor=floor)


def test_a_cell_keeps_only_its_fittest_solution() -> None:
    found = archive(cells=2)
    near = torch.tensor([[0.5, 0.1], [0.5, 0.1], [0.5, 0.1]])
    admitted = found.add(torch.eye(3), torch.tensor([1.0, 3.0, 2.0]), near)
    assert len(found) == 1 and bool(admitted[1])
    assert found.elites().solution.tolist() == [[0.0, 1.0, 0.0]]
    assert found.add(torch.ones(1, 3), torch.tensor([2.5]), near[:1]).tolist() == [False]
    assert found.add(torch.ones(1, 3), torch.tensor([3.5]), near[:1]).tolist() == [True]
    assert found.nearest(torch.tensor([0.0, 0.0])).solution.tolist() == [[1.0, 1.0, 1.0]]


def test_metrics_match_hand_computed_values() -> None:
    found = archive(cells=16, floor=-1.0)
    found.add(torch.rand(4, 3), torch.tensor([0.0, 1.0, 2.0, 3.0]), CORNERS)
    metrics = found.metrics()
    assert metrics == pytest.approx({"qd_score": 10.0, "coverage": 4 / 16, "max_fitness": 3.0})
    found.add(torch.rand(1, 3), torch.tensor([-5.0]), CORNERS[:1])  # worse than the current elite
    assert found.metrics() == pytest.approx(metrics)


def test_non_finite_fitness_is_rejected() -> None:
    found = archive()
    assert not found.add(torch.rand(2, 3), torch.tensor([torch.nan, torch.inf]), CORNERS[:2]).any()
    with pytest.raises(UserError, match="archive is empty"):
        found.sample(1, torch.Generator())


def test_it_resumes_exactly() -> None:
    found, other = archive(cells=32), archive(cells=32, floor=7.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        found.add(torch.randn(20, 3, generator=generator), torch.rand(20, generator=generator), torch.rand(20, 2))
    other.load_state_dict(found.state_dict())
    for key, value in found.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    draws = [one.sample(5, torch.Generator().manual_seed(1)).solution for one in (found, other)]
    assert torch.equal(*draws)


def test_an_archive_of_one_cell_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2 cells"):
        archive(cells=1)
