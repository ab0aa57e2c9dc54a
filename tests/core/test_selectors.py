"""Tests of the selectors: whole trajectories in order, without repeats."""

import pytest
import torch

from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions, by_trajectory
from robopolicy.core.group_statistics import InformativeScale
from robopolicy.core.recipe import Recipe
from robopolicy.core.registry import build
from robopolicy.core.selection import SELECTORS

SCOPE = {"partition": "group", "reduce_over": "trajectory"}


def batch(decisions: Decisions) -> Decisions:
    """Add the fields that the selectors read; the likelihood depends on the group only."""
    base = torch.zeros(len(decisions), dtype=torch.float64)
    likelihood = torch.where(decisions.require("group") == decisions.require("group").min(), 0.1, 0.9).double()
    chosen = torch.randint(3, decisions.shape, generator=torch.Generator().manual_seed(0))
    return decisions.with_fields(extra={"base": base, "likelihood": likelihood, "chosen": chosen})


@pytest.mark.parametrize("name", SELECTORS.product())
def test_rows_are_whole_trajectories_in_order(decisions: Decisions, name: str) -> None:
    given = batch(decisions)
    selector = build("selector", name)
    rows = selector(given, torch.Generator().manual_seed(0))
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) > 0
    trajectory = by_trajectory(given).squeeze(1)
    assert rows.tolist() == torch.nonzero(torch.isin(trajectory, trajectory[rows])).flatten().tolist()


def test_groups_of_equal_outcomes_are_found_despite_rounding() -> None:
    """The mean of equal single-precision numbers may differ from them."""
    decisions = Decisions(torch.zeros(6, 1), reward=torch.full((6, 1), 0.1), group=torch.tensor([0, 0, 0, 1, 1, 1]))
    assert len(build("selector", "mixed")(decisions, None)) == 0
    one = decisions.with_fields(reward=torch.tensor([[0.1]] * 5 + [[0.1 + 1e-7]]))
    assert build("selector", "mixed")(one, None).tolist() == [3, 4, 5]


def test_successes_have_an_outcome_above_the_threshold(decisions: Decisions) -> None:
    rows = build("selector", {"name": "successes", "above": 0.2})(decisions, None)
    assert torch.equal(rows, torch.nonzero(outcome(decisions)[:, 0] > 0.2).squeeze(1))


def test_empty_selection_has_no_advantage_and_skips_later_selectors() -> None:
    agreed = Decisions(torch.zeros(4, 2), reward=torch.zeros(4, 2), group=torch.tensor([0, 0, 1, 1]))
    recipe = Recipe.from_dict({"select": ["mixed", "successes"], "advantage": [{"name": "scale", "scope": SCOPE}]})
    rows = recipe.select(agreed)
    assert len(rows) == 0 and recipe.advantage(agreed.select(rows)).shape == (0, 1)


def test_masked_rollouts_have_no_outcome():
    mask = torch.ones(8, 3, dtype=torch.bool)
    mask[0] = False
    reward = torch.zeros(8, 3)
    reward[:6, -1] = 1.0  # the first group is solved, also by the masked rollout
    decisions = Decisions(torch.zeros(8, 3), mask=mask, reward=reward, group=torch.arange(8) // 4)
    assert build("selector", "mixed")(decisions, None).tolist() == [4, 5, 6, 7]
    advantage = torch.tensor([[0.0]] * 6 + [[1.0]] * 2)
    assert InformativeScale()(advantage, decisions)[-1].item() == 3.5  # 7 rollouts count
    tracked = build("stage", {"name": "tracker_baseline", "tracker": {"name": "beta"}})
    tracked.observe(decisions.with_fields(group=torch.arange(8)))
    before, solved = tracked.tracker.read(torch.tensor([9, 1])).tolist()
    assert tracked.tracker.read(torch.tensor([0])).item() == before < solved
