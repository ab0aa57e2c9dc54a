"""Tests of mask rules and of aggregating the losses of decisions."""

import itertools

import torch

from robopolicy.contrib.text_catalogue.masks import FirstUnits, HighVarianceRows, Informative, most_varied
from robopolicy.contrib.text_catalogue.partitions import unit_mean
from robopolicy.core.decisions import Decisions, by_trajectory, by_unit
from robopolicy.core.selection import compose


def test_most_varied_selection_matches_exhaustive_search() -> None:
    for seed, count in itertools.product(range(20), (2, 3, 5)):
        values = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        best = max(values[list(rows)].var(unbiased=False) for rows in itertools.combinations(range(8), count))
        torch.testing.assert_close(values[most_varied(values, count)].var(unbiased=False), best)


def test_high_variance_mask_keeps_whole_trajectories_and_composes_with_later_masks(decisions, shift):
    """Trajectories of several rows count once; trajectories without a decision do not count."""
    mask = decisions.valid().clone()
    mask[by_trajectory(decisions)[:, 0] == by_trajectory(decisions)[0, 0]] = False
    given = decisions.with_fields(mask=mask)
    keep = HighVarianceRows(0.5)(given, decisions.reward, shift)
    ids = by_trajectory(decisions).expand(mask.shape)
    kept = ids[keep].unique()
    assert len(kept) == len(ids[mask].unique()) // 2 and torch.equal(keep, mask & torch.isin(ids, kept))
    both = compose([HighVarianceRows(0.5), Informative(0.5)], given, decisions.reward, shift)
    assert both is not None and int(both.sum()) == int(keep.sum()) // 2 and bool((keep | ~both).all())


def test_first_units_selects_turns_of_a_row_or_rows_of_a_trajectory():
    unit = torch.tensor([[0, 0, 1, 2]])
    turns = Decisions(torch.zeros(1, 4), unit=unit)
    assert FirstUnits(2)(turns, turns.logp_old, turns.logp_old).tolist() == [[True, True, True, False]]
    rows = Decisions(torch.zeros(3, 2), trajectory=torch.tensor([0, 0, 1]))
    assert FirstUnits()(rows, rows.logp_old, rows.logp_old).all(1).tolist() == [True, False, True]


def test_the_mean_over_units_equals_a_loop(decisions):
    loss, valid = decisions.reward, decisions.valid()
    unit = by_unit(decisions).expand(valid.shape)
    means = [loss[valid & (unit == key)].mean() for key in unit[valid].unique()]
    found = unit_mean(loss.masked_fill(~valid, torch.nan), decisions.mask, decisions, 40.0)
    torch.testing.assert_close(found, sum(means) / len(means))
    leaf = loss.clone().requires_grad_()
    total = unit_mean(leaf, torch.zeros_like(valid), decisions, 1.0)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert total == 0 and bool((gradient == 0).all())
