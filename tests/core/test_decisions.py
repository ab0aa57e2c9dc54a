"""Tests of the batch: construction from both layouts, validation, selection, stacking, partitions."""

import itertools

import pytest
import torch

from robopolicy.core.decisions import PARTITIONS, Decisions, by_batch, by_group, by_group_depth, by_trajectory, by_unit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": torch.ones(2, 4)}, r"mask must have shape \(2, 3\), got \(2, 4\)"),
        ({"group": torch.ones(2, 3)}, r"group must have shape \(2,\), got \(2, 3\)"),
        ({"extra": {"hint": torch.ones(5)}}, r"extra\['hint'\] must have 2 rows"),
    ],
)
def test_wrong_shapes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Decisions(torch.zeros(2, 3), **fields)


def test_wrong_rank_is_named():
    with pytest.raises(ValueError, match=r"logp_old must be \(N, T\)"):
        Decisions(torch.zeros(2))


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match=r"Decisions\.group, which is missing"):
        by_group(Decisions(torch.zeros(2, 3)))


@pytest.mark.parametrize("rows", [torch.tensor([3, 0]), slice(1, 3), torch.tensor([True, False] * 3)])
def test_select_takes_the_same_rows_of_every_field(decisions, rows):
    if isinstance(rows, torch.Tensor) and rows.dtype == torch.bool:
        rows = torch.arange(len(decisions)) % 2 == 0
    picked = decisions.select(rows)
    for name in ("logp_old", "logp_behaviour", "reward", "group", "source"):
        assert torch.equal(getattr(picked, name), getattr(decisions, name)[rows])


@pytest.mark.parametrize("name", PARTITIONS.product())
def test_partitions_give_one_id_per_row_or_decision(decisions, name):
    ids = PARTITIONS[name](decisions)
    assert ids.shape in ((len(decisions), 1), decisions.shape)
    assert not ids.is_floating_point()


def test_partitions_are_nested(decisions):
    """Decision < unit < trajectory < group < batch: equal ids inside imply equal ids outside."""
    nested = [by_unit, by_trajectory, by_group, by_batch]
    for inner, outer in itertools.pairwise(nested):
        fine = inner(decisions).expand(decisions.shape).flatten()
        coarse = outer(decisions).expand(decisions.shape).flatten()
        for key in fine.unique():
            assert coarse[fine == key].unique().numel() == 1


def test_group_depth_partition_separates_groups_and_depths():
    decisions = Decisions(torch.zeros(3, 2), group=torch.tensor([5, 5, -1]))
    ids = by_group_depth(decisions)
    assert torch.equal(ids[0], ids[1]) and ids.unique().numel() == 4


def test_depths_default_to_the_column_index():
    assert Decisions(torch.zeros(1, 3), depth=torch.tensor([[4, 5, 6]])).depths().tolist() == [[4, 5, 6]]
    assert Decisions(torch.zeros(1, 3)).depths().tolist() == [[0, 1, 2]]


def test_unit_ids_count_within_the_trajectory(decisions):
    ids = by_unit(decisions).expand(decisions.shape)
    per_row = 2 if decisions.unit is not None else 1
    assert ids.unique().numel() == per_row * len(decisions)
