"""Tests of the contributed selectors: whole trajectories in order, without repeats, and the rule of each selector."""

from __future__ import annotations

import pytest
import torch
from theme_names import parts_of

from robopolicy.core.decisions import Decisions, by_trajectory
from robopolicy.core.recipe import Recipe
from robopolicy.core.registry import build
from robopolicy.recipe_files import read_recipe

OPTIONS = {
    "positive": {"key": "base"},
    "unlikely": {"key": "likelihood", "below": 0.5},
    "demonstration_switch": {"gate": 1},
    "contrast": {"keep": 2},
}


def batch(decisions: Decisions) -> Decisions:
    """Add the fields that the selectors read; the likelihood depends on the group only."""
    base = torch.zeros(len(decisions), dtype=torch.float64)
    likelihood = torch.where(decisions.require("group") == decisions.require("group").min(), 0.1, 0.9).double()
    chosen = torch.randint(3, decisions.shape, generator=torch.Generator().manual_seed(0))
    return decisions.with_fields(extra={"base": base, "likelihood": likelihood, "chosen": chosen})


@pytest.mark.parametrize("name", parts_of("text_catalogue", "selector"))
def test_rows_are_whole_trajectories_in_order(decisions: Decisions, name: str) -> None:
    given = batch(decisions)
    selector = build("selector", {"name": name, **OPTIONS.get(name, {})})
    rows = selector(given, torch.Generator().manual_seed(0))
    assert rows.tolist() == sorted(set(rows.tolist())) and len(rows) > 0
    trajectory = by_trajectory(given).squeeze(1)
    if name != "demonstration_switch":  # the sources of the fixtures differ within a trajectory
        assert rows.tolist() == torch.nonzero(torch.isin(trajectory, trajectory[rows])).flatten().tolist()


def test_rows_of_better_trajectories_are_sampled_more_often() -> None:
    decisions = Decisions(
        torch.zeros(4, 1),
        reward=torch.tensor([[0.0], [1.0], [3.0], [-1.0]]),
        extra={"mean_ref": torch.zeros(4)},
    )
    generator = torch.Generator().manual_seed(0)
    positive = build("selector", {"name": "positive", "share": 0.5})
    sampled = torch.cat([positive(decisions, generator) for _ in range(2000)])
    share = (sampled == 2).double().mean().item()
    assert set(sampled.tolist()) == {1, 2} and share == pytest.approx(0.75, abs=0.03)


def test_no_row_is_selected_if_none_exceeds_the_reference() -> None:
    decisions = Decisions(torch.zeros(2, 1), reward=torch.zeros(2, 1), extra={"mean_ref": torch.ones(2)})
    assert len(build("selector", "positive")(decisions, None)) == 0


def test_diverse_selector_keeps_the_most_dissimilar_solutions() -> None:
    """The first solution is selected, then the ones that share the fewest token pairs with it; duplicates come last.

    Source: DED, Wu et al. 2025.
    """
    chosen = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 8, 9], [8, 8, 9]])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    solved = Decisions(torch.zeros(6, 3), reward=torch.ones(6, 3), group=group, extra={"chosen": chosen})
    keep = {
        count: build("selector", {"name": "diverse", "keep": count})(solved, None).tolist() for count in (1, 2, 3, 9)
    }
    assert keep == {1: [0, 4], 2: [0, 3, 4, 5], 3: [0, 2, 3, 4, 5], 9: [0, 1, 2, 3, 4, 5]}
    masked = solved.with_fields(mask=torch.tensor([[True, True, False]] * 6))  # the last token is not a decision
    assert build("selector", {"name": "diverse", "keep": 2})(masked, None).tolist() == [0, 3, 4, 5]


def test_ded_keeping_every_solution_selects_the_same_rows_as_rft() -> None:
    chosen = torch.tensor([[1, 2], [3, 4], [5, 6]])
    reward = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    batch = Decisions(torch.zeros(3, 2), reward=reward, group=torch.zeros(3).long(), extra={"chosen": chosen})
    plain = read_recipe("ded")
    plain["select"][1]["keep"] = 3
    rows = {
        name: Recipe.from_dict(recipe).select(batch) for name, recipe in (("ded", plain), ("rft", read_recipe("rft")))
    }
    assert torch.equal(rows["ded"], rows["rft"]) and rows["ded"].tolist() == [0, 2]
