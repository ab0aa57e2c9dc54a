"""Tests of mask rules and of the aggregation of one loss per decision into a scalar."""

import pytest
import torch

from robopolicy.core.aggregate import AGGREGATES, masked_mean
from robopolicy.core.decisions import Decisions, by_trajectory, by_unit
from robopolicy.core.selection import compose


def test_rules_are_composed_by_product(decisions, shift):
    rules = [lambda d, a, z: (d.depths() >= 1) & (d.depths() < 3), lambda d, a, z: z.abs() <= 0.1]
    keep = compose(rules, decisions, decisions.reward, shift)
    column = torch.arange(decisions.shape[1])
    expected = decisions.valid() & (column >= 1) & (column < 3) & (shift.abs() <= 0.1)
    assert torch.equal(keep, expected)
    assert bool(keep.any()) and not bool(keep.all())


def test_no_rule_and_no_mask_give_none():
    assert compose([], Decisions(torch.zeros(2, 3)), torch.zeros(2, 1), torch.zeros(2, 3)) is None


@pytest.mark.parametrize("name", AGGREGATES.product())
def test_aggregation_equals_a_loop(decisions, name):
    loss, valid = decisions.reward, decisions.valid()
    trajectory = by_trajectory(decisions).expand(valid.shape)
    rows = [loss[valid & (trajectory == key)] for key in trajectory[valid].unique()]
    unit = by_unit(decisions).expand(valid.shape)
    units = [loss[valid & (unit == key)] for key in unit[valid].unique()]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    expected = {
        "token_mean": loss[valid].mean(),
        "sequence_sum": mean([row.sum() for row in rows]),
        "sequence_mean": mean([row.mean() for row in rows]),
        "unit_sum": mean([row.sum() for row in units]),
        "fixed_length": mean([row.sum() for row in rows]) / 40.0,
    }[name]
    found = AGGREGATES[name](loss.masked_fill(~valid, torch.nan), decisions.mask, decisions, 40.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", AGGREGATES.product())
def test_rows_without_a_decision_change_nothing(decisions, name):
    valid = decisions.valid().clone()
    valid[decisions.require("group") == decisions.require("group")[0]] = False
    rest = valid.any(1)
    whole = AGGREGATES[name](decisions.reward, valid, decisions, 1.0)
    part = AGGREGATES[name](decisions.reward[rest], valid[rest], decisions.select(rest), 1.0)
    torch.testing.assert_close(whole, part)


@pytest.mark.parametrize("name", AGGREGATES.product())
def test_fully_masked_batch_has_zero_loss_and_zero_gradient(decisions, name):
    loss = decisions.reward.clone().requires_grad_()
    total = AGGREGATES[name](loss, torch.zeros_like(decisions.valid()), decisions, 1.0)
    (gradient,) = torch.autograd.grad(total, loss)
    assert total == 0 and bool((gradient == 0).all())


def test_masked_mean_ignores_masked_entries():
    values = torch.tensor([1.0, torch.nan, 3.0])
    assert masked_mean(values, torch.tensor([True, False, True])) == 2.0
