"""Tests against mistakes in published code, one each; letters as in the design notes on estimator parts."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.stages import Modulate, Shape
from robopolicy.contrib.text_catalogue.windows import cat
from robopolicy.core.advantage import Baseline, Pipeline, Scale, Scope, outcome
from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import Decisions, by_group, by_trajectory
from robopolicy.core.ratios import log_ratio


def test_c_replayed_rows_keep_their_recorded_log_probabilities(decisions, shift):
    """Mixing fresh and replayed rows never recomputes the denominator: the replayed ratio stays off 1."""
    replayed = decisions.select(slice(0, 3)).with_fields(version=torch.full((3,), -1))
    now = decisions.logp_old[:3] + shift[:3]
    batch = cat([decisions.with_fields(logp_old=decisions.logp_old), replayed])
    ratio = log_ratio(torch.cat([decisions.logp_old, now]), batch.logp_old, batch)
    assert bool((ratio[: len(decisions)] == 0).all())
    torch.testing.assert_close(ratio[len(decisions) :], shift[:3] * replayed.valid())
    assert batch.require("version")[-3:].tolist() == [-1, -1, -1]


def test_e_whitening_after_sign_keeping_shaping_is_refused(decisions):
    bonus = Shape(lambda d: torch.full((len(d), 1), 0.5, dtype=torch.float64), fraction=0.7)
    centre = Baseline("mean", Scope(by_group, reduce_over=by_trajectory))
    raw = outcome(decisions)
    before, after = Pipeline([centre])(raw, decisions), Pipeline([centre, bonus])(raw, decisions)
    assert torch.equal(before.sign(), after.sign())
    with pytest.raises(ValueError, match="put the baseline first"):
        Pipeline([bonus, centre])


def test_f_a_shift_without_centring_favours_long_rows_until_centred_again():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    decisions = Decisions(torch.zeros(2, 4), mask=mask, group=torch.zeros(2, dtype=torch.long))
    bonus = Shape(lambda d: torch.tensor([[0.5], [0.0]]))  # bonus of the long row
    flat = torch.zeros(2, 4)
    mean = lambda a: AGGREGATES["token_mean"](a, mask, decisions, 1.0).item()  # noqa: E731
    assert mean(Pipeline([bonus])(flat, decisions)) == pytest.approx(0.4)  # a mean over rows would be 0.25
    assert mean(Pipeline([bonus, Baseline("mean", Scope(by_group))])(flat, decisions)) == pytest.approx(0.0, abs=1e-6)


def test_h_the_conditioning_travels_with_its_row(decisions):
    hint = torch.arange(len(decisions) * 3).view(len(decisions), 3)
    conditioned = decisions.with_fields(extra={"hint": hint})
    rows = torch.tensor([4, 1])
    assert torch.equal(conditioned.select(rows).extra["hint"], hint[rows])
    stacked = cat([conditioned.select(slice(0, 2)), conditioned.select(slice(2, None))])
    assert torch.equal(stacked.extra["hint"], hint)
    with pytest.raises(ValueError, match="same extra fields"):
        cat([conditioned, decisions])


def test_masked_entries_never_leak_through_a_stage(decisions):
    """Invalid values at prompt and padding entries reach neither statistics nor the loss."""
    valid = decisions.valid()
    scope = Scope(by_group)
    pipeline = Pipeline(
        [Baseline("mean", scope), Scale(scope), Modulate(lambda d: torch.ones(len(d), 1, dtype=torch.float64))]
    )
    dirty = decisions.require("reward").masked_fill(~valid, torch.nan)
    clean = pipeline(decisions.require("reward"), decisions)
    torch.testing.assert_close(pipeline(dirty, decisions), clean)
    assert bool((clean[~valid] == 0).all())
