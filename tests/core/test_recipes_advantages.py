"""Advantage recipes compared with their written formulas or limiting cases."""

import torch
from tabular import Tabular, recipe_of, rewards, tabular
from torch import Tensor


def groups(case: Tabular) -> Tensor:
    return case.decisions.require("group")


def test_single_stream_baseline_is_a_success_rate_that_decays_with_policy_drift() -> None:
    case = tabular()
    recipe = recipe_of("single_stream", advantage=recipe_of("single_stream").plain["advantage"][:1])
    torch.testing.assert_close(recipe.advantage(case.decisions)[:, 0], rewards(case) - 0.5)
    recipe.observe(case.decisions, {})
    keep = torch.exp2(-case.decisions.extra["drift"] / 0.06).clamp(0.875, 0.96)
    won, lost = torch.full((4,), 4.0), torch.full((4,), 4.0)
    for row, key in enumerate(groups(case).tolist()):
        won[key] = keep[row] * won[key] + rewards(case)[row]
        lost[key] = keep[row] * lost[key] + 1 - rewards(case)[row]
    expected = rewards(case) - (won / (won + lost))[groups(case)]
    torch.testing.assert_close(recipe.advantage(case.decisions)[:, 0], expected, atol=1e-6, rtol=1e-6)


def test_single_stream_advantages_do_not_depend_on_row_order() -> None:
    """Shuffling the rows shuffles the advantages."""
    case, recipe = tabular(), recipe_of("single_stream")
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    shuffled = recipe.advantage(case.decisions.select(order))
    torch.testing.assert_close(shuffled, recipe.advantage(case.decisions)[order])
