"""Tests of reference policies and of advantages with state."""

from __future__ import annotations

import pytest
import torch
from tabular import rewards, standardised, tabular

from robopolicy.contrib.text_catalogue.references import average_weights, geometric_mixture, tempered
from robopolicy.contrib.text_catalogue.smooth import SmoothStandardize
from robopolicy.core.advantage import outcome


def test_average_is_the_weighted_mean_and_refuses_mismatched_parameters() -> None:
    first, second = ({"w": torch.tensor([value])} for value in (1.0, 3.0))
    assert average_weights([first, second])["w"].item() == 2.0
    assert average_weights([first, second], [3.0, 1.0])["w"].item() == 1.5
    with pytest.raises(ValueError, match="same parameters"):
        average_weights([first, {"v": torch.ones(1)}])
    with pytest.raises(ValueError, match="as many weights"):
        average_weights([first, second], [1.0])
    with pytest.raises(ValueError, match="at least one policy"):
        average_weights([])


def test_tempering_and_mixing_return_distributions_and_reach_their_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(3, 5, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    torch.testing.assert_close(tempered(first, 1.0), first)
    entropy = lambda x: -(x.exp() * x).sum(-1)  # noqa: E731
    assert bool((entropy(tempered(first, 1.2)) > entropy(first)).all())
    torch.testing.assert_close(geometric_mixture(first, second, 0.0), first)
    torch.testing.assert_close(geometric_mixture(first, second, 1.0), second)
    middle = geometric_mixture(first, second, 0.5)
    torch.testing.assert_close(middle.exp().sum(-1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(middle - middle[:, :1], 0.5 * (first + second - (first + second)[:, :1]))


def test_smooth_standardize_matches_its_formula_over_repeated_visits() -> None:
    stage = SmoothStandardize()
    first, second = tabular(seed=0), tabular(seed=1)
    group = first.decisions.require("group")
    now = stage(outcome(first.decisions), first.decisions)[:, 0]
    torch.testing.assert_close(now, standardised(rewards(first), group))  # the first visit is GRPO
    stage.observe(first.decisions)
    found = stage(outcome(second.decisions), second.decisions)[:, 0]
    new = standardised(rewards(second), group)
    both = standardised(torch.cat([rewards(first), rewards(second)]), torch.cat([group, group]))[16:]
    torch.testing.assert_close(found, (new + both) / 2)  # i = 2: both mixtures are the mean
    stage.observe(second.decisions)
    third = stage(outcome(first.decisions), first.decisions)[:, 0]
    new = standardised(rewards(first), group)
    every = torch.cat([rewards(first), rewards(second), rewards(first)])
    whole = standardised(every, torch.cat([group, group, group]))[32:]
    one, other = (2 * new + whole) / 3, (new + 2 * whole) / 3
    torch.testing.assert_close(third, torch.where(one.abs() < other.abs(), one, other))
    again = SmoothStandardize()
    again.load_state_dict(stage.state_dict())
    torch.testing.assert_close(again(outcome(first.decisions), first.decisions)[:, 0], third)


def test_groups_with_equal_rewards_get_advantages_from_earlier_visits() -> None:
    stage, case = SmoothStandardize(), tabular()
    stage.observe(case.decisions)
    mixed = case.decisions.require("group") == 0  # its outcomes differ
    same = case.decisions.with_fields(reward=torch.zeros(16, 6, dtype=torch.float64))
    advantage = stage(outcome(same), same)[:, 0]
    assert bool((advantage[mixed] < 0).all())
    values = torch.cat([rewards(case)[mixed], torch.zeros(4, dtype=torch.float64)])
    whole = standardised(values, torch.zeros(8))[-1]
    assert advantage[mixed][0].item() == pytest.approx(whole.item() / 2)  # A_tot / i
