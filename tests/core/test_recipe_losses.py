"""Tests of the loss of product recipes for arbitrary advantages."""

import math

import pytest
from recipe_losses import check_clipped_loss, check_plain_loss
from tabular import recipe_of, tabular

CLIPPED: dict[str, tuple[float, float, float, str]] = {  # low, high, cap at negative advantages, aggregation
    "gigpo": (0.2, 0.2, math.inf, "sequence_mean"),
    "optimal_token_baseline": (0.2, 0.2, math.inf, "token_mean"),
    "pass_at_k": (0.2, 0.2, math.inf, "sequence_mean"),
    "single_stream": (0.2, 0.28, 10.0, "token_mean"),
    "clip_cov": (0.2, 0.2, math.inf, "token_mean"),
}
PLAIN = {  # policy gradients by log-probability
    "opo": "sequence_sum",
    "reinforce": "sequence_sum",
    "remax": "sequence_sum",
    "rloo": "sequence_sum",
    "gpg": "token_mean",
    "rft": "token_mean",
    "sft": "token_mean",
}


@pytest.mark.parametrize("name", CLIPPED)
def test_recipe_has_the_clipped_loss(name: str) -> None:
    check_clipped_loss(name, *CLIPPED[name])


@pytest.mark.parametrize("name", PLAIN)
def test_recipe_has_the_plain_loss(name: str) -> None:
    check_plain_loss(name, PLAIN[name])


@pytest.mark.parametrize("name", ["dapo", "nft"])
def test_groups_with_equal_outcomes_are_excluded(name: str) -> None:
    case = tabular()
    rows = recipe_of(name).select(case.decisions)
    groups = set(case.decisions.require("group")[rows].tolist())
    assert 0 in groups and 1 not in groups  # group 0 has mixed outcomes, group 1 has failed
