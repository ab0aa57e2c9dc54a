"""Tests of log-ratios at every level and with every reduction, bounds, hierarchy, importance weights."""

import math

import pytest
import torch

from robopolicy.core.decisions import Decisions, by_trajectory, by_unit
from robopolicy.core.ratios import LEVELS, ConstantBounds, DepthBounds, Hierarchy, importance_weight, log_ratio


@pytest.mark.parametrize("level", ["token", "unit", "sequence"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "normalized"])
def test_levels_and_reductions_equal_a_loop(decisions, shift, level, reduction):
    ratio = log_ratio(decisions.logp_old + shift, decisions.logp_old, decisions, level, reduction, 8.0)
    valid = decisions.valid()
    decision_ids = torch.arange(valid.numel()).view(valid.shape)
    ids = {"token": decision_ids, "unit": by_unit(decisions), "sequence": by_trajectory(decisions)}[level]
    ids = ids.expand(valid.shape)
    for index in valid.nonzero():
        row, column = index.tolist()
        inside = shift[valid & (ids == ids[row, column])]
        expected = {"sum": inside.sum(), "mean": inside.mean(), "normalized": inside.sum() / 8.0}[reduction]
        assert ratio[row, column] == pytest.approx(expected.item())


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_fresh_data_has_ratio_one_exactly(decisions, level):
    assert bool((log_ratio(decisions.logp_old, decisions.logp_old, decisions, level) == 0).all())


def test_masked_log_probabilities_may_be_infinite(decisions, shift):
    logp = (decisions.logp_old + shift).masked_fill(~decisions.valid(), -torch.inf)
    old = decisions.logp_old.masked_fill(~decisions.valid(), -torch.inf)
    for level in LEVELS:
        leaf = logp.clone().requires_grad_()
        ratio = log_ratio(leaf, old, decisions, level, "mean")
        torch.testing.assert_close(
            ratio.detach(), log_ratio(decisions.logp_old + shift, decisions.logp_old, decisions, level, "mean")
        )
        (gradient,) = torch.autograd.grad(ratio.sum(), leaf)
        assert bool(gradient.isfinite().all())
        assert bool((gradient[~decisions.valid()] == 0).all())


def test_normalized_ratio_does_not_depend_on_the_number_of_dimensions():
    """Doubling D with independent copies of the same shift leaves the normalised ratio unchanged (ReinFlow)."""
    per_dimension, steps = 0.03, 4
    for dimensions in (3, 6):
        decisions = Decisions(torch.zeros(2, steps))
        logp = torch.full((2, steps), per_dimension * dimensions)
        ratio = log_ratio(logp, decisions.logp_old, decisions, "unit", "normalized", steps * dimensions)
        torch.testing.assert_close(ratio, torch.full((2, steps), per_dimension))


def test_unknown_names_are_refused():
    decisions = Decisions(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="Ratio level"):
        log_ratio(decisions.logp_old, decisions.logp_old, decisions, "word")
    with pytest.raises(ValueError, match="Ratio reduction"):
        log_ratio(decisions.logp_old, decisions.logp_old, decisions, "unit", "max")


def test_constant_bounds():
    decisions = Decisions(torch.zeros(1, 1))
    assert ConstantBounds(0.2)(decisions) == (0.8, 1.2)
    assert ConstantBounds(0.2, 0.28)(decisions) == (0.8, 1.28)


def test_depth_bounds_follow_the_exponential_schedule(decisions):
    low, high = DepthBounds(first=0.001, last=0.01, steps=5, rate=3.0)(decisions)
    depth = torch.arange(decisions.shape[1])
    width = 0.001 + 0.009 * (torch.exp(3.0 * depth / 4) - 1) / (math.e**3 - 1)
    torch.testing.assert_close((high - 1)[0], width.double())
    torch.testing.assert_close((1 - low)[-1], width.double())
    assert high[0, 0] == pytest.approx(1.001)


def test_depth_bounds_of_one_step_are_finite():
    assert DepthBounds(last=0.01, steps=1)(Decisions(torch.zeros(2, 1))) == (0.99, 1.01)


@pytest.mark.parametrize("outer", ["sequence", "unit"])
def test_hierarchy_inside_its_budgets_is_the_plain_ratio(decisions, shift, outer):
    wide = Hierarchy(outer, budget_up=10.0, budget_down=10.0, residual=10.0)
    plain = log_ratio(decisions.logp_old + shift, decisions.logp_old, decisions)
    torch.testing.assert_close(wide(plain, decisions), plain)


def test_hierarchy_at_ratio_one_has_the_identity_as_jacobian(decisions):
    def gate(flat: torch.Tensor) -> torch.Tensor:
        return Hierarchy()(flat.view(decisions.shape), decisions).flatten()

    jacobian = torch.autograd.functional.jacobian(gate, torch.zeros(decisions.logp_old.numel(), dtype=torch.float64))
    torch.testing.assert_close(jacobian, torch.diag(decisions.valid().flatten().double()))


@pytest.mark.parametrize(
    ("slope", "expected"),
    [
        (1.0, {0.1: 0.1, 0.15: 0.05, 0.2: 0.0, 0.4: 0.0}),
        (None, {0.1: 0.1, 0.11: 0.08, 0.14: 0.02, 0.15: 0.0, 0.4: 0.0}),
    ],
)
def test_hierarchy_rolls_back_drift_beyond_its_budget(slope, expected):
    """The default slope is the number of valid decisions: here 2 of 3."""
    decisions = Decisions(torch.zeros(1, 3, dtype=torch.float64), mask=torch.tensor([[True, True, False]]))
    hierarchy = Hierarchy(budget_up=0.1, budget_down=0.1, residual=0.5, slope=slope)
    for drift, left in expected.items():
        gate = hierarchy(torch.full((1, 3), drift, dtype=torch.float64), decisions)
        torch.testing.assert_close(gate, torch.tensor([[left, left, 0.0]], dtype=torch.float64))


def test_hierarchy_clips_the_deviation_of_one_decision():
    decisions = Decisions(torch.zeros(1, 4, dtype=torch.float64))
    difference = torch.tensor([[4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    gate = Hierarchy(budget_up=2.0, budget_down=2.0, residual=0.5)(difference, decisions)
    torch.testing.assert_close(gate, torch.tensor([[1.5, 0.5, 0.5, 0.5]], dtype=torch.float64))


def test_importance_weight_is_truncated_and_detached(decisions):
    old = decisions.logp_old.clone().requires_grad_()
    weight = importance_weight(decisions.with_fields(logp_old=old), cap=1.05)
    plain = (decisions.logp_old - decisions.logp_behaviour).exp().clamp(max=1.05)
    torch.testing.assert_close(weight[decisions.valid()], plain[decisions.valid()])
    assert not weight.requires_grad
    with pytest.raises(ValueError, match="logp_behaviour"):
        importance_weight(Decisions(torch.zeros(1, 1)))
