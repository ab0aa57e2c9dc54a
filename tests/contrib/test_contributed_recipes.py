"""Every recipe of contrib obeys the rules of recipes, and names parts of the product and of its theme alone."""

from __future__ import annotations

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

from robopolicy import plugins
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe, recipe_ring
from robopolicy_tasks.locomotion.base import parts

THEMES = list(plugins.themes())
NAMES = [name for theme in THEMES for name in recipes_of(theme)]
ROLLOUTS = [name for theme in THEMES for name in recipes_of(theme, "rollout")]


@pytest.mark.parametrize("name", NAMES)
def test_a_contributed_recipe_says_what_it_is(name: str) -> None:
    check_says_what_it_is(name)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_contributed_recipe_learns_from_tokens(name: str) -> None:
    check_learns_from_tokens(name)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_contributed_recipe_updates_a_denoising_chain(name: str) -> None:
    check_updates_a_denoising_chain(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_a_contributed_recipe_survives_a_checkpoint(name: str) -> None:
    check_memory_survives_a_checkpoint(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "oppo"])
def test_what_is_masked_reaches_no_part_of_a_contributed_recipe(name: str) -> None:
    check_what_is_masked_reaches_no_part(name)


@pytest.mark.parametrize("layout", ["tokens", "chain"])
@pytest.mark.parametrize("name", list(filter(plays, ROLLOUTS)))
def test_a_contributed_recipe_plays_and_learns(name: str, layout: str) -> None:
    check_plays_and_learns(name, layout)


@pytest.mark.parametrize("name", NAMES)
def test_a_contributed_recipe_needs_no_other_theme(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, build = recipe_ring(name), parts.build
    strangers: list[str] = []

    def watched(slot, plain):
        part = plain if isinstance(plain, str) else plain.get("name", "") if isinstance(plain, dict) else ""
        if part in parts.REGISTRIES.get(slot, ()) and parts.REGISTRIES[slot].ring(part) not in ("product", home):
            strangers.append(f"{slot} {part}")
        return build(slot, plain)

    for module in ("parts", "recipe"):
        monkeypatch.setattr(f"robopolicy.core.{module}.build", watched)
    rollout = Recipe.from_plain(read_recipe(name)).rollout
    for slot in ("sampler", "topology", "intervention", "reward"):
        given = rollout.get(slot, [])
        for plain in given if isinstance(given, list) else [given]:
            watched(slot, plain)
    assert not strangers
