"""Tests of predicted outcomes: a world model must predict success more often for recorded successes."""

import pytest
import torch

from robopolicy.evaluation.predicted_outcomes import PredictedOutcomes
from robopolicy.worldmodel.action_following import ActionFollowingReport, check_gates
from robopolicy.worldmodel.replays import Replays


def replays(*groups: tuple[bool, int, int]) -> Replays:
    """Replays of groups of episodes: their recorded success, their number, and how many are predicted to succeed."""
    recorded = torch.cat([torch.full((count,), success) for success, count, _ in groups])
    logits = torch.cat([2.0 * (torch.arange(count) < wins) - 1.0 for _, count, wins in groups])
    return Replays(recorded, logits, logits, torch.zeros(1))


@pytest.mark.parametrize(
    ("good", "bad", "passed"),
    [
        ((20, 20), (20, 0), True),
        ((5, 5), (5, 0), True),
        ((40, 12), (40, 0), True),  # rare successes, but only for good episodes
        ((20, 1), (20, 0), False),  # the expert has 5 % in the model, and 100 % in the simulator
        ((20, 10), (20, 10), False),
        ((20, 0), (20, 20), False),
        ((4, 0), (20, 0), True),  # too few to test
        ((20, 0), (4, 0), True),
    ],
)
def test_the_gate_asks_for_a_significant_difference(good, bad, passed):
    found = PredictedOutcomes.of(replays((True, *good), (False, *bad)))
    follows = ActionFollowingReport({"true": {1: 25.1}, "shuffled": {1: 20.0}, "zero": {1: 20.0}}, {}, 16)
    assert check_gates(follows, failures=0.5).passed
    verdict = check_gates(follows, failures=0.5, further=found.reasons())
    assert verdict.passed == passed and len(verdict.reasons) == (not passed)


def test_too_few_outcomes_are_stated():
    found = PredictedOutcomes.of(replays((True, 4, 4), (False, 20, 0)))
    assert found.describe().endswith("takes 5 recorded successes and failures: it had 4 and 20.")


def test_the_reason_has_both_rates():
    (reason,) = PredictedOutcomes.of(replays((True, 20, 1), (False, 10, 0))).reasons()
    assert reason == (
        "It does not distinguish good from bad policies: it predicts success for 5% of 20 recorded successes and 0% of "
        "10 recorded failures."
    )
    assert PredictedOutcomes.of(replays((True, 20, 20), (False, 10, 0))).describe() == (
        "From the actions of recorded episodes it predicts success for 100% of 20 recorded successes and 0% of 10 "
        "recorded failures."
    )
