"""Mask rules and the ways to turn one loss per decision into a scalar."""

import itertools

import pytest
import torch

from robopolicy.contrib.text_catalogue.masks import FirstUnits, Informative, Spread, most_varied
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


def test_the_most_varied_values_are_found_by_trying_all() -> None:
    for seed, count in itertools.product(range(20), (2, 3, 5)):
        values = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        best = max(values[list(rows)].var(unbiased=False) for rows in itertools.combinations(range(8), count))
        torch.testing.assert_close(values[most_varied(values, count)].var(unbiased=False), best)


def test_spread_keeps_whole_trajectories_and_a_later_share_is_one_of_theirs(decisions, shift):
    """Trajectories of several rows count once, those without a decision not at all."""
    mask = decisions.valid().clone()
    mask[by_trajectory(decisions)[:, 0] == by_trajectory(decisions)[0, 0]] = False
    given = decisions.with_fields(mask=mask)
    keep = Spread(0.5)(given, decisions.reward, shift)
    ids = by_trajectory(decisions).expand(mask.shape)
    kept = ids[keep].unique()
    assert len(kept) == len(ids[mask].unique()) // 2 and torch.equal(keep, mask & torch.isin(ids, kept))
    both = compose([Spread(0.5), Informative(0.5)], given, decisions.reward, shift)
    assert both is not None and int(both.sum()) == int(keep.sum()) // 2 and bool((keep | ~both).all())


def test_no_rule_and_no_mask_costs_nothing():
    assert compose([], Decisions(torch.zeros(2, 3)), torch.zeros(2, 1), torch.zeros(2, 3)) is None


def test_first_units_are_turns_of_a_row_or_rows_of_a_trajectory():
    unit = torch.tensor([[0, 0, 1, 2]])
    turns = Decisions(torch.zeros(1, 4), unit=unit)
    assert FirstUnits(2)(turns, turns.logp_old, turns.logp_old).tolist() == [[True, True, True, False]]
    rows = Decisions(torch.zeros(3, 2), trajectory=torch.tensor([0, 0, 1]))
    assert FirstUnits()(rows, rows.logp_old, rows.logp_old).all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_aggregation_equals_a_loop(decisions, name):
    loss, valid = decisions.reward, decisions.valid()
    trajectory = by_trajectory(decisions).expand(valid.shape)
    rows = [loss[valid & (trajectory == key)] for key in trajectory[valid].unique()]
    unit = by_unit(decisions).expand(valid.shape)
    units = [loss[valid & (unit == key)] for key in unit[valid].unique()]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    expected = {
        "tok": loss[valid].mean(),
        "seq_sum": mean([row.sum() for row in rows]),
        "seq_mean": mean([row.mean() for row in rows]),
        "unit_sum": mean([row.sum() for row in units]),
        "unit_mean": mean([row.mean() for row in units]),
        "const": mean([row.sum() for row in rows]) / 40.0,
    }[name]
    found = AGGREGATES[name](loss.masked_fill(~valid, torch.nan), decisions.mask, decisions, 40.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_rows_without_a_decision_change_nothing(decisions, name):
    valid = decisions.valid().clone()
    valid[decisions.need("group") == decisions.need("group")[0]] = False
    rest = valid.any(1)
    whole = AGGREGATES[name](decisions.reward, valid, decisions, 1.0)
    part = AGGREGATES[name](decisions.reward[rest], valid[rest], decisions.select(rest), 1.0)
    torch.testing.assert_close(whole, part)


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_nothing_to_learn_from_is_a_loss_of_zero_with_zero_gradient(decisions, name):
    loss = decisions.reward.clone().requires_grad_()
    total = AGGREGATES[name](loss, torch.zeros_like(decisions.valid()), decisions, 1.0)
    (gradient,) = torch.autograd.grad(total, loss)
    assert total == 0 and bool((gradient == 0).all())


def test_masked_mean_ignores_what_is_masked():
    values = torch.tensor([1.0, torch.nan, 3.0])
    assert masked_mean(values, torch.tensor([True, False, True])) == 2.0
