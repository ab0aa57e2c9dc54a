"""Tests of the advantage pipeline on both layouts: stages, invariants of group methods, trackers, checkpoints."""

import pytest
import torch

from robopolicy.core.advantage import (
    Baseline,
    Broadcast,
    ClipAdvantage,
    ConstantScale,
    DepthDiscount,
    GivenBaseline,
    Mix,
    Pipeline,
    Scale,
    Scope,
    TrackerBaseline,
    outcome,
)
from robopolicy.core.advantage_sources import windowed_mean
from robopolicy.core.decisions import Decisions, by_batch, by_group, by_trajectory, by_unit
from robopolicy.core.trackers import BetaTracker, RunningMoments

PER_ROLLOUT = Scope(by_group, reduce_over=by_trajectory)


def rollout_rewards(decisions: Decisions) -> dict[int, tuple[int, float]]:
    """Group and outcome of each trajectory, computed by a loop."""
    found: dict[int, tuple[int, float]] = {}
    trajectory, valid = by_trajectory(decisions).flatten(), decisions.valid()
    for key in trajectory.unique().tolist():
        rows = trajectory == key
        total = decisions.require("reward")[rows][valid[rows]].sum().item()
        found[key] = (int(decisions.require("group")[rows][0]), total)
    return found


def test_outcome_is_the_reward_of_the_whole_trajectory(decisions):
    rewards = rollout_rewards(decisions)
    for key, total in zip(by_trajectory(decisions).flatten().tolist(), outcome(decisions).flatten(), strict=True):
        assert total.item() == pytest.approx(rewards[key][1])


def test_grpo_equals_a_loop_over_rollouts(decisions):
    """Mean and unbiased deviation over the rollouts of a group, for any number of rows per rollout."""
    pipeline = Pipeline([Baseline("mean", PER_ROLLOUT), Scale(PER_ROLLOUT)])
    advantage = pipeline(outcome(decisions), decisions)
    rewards = rollout_rewards(decisions)
    for key, found in zip(by_trajectory(decisions).flatten().tolist(), advantage.flatten(), strict=True):
        group, reward = rewards[key]
        peers = torch.tensor([r for g, r in rewards.values() if g == group], dtype=torch.float64)
        expected = (reward - peers.mean()) / (peers.std() + 1e-6)
        torch.testing.assert_close(found, expected)


def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_one(decisions):
    raw = outcome(decisions)
    loo = Baseline("leave_one_out", PER_ROLLOUT)(raw, decisions)
    centred = Baseline("mean", PER_ROLLOUT)(raw, decisions)
    size = PER_ROLLOUT.segments(raw, decisions)
    g = size.broadcast(size.count)
    torch.testing.assert_close(loo, g / (g - 1) * centred)


