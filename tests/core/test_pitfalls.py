"""Mistakes seen in published code, one test each; letters as in the design notes on estimator parts."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.stages import Modulate, Shape
from robopolicy.contrib.text_catalogue.windows import cat
from robopolicy.core.advantage import Baseline, Pipeline, Scale, Scope, outcome
from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import Decisions, by_group, by_group_depth, by_trajectory
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import importance_weight, log_ratio

REWARDS = torch.tensor([[1.0], [1.0], [1.0], [0.0]])  # one rollout of three turns (rows) and one of a single turn


def two_rollouts() -> Decisions:
    return Decisions(torch.zeros(4, 2), group=torch.zeros(4, dtype=torch.long), trajectory=torch.tensor([0, 0, 0, 1]))


def test_a_statistics_over_turns_and_over_rollouts_differ_and_both_can_be_said():
    decisions = two_rollouts()
    turns = Baseline("mean", Scope(by_group))(REWARDS, decisions)
    rollouts = Baseline("mean", Scope(by_group, per=by_trajectory))(REWARDS, decisions)
    assert turns.flatten().tolist() == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert rollouts.flatten().tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_a_counting_per_rollout_also_holds_where_the_partition_cuts_rollouts():
    decisions = two_rollouts().with_fields(depth=torch.tensor([[0, 1]]).expand(4, 2))
    rewards = REWARDS.expand(4, 2) + torch.tensor([[0.0, 10.0]])
    advantage = Baseline("mean", Scope(by_group_depth, per=by_trajectory))(rewards, decisions)
    assert advantage[:, 0].tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])
    assert advantage[:, 1].tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5], abs=1e-5)


def test_a_teacher_rows_can_be_kept_out_of_the_statistics():
    decisions = two_rollouts().with_fields(trajectory=torch.arange(4), source=torch.tensor([0, 0, 1, 0]))
    rewards = torch.tensor([[1.0], [0.0], [5.0], [0.5]])
    own = Baseline("mean", Scope(by_group, source=0))(rewards, decisions)
    assert own.flatten().tolist() == pytest.approx([0.5, -0.5, 4.5, 0.0])
    loo = Baseline("leave_one_out", Scope(by_group, source=0))(rewards, decisions)
    assert loo.flatten().tolist() == pytest.approx([0.75, -0.75, 4.5, 0.0])


def test_a_unbiased_and_population_deviation_are_told_apart():
    decisions = Decisions(torch.zeros(4, 1), group=torch.zeros(4, dtype=torch.long))
    rewards = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    unbiased = Scale(Scope(by_group), eps=0.0)(rewards - 0.5, decisions)
    population = Scale(Scope(by_group), unbiased=False, eps=0.0)(rewards - 0.5, decisions)
    assert population[0].item() == pytest.approx(1.0)
    assert unbiased[0].item() == pytest.approx(0.75**0.5)


def test_b_the_length_normalizer_lives_in_the_aggregation_alone(decisions, shift):
    """Advantages, ratios and surrogates know no length: only the choice of aggregation changes the scale."""
    logp, advantage = decisions.logp_old + shift, outcome(decisions)
    losses = {
        name: Estimator(EstimatorConfig(aggregate=name, length=50.0))(decisions, advantage, logp)[0].item()
        for name in AGGREGATES
    }
    trajectories = by_trajectory(decisions).unique().numel()
    count = int(decisions.valid().sum())
    assert losses["const"] == pytest.approx(losses["seq_sum"] / 50.0)
    assert losses["tok"] * count == pytest.approx(losses["seq_sum"] * trajectories)


def test_c_replayed_rows_keep_their_recorded_log_probabilities(decisions, shift):
    """Mixing fresh and replayed rows never recomputes the denominator: the replayed ratio stays off 1."""
    replayed = decisions.select(slice(0, 3)).with_fields(version=torch.full((3,), -1))
    now = decisions.logp_old[:3] + shift[:3]
    batch = cat([decisions.with_fields(logp_old=decisions.logp_old), replayed])
    ratio = log_ratio(torch.cat([decisions.logp_old, now]), batch.logp_old, batch)
    assert bool((ratio[: len(decisions)] == 0).all())
    torch.testing.assert_close(ratio[len(decisions) :], shift[:3] * replayed.valid())
    assert batch.need("version")[-3:].tolist() == [-1, -1, -1]


def test_e_whitening_after_sign_keeping_shaping_is_refused(decisions):
    bonus = Shape(lambda d: torch.full((len(d), 1), 0.5, dtype=torch.float64), fraction=0.7)
    centre = Baseline("mean", Scope(by_group, per=by_trajectory))
    raw = outcome(decisions)
    before, after = Pipeline([centre])(raw, decisions), Pipeline([centre, bonus])(raw, decisions)
    assert torch.equal(before.sign(), after.sign())
    with pytest.raises(ValueError, match="put the baseline first"):
        Pipeline([bonus, centre])


def test_f_a_shift_without_centring_favours_long_rows_until_centred_again():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    decisions = Decisions(torch.zeros(2, 4), mask=mask, group=torch.zeros(2, dtype=torch.long))
    bonus = Shape(lambda d: torch.tensor([[0.5], [0.0]]))  # to the long row
    flat = torch.zeros(2, 4)
    mean = lambda a: AGGREGATES["tok"](a, mask, decisions, 1.0).item()  # noqa: E731
    assert mean(Pipeline([bonus])(flat, decisions)) == pytest.approx(0.4)  # not the 0.25 of a mean over rows
    assert mean(Pipeline([bonus, Baseline("mean", Scope(by_group))])(flat, decisions)) == pytest.approx(0.0, abs=1e-6)


def test_g_the_engine_mismatch_enters_exactly_once(decisions, shift):
    """weight (old / behaviour) x ratio (new / old) = new / behaviour."""
    logp = decisions.logp_old + shift
    weight = importance_weight(decisions, cap=1e9)
    ratio = log_ratio(logp, decisions.logp_old, decisions).exp()
    expected = log_ratio(logp, decisions.logp_behaviour, decisions).exp()
    torch.testing.assert_close(weight * ratio, expected)
    loss, _ = Estimator(EstimatorConfig(surrogate="is", importance_cap=1e9))(decisions, outcome(decisions), logp)
    valid = decisions.valid()
    torch.testing.assert_close(loss, -(outcome(decisions) * expected)[valid].mean())


def test_g_a_sampler_that_is_the_old_policy_needs_no_correction(decisions, shift):
    same = decisions.with_fields(logp_behaviour=decisions.logp_old)
    plain, _ = Estimator(EstimatorConfig())(decisions, outcome(decisions), decisions.logp_old + shift)
    corrected, _ = Estimator(EstimatorConfig(importance_cap=2.0))(same, outcome(decisions), decisions.logp_old + shift)
    torch.testing.assert_close(plain, corrected)


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
    """Garbage where the policy did not decide (prompt, padding) reaches neither statistics nor the loss."""
    valid = decisions.valid()
    scope = Scope(by_group)
    pipeline = Pipeline(
        [Baseline("mean", scope), Scale(scope), Modulate(lambda d: torch.ones(len(d), 1, dtype=torch.float64))]
    )
    dirty = decisions.need("reward").masked_fill(~valid, torch.nan)
    clean = pipeline(decisions.need("reward"), decisions)
    torch.testing.assert_close(pipeline(dirty, decisions), clean)
    assert bool((clean[~valid] == 0).all())
