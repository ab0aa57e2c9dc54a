"""Tests of mistakes found in published code, one each; letters refer to the design notes on estimator parts."""

import pytest
import torch

from robopolicy.core.advantage import Baseline, Scale, Scope, outcome
from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import Decisions, by_group, by_group_depth, by_trajectory
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import importance_weight, log_ratio

REWARDS = torch.tensor([[1.0], [1.0], [1.0], [0.0]])  # one rollout of three turns (rows) and one of a single turn


def two_rollouts() -> Decisions:
    return Decisions(torch.zeros(4, 2), group=torch.zeros(4, dtype=torch.long), trajectory=torch.tensor([0, 0, 0, 1]))


def test_a_statistics_over_turns_differ_from_statistics_over_rollouts():
    decisions = two_rollouts()
    turns = Baseline("mean", Scope(by_group))(REWARDS, decisions)
    rollouts = Baseline("mean", Scope(by_group, reduce_over=by_trajectory))(REWARDS, decisions)
    assert turns.flatten().tolist() == pytest.approx([0.25, 0.25, 0.25, -0.75])
    assert rollouts.flatten().tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])


def test_a_rollouts_count_once_if_the_partition_splits_them():
    decisions = two_rollouts().with_fields(depth=torch.tensor([[0, 1]]).expand(4, 2))
    rewards = REWARDS.expand(4, 2) + torch.tensor([[0.0, 10.0]])
    advantage = Baseline("mean", Scope(by_group_depth, reduce_over=by_trajectory))(rewards, decisions)
    assert advantage[:, 0].tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])
    assert advantage[:, 1].tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5], abs=1e-5)


def test_a_teacher_rows_can_be_excluded_from_the_statistics():
    decisions = two_rollouts().with_fields(trajectory=torch.arange(4), source=torch.tensor([0, 0, 1, 0]))
    rewards = torch.tensor([[1.0], [0.0], [5.0], [0.5]])
    own = Baseline("mean", Scope(by_group, source=0))(rewards, decisions)
    assert own.flatten().tolist() == pytest.approx([0.5, -0.5, 4.5, 0.0])
    loo = Baseline("leave_one_out", Scope(by_group, source=0))(rewards, decisions)
    assert loo.flatten().tolist() == pytest.approx([0.75, -0.75, 4.5, 0.0])


def test_a_unbiased_and_population_deviation_differ():
    decisions = Decisions(torch.zeros(4, 1), group=torch.zeros(4, dtype=torch.long))
    rewards = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    unbiased = Scale(Scope(by_group), eps=0.0)(rewards - 0.5, decisions)
    population = Scale(Scope(by_group), unbiased=False, eps=0.0)(rewards - 0.5, decisions)
    assert population[0].item() == pytest.approx(1.0)
    assert unbiased[0].item() == pytest.approx(0.75**0.5)


def test_b_only_the_aggregation_normalises_by_length(decisions, shift):
    """Advantages, ratios and surrogates do not depend on length: only the choice of aggregation changes the scale."""
    logp, advantage = decisions.logp_old + shift, outcome(decisions)
    losses = {
        name: Estimator(EstimatorConfig(aggregate=name, length=50.0))(decisions, advantage, logp)[0].item()
        for name in AGGREGATES.product()
    }
    trajectories = by_trajectory(decisions).unique().numel()
    count = int(decisions.valid().sum())
    assert losses["fixed_length"] == pytest.approx(losses["sequence_sum"] / 50.0)
    assert losses["token_mean"] * count == pytest.approx(losses["sequence_sum"] * trajectories)


def test_g_the_engine_mismatch_enters_exactly_once(decisions, shift):
    """weight (old / behaviour) x ratio (new / old) = new / behaviour."""
    logp = decisions.logp_old + shift
    weight = importance_weight(decisions, cap=1e9)
    ratio = log_ratio(logp, decisions.logp_old, decisions).exp()
    expected = log_ratio(logp, decisions.logp_behaviour, decisions).exp()
    torch.testing.assert_close(weight * ratio, expected)
    loss, _ = Estimator(EstimatorConfig(surrogate="importance_sampling", importance_cap=1e9))(
        decisions, outcome(decisions), logp
    )
    valid = decisions.valid()
    torch.testing.assert_close(loss, -(outcome(decisions) * expected)[valid].mean())


def test_g_a_sampler_that_is_the_old_policy_needs_no_correction(decisions, shift):
    same = decisions.with_fields(logp_behaviour=decisions.logp_old)
    plain, _ = Estimator(EstimatorConfig())(decisions, outcome(decisions), decisions.logp_old + shift)
    corrected, _ = Estimator(EstimatorConfig(importance_cap=2.0))(same, outcome(decisions), decisions.logp_old + shift)
    torch.testing.assert_close(plain, corrected)
