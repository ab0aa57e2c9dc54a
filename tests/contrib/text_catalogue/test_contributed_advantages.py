"""Tests of contributed advantage stages and trackers on both layouts."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.curricula import MeanTracker
from robopolicy.contrib.text_catalogue.stages import Modulate, Shape
from robopolicy.core.advantage import TrackerBaseline, outcome
from robopolicy.core.decisions import by_group


def test_a_tracked_baseline_needs_only_one_rollout_per_prompt(decisions):
    tracker = MeanTracker(prior=0.25)
    torch.testing.assert_close(TrackerBaseline(tracker)(outcome(decisions), decisions), outcome(decisions) - 0.25)
    keys = decisions.require("group")
    tracker.write(keys, keys.double())
    expected = outcome(decisions) - keys.double().unsqueeze(1)
    torch.testing.assert_close(TrackerBaseline(tracker)(outcome(decisions), decisions), expected)


def test_modulation_can_be_restricted_to_one_sign(decisions):
    raw = decisions.require("reward")
    double = lambda d: torch.full((len(d), 1), 2.0)  # noqa: E731
    torch.testing.assert_close(Modulate(double)(raw, decisions), 2 * raw)
    torch.testing.assert_close(Modulate(double, "positive")(raw, decisions), torch.where(raw > 0, 2 * raw, raw))
    torch.testing.assert_close(Modulate(double, "negative")(raw, decisions), torch.where(raw < 0, 2 * raw, raw))


def test_shaping_is_bounded(decisions):
    raw = decisions.require("reward")
    huge = lambda d: torch.full(d.shape, -50.0, dtype=torch.float64)  # noqa: E731
    valid = decisions.valid()
    torch.testing.assert_close(Shape(huge, limit=0.1)(raw, decisions)[valid], raw[valid] - 0.1)
    kept = Shape(huge, fraction=0.7)(raw, decisions)
    assert torch.equal(kept[valid].sign(), raw[valid].sign())


def test_mean_tracker_averages_exponentially():
    tracker = MeanTracker(decay=0.5)
    tracker.write(torch.tensor([1, 1]), torch.tensor([4.0, 0.0]))
    assert tracker.read(torch.tensor([1])).item() == 2.0
    again = MeanTracker(decay=0.5)
    again.load_state_dict(tracker.state_dict())
    assert again.read(torch.tensor([1, 2])).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("build", [lambda: Modulate(by_group, "left"), lambda: Shape(by_group, fraction=1.0)])
def test_unknown_choices_of_factors_and_bonuses_are_refused(build):
    with pytest.raises(ValueError, match="must"):
        build()
