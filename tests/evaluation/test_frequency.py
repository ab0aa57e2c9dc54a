"""Tests of slower decisions: the actions between two decisions, and the score averaged over decision rates."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import PolicyActor
from robopolicy.evaluation.frequency import (
    ActionRepeatActor,
    frequency_curve,
    frequency_score,
    frequency_scores,
    frequency_table,
)
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.result import Cost, EvalResult


def result(*outcomes: float, success: bool = True) -> EvalResult:
    values = np.array(outcomes)
    n = len(values)
    found = values.astype(bool) if success else None
    return EvalResult("fake", np.arange(n), values, np.ones(n, np.int64), found, Cost(1, n, n, n, 1.0))


@pytest.mark.parametrize(("hold", "expected"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 3, 3])])
def test_action_repeat_truncates_long_chunks_and_repeats_the_last_action(make_sim, make_policy, hold, expected):
    actor = PolicyActor(make_policy(horizon=4, action_horizon=3).eval())
    sim = make_sim(2)
    state = sim.reset(0)["state"].unsqueeze(1).repeat(1, 2, 1)
    call = (sim, {"state": state}, torch.arange(2), torch.arange(2), torch.zeros(2, dtype=torch.int64))
    whole, held = actor(*call), ActionRepeatActor(actor, hold)
    assert torch.equal(held(*call), whole[:, expected])
    assert held.action_horizon == hold and held.obs_horizon == 2 and held.policy_calls == 1


def test_holding_the_own_action_horizon_changes_nothing(make_sim, make_policy):
    policy = make_policy(horizon=4, action_horizon=3)
    curve = frequency_curve(policy, make_sim(5), [1, 3, 6], episodes=12, seed=50)
    plain = evaluate(policy, make_sim(4), episodes=12, seed=50)
    assert np.array_equal(curve[3].returns, plain.returns) and np.array_equal(curve[3].lengths, plain.lengths)
    assert curve[1].cost.decisions > curve[3].cost.decisions > curve[6].cost.decisions
    assert not np.array_equal(curve[1].returns, curve[6].returns)


def test_frequency_score_equals_the_normalised_area_under_the_curve():
    curve = {1: result(1, 1), 3: result(1, 0), 4: result(0, 0)}
    assert frequency_score(curve) == pytest.approx((2 * 0.75 + 1 * 0.25) / 3)
    assert frequency_score({1: result(1), 30: result(1)}) == 1.0


def test_returns_are_scaled_to_the_range_over_all_policies():
    curves = {
        "fast": {1: result(10.0, success=False), 2: result(-10.0, success=False)},
        "slow": {1: result(5.0, success=False), 2: result(5.0, success=False)},
    }
    assert frequency_scores(curves) == pytest.approx({"fast": 0.5, "slow": 0.75})
    positive = {"only": {1: result(4.0, success=False), 2: result(2.0, success=False)}}
    assert frequency_scores(positive) == pytest.approx({"only": 0.75})
    nothing = {"only": {1: result(0.0, success=False), 2: result(0.0, success=False)}}
    assert frequency_scores(nothing) == {"only": 0.0}


def test_the_table_has_a_column_for_every_length():
    header, rows = frequency_table({"a": {1: result(1, 0), 4: result(0, 0)}})
    assert header == ["policy", "every 1", "every 4", "score, 0 to 1"]
    assert rows[0][0] == "a" and rows[0][1].startswith("50.0 %") and rows[0][3] == "0.250"


@pytest.mark.parametrize("holds", [[4], [1, 1], [4, 2], [0, 1]])
def test_lengths_that_do_not_increase_are_refused(make_sim, make_policy, holds):
    with pytest.raises(UserError, match="increasing"):
        frequency_curve(make_policy(), make_sim(2), holds, episodes=2)


def test_incompatible_policy_is_refused(make_sim, make_policy):
    sim = make_sim(2)
    sim.spec = replace(sim.spec, observation={})
    with pytest.raises(UserError):
        frequency_curve(make_policy(), sim, [1, 2], episodes=2)
