"""Tests of every product recipe against the shared rules of recipes."""

import pytest
from recipe_rules import (
    check_learns_from_tokens,
    check_memory_survives_a_checkpoint,
    check_plays_and_learns,
    check_says_what_it_is,
    check_updates_a_denoising_chain,
    check_what_is_masked_reaches_no_part,
    plays,
)
from theme_names import recipes_of

NAMES, ROLLOUTS = recipes_of("product"), recipes_of("product", "rollout")


@pytest.mark.parametrize("name", NAMES)
def test_recipe_has_a_title_and_a_cited_source(name: str) -> None:
    check_says_what_it_is(name)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_recipe_learns_from_tokens(name: str) -> None:
    check_learns_from_tokens(name)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_recipe_updates_a_denoising_chain(name: str) -> None:
    check_updates_a_denoising_chain(name)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_state_survives_a_checkpoint(name: str) -> None:
    check_memory_survives_a_checkpoint(name)


@pytest.mark.parametrize("name", NAMES)
def test_masked_decisions_reach_no_part_of_a_recipe(name: str) -> None:
    check_what_is_masked_reaches_no_part(name)


@pytest.mark.parametrize("layout", ["tokens", "chain"])
@pytest.mark.parametrize("name", list(filter(plays, ROLLOUTS)))
def test_recipe_rolls_out_and_learns(name: str, layout: str) -> None:
    check_plays_and_learns(name, layout)
