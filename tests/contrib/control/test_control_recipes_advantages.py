"""Tests of advantage recipes against hand-computed values and limiting cases."""

from __future__ import annotations

import pytest
import torch
from tabular import recipe_of
from torch import Tensor

from robopolicy.contrib.control.stages import SetAdvantage
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions


def episodes(reward: list[float], group: list[int], length: int = 1, **fields: Tensor) -> Decisions:
    """Rollouts of one row each, with their outcome at the first decision."""
    placed = torch.zeros(len(reward), length, dtype=torch.float64)
    placed[:, 0] = torch.tensor(reward)
    return Decisions(torch.zeros_like(placed), reward=placed, group=torch.tensor(group), **fields)


def test_polychromic_advantage_scores_sets_by_reward_times_diversity() -> None:
    case = episodes([1, 1, 1, 0], [0, 0, 0, 0], extra={"signature": torch.tensor([5, 5, 7, 7])})
    found = SetAdvantage(size=2)(outcome(case), case)[:, 0]
    scores = {(0, 1): 0.0, (0, 2): 1.0, (0, 3): 0.5, (1, 2): 1.0, (1, 3): 0.5, (2, 3): 0.0}
    own = [sum(value * (1 if row in key else -1) for key, value in scores.items()) / 3 for row in range(4)]
    assert found.tolist() == pytest.approx(own)
    distinct = case.with_fields(extra={"signature": torch.arange(4)})  # diversity 1 everywhere: the reward, centred
    leave_out = recipe_of("rloo").advantage(distinct)
    torch.testing.assert_close(SetAdvantage(size=3)(outcome(case), distinct), leave_out / 3)