def test_median_of_each_group(decisions):
    raw = outcome(decisions)
    advantage = Baseline("median", PER_ROLLOUT)(raw, decisions)
    rewards = rollout_rewards(decisions)
    for row, group in enumerate(decisions.require("group").tolist()):
        peers = sorted(r for g, r in rewards.values() if g == group)
        middle = 0.5 * (peers[(len(peers) - 1) // 2] + peers[len(peers) // 2])
        assert advantage[row, 0].item() == pytest.approx(raw[row, 0].item() - middle)


@pytest.mark.parametrize("kind", ["mean", "leave_one_out", "median"])
def test_a_constant_added_to_a_group_changes_nothing(decisions, kind):
    raw = outcome(decisions)
    bonus = decisions.require("group").double().unsqueeze(1) * 3.0 + 5.0
    pipeline = Pipeline([Baseline(kind, PER_ROLLOUT), Scale(PER_ROLLOUT)])
    torch.testing.assert_close(pipeline(raw + bonus, decisions), pipeline(raw, decisions))


@pytest.mark.parametrize("kind", ["mean", "leave_one_out", "median"])
def test_equal_rewards_give_no_advantage(decisions, kind):
    equal = torch.full((len(decisions), 1), 0.7, dtype=torch.float64)
    advantage = Pipeline([Baseline(kind, PER_ROLLOUT), Scale(PER_ROLLOUT)])(equal, decisions)
    assert advantage.abs().max() < 1e-6


@pytest.mark.parametrize(("lone", "expected"), [("raw", 2.0), ("zero", 0.0)])
@pytest.mark.parametrize("kind", ["mean", "leave_one_out", "median"])
def test_advantage_of_an_entry_alone_in_its_group(kind, lone, expected):
    decisions = Decisions(torch.zeros(3, 1), group=torch.tensor([0, 1, 1]))
    advantage = Baseline(kind, Scope(by_group), lone)(torch.tensor([[2.0], [1.0], [3.0]]), decisions)
    assert advantage[0].item() == expected


def test_whitening_over_all_valid_decisions(decisions):
    scope = Scope(by_batch)
    white = Pipeline([Baseline("mean", scope), Scale(scope, eps=0.0)])(decisions.require("reward"), decisions)
    valid = white[decisions.valid()]
    assert valid.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert valid.std().item() == pytest.approx(1.0)
    assert bool((white[~decisions.valid()] == 0).all())


def test_a_given_baseline_is_subtracted(decisions):
    raw = outcome(decisions)
    greedy = torch.full((len(decisions),), 0.5, dtype=torch.float64)
    torch.testing.assert_close(GivenBaseline("greedy")(raw, decisions.with_fields(extra={"greedy": greedy})), raw - 0.5)
    with pytest.raises(ValueError, match=r"extra\['greedy'\]"):
        GivenBaseline("greedy")(raw, decisions)


def test_depth_discount_is_one_at_the_last_step(decisions):
    steps = decisions.shape[1]
    factor = DepthDiscount(0.9, steps)(decisions)
    torch.testing.assert_close(factor[0], 0.9 ** torch.arange(steps - 1, -1, -1, dtype=torch.float64))
    only_last = DepthDiscount(0.0, steps)(decisions)
    assert only_last[0].tolist() == [0.0] * (steps - 1) + [1.0]


def test_mix_is_a_weighted_sum_of_branches(decisions):
    mean, identity = Pipeline([Baseline("mean", PER_ROLLOUT)]), Pipeline([])
    raw = outcome(decisions)
    torch.testing.assert_close(
        Mix([mean, identity], [0.25, 0.75])(raw, decisions), 0.25 * mean(raw, decisions) + 0.75 * raw
    )
    with pytest.raises(ValueError, match="one weight per branch"):
        Mix([mean], [0.5, 0.5])


def test_broadcast_gives_every_decision_the_advantage_of_its_row(decisions):
    raw = outcome(decisions)
    spread = Broadcast()(raw, decisions)
    assert spread.shape == decisions.shape
    torch.testing.assert_close(spread, (raw * decisions.valid()))


def test_broadcast_gives_every_decision_the_advantage_of_its_unit(decisions):
    raw, valid = decisions.require("reward"), decisions.valid()
    ids = by_unit(decisions).expand(decisions.shape)
    for reduce in ("sum", "mean"):
        spread = Broadcast(by_unit, reduce)(raw, decisions)
        for index in valid.nonzero():
            row, column = index.tolist()
            inside = raw[valid & (ids == ids[row, column])]
            assert spread[row, column].item() == pytest.approx(getattr(inside, reduce)().item())
    with pytest.raises(ValueError, match="advantage per decision"):
        Broadcast(by_unit)(outcome(decisions), decisions)


def test_constant_scale_and_clip(decisions):
    raw = decisions.require("reward")
    torch.testing.assert_close(ConstantScale(4.0)(raw, decisions), raw / 4)
    assert ClipAdvantage(0.3)(raw, decisions).abs().max() <= 0.3


def test_tracker_state_survives_a_checkpoint(decisions):
    def build() -> Pipeline:
        tracked = Pipeline([TrackerBaseline(BetaTracker())])
        return Pipeline([Mix([tracked, Pipeline([])], [0.5, 0.5]), Baseline("mean", PER_ROLLOUT)])

    first, raw = build(), outcome(decisions)
    tracker = first.stages[0].branches[0].stages[0].tracker  # type: ignore[attr-defined]
    tracker.write(decisions.require("group"), torch.rand(len(decisions)))
    first(raw, decisions)
    second = build()
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(2 * raw, decisions), first(2 * raw, decisions), rtol=0, atol=0)


def test_a_partition_finer_than_the_advantage_is_refused():
    decisions = Decisions(torch.zeros(2, 3), unit=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="broadcast the advantage"):
        Baseline("mean", Scope(by_unit))(torch.zeros(2, 1), decisions)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Baseline("mode", PER_ROLLOUT),
        lambda: Baseline("mean", PER_ROLLOUT, singleton="x"),
        lambda: Broadcast(reduce="max"),
    ],
)
def test_unknown_choices_are_refused(build):
    with pytest.raises(ValueError, match="must"):
        build()


def test_beta_tracker_without_forgetting_is_the_running_average():
    tracker = BetaTracker(forgetting=1.0, successes=0.5, failures=0.5)
    keys = torch.tensor([3, 3, 3, 9])
    tracker.write(keys, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert tracker.read(torch.tensor([3, 9, 4])).tolist() == pytest.approx([2.5 / 4, 0.5 / 2, 0.5])
    again = BetaTracker(forgetting=1.0)
    again.load_state_dict(tracker.state_dict())
    assert again.read(keys).tolist() == tracker.read(keys).tolist()


def test_beta_tracker_forgets():
    tracker = BetaTracker(forgetting=0.5)
    for _ in range(40):
        tracker.write(torch.tensor([0]), torch.tensor([1.0]))
    tracker.write(torch.tensor([0]), torch.tensor([0.0]))
    assert tracker.read(torch.tensor([0])).item() == pytest.approx(0.5, abs=1e-6)


def test_running_moments_equal_the_moments_of_all_values():
    moments, values = RunningMoments(), torch.randn(100, generator=torch.Generator().manual_seed(0)).double()
    for part in values.split(33):
        moments.observe(part)
    moments.observe(values[:0])
    assert moments.mean == pytest.approx(values.mean().item())
    assert moments.std == pytest.approx(values.std(correction=0).item())


def test_smoothed_value_is_the_mean_of_the_following_window():
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    decisions = Decisions(logp_old=torch.zeros(2, 4), mask=valid, trajectory=torch.tensor([0, 1]))
    value = torch.tensor([[1.0, 2.0, 6.0, 3.0], [5.0, 7.0, 99.0, 99.0]])
    found = windowed_mean(value, decisions, 3)
    expected = torch.tensor([(1 + 2 + 6) / 3, (2 + 6 + 3) / 3, (6 + 3) / 2, 3.0, (5 + 7) / 2, 7.0])
    torch.testing.assert_close(found[valid], expected)
