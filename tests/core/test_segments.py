"""Tests of segment statistics against loops, on both layouts."""

import pytest
import torch

from robopolicy.core.decisions import PARTITIONS
from robopolicy.core.segments import Segments


@pytest.mark.parametrize("name", PARTITIONS.product())
def test_statistics_equal_a_loop_over_segments(decisions, name):
    ids, valid, values = PARTITIONS[name](decisions), decisions.valid(), decisions.reward
    segments = Segments(ids, valid)
    spread = {
        "sum": segments.broadcast(segments.sum(values)),
        "mean": segments.broadcast(segments.mean(values)),
        "std": segments.broadcast(segments.std(values)),
        "population": segments.broadcast(segments.std(values, unbiased=False)),
        "median": segments.broadcast(segments.median(values)),
        "count": segments.broadcast(segments.count),
        "others": segments.leave_one_out(values),
    }
    full = ids.expand(valid.shape)
    for index in valid.nonzero():
        row, column = index.tolist()
        inside = values[valid & (full == full[row, column])]
        n = inside.numel()
        assert spread["count"][row, column] == n
        assert spread["sum"][row, column] == pytest.approx(inside.sum().item())
        assert spread["mean"][row, column] == pytest.approx(inside.mean().item())
        ordered = inside.sort().values
        assert spread["median"][row, column] == pytest.approx(0.5 * (ordered[(n - 1) // 2] + ordered[n // 2]).item())
        assert spread["std"][row, column] == pytest.approx(inside.std().item() if n > 1 else 1.0)
        assert spread["population"][row, column] == pytest.approx(inside.std(correction=0).item() if n > 1 else 1.0)
        others = (inside.sum() - values[row, column]) / (n - 1) if n > 1 else torch.tensor(0.0)
        assert spread["others"][row, column] == pytest.approx(others.item())


def test_masked_entries_are_ignored():
    values = torch.tensor([[1.0, torch.nan, 3.0, torch.inf]])
    segments = Segments(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[True, False, True, False]]))
    assert segments.mean(values).tolist() == [2.0]
    assert segments.median(values).tolist() == [2.0]
    assert segments.std(values, unbiased=False).tolist() == [1.0]


def test_leave_one_out_of_a_masked_entry_is_the_mean_of_the_valid_entries():
    values = torch.tensor([[1.0], [3.0], [100.0]])
    segments = Segments(torch.zeros(3, 1, dtype=torch.long), torch.tensor([[True], [True], [False]]))
    assert segments.leave_one_out(values).flatten().tolist() == [3.0, 1.0, 2.0]
