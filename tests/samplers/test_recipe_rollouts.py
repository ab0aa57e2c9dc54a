"""The `rollout` section of every recipe of `configs/text`: played as tokens and as a chain, learned from, resumed."""

from __future__ import annotations

import pytest
import torch
from playground import Playground
from torch.testing import assert_close

from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe, recipe_names
from robopolicy.text.rollouts.collector import DEFAULTS, Collector
from robopolicy.text.rollouts.protocols import Pool

NAMES = [name for name in recipe_names() if DEFAULTS.keys() & read_recipe(name).get("rollout", {}).keys()]


def collector(name: str, world: Playground, size: int = 4) -> Collector:
    count = len(world.secret)
    pool = Pool(world.tasks(), category=torch.arange(count) % 2, difficulty=torch.arange(count))
    rollout = read_recipe(name)["rollout"]
    return Collector(rollout, pool, world, group_size=size, seed=0, others=rollout)


def completed(decisions: Decisions) -> Decisions:
    """With what a reference, a critic and the scoring of earlier rollouts would add."""
    value = torch.linspace(0, 1, decisions.shape[1], dtype=torch.float64).expand(decisions.shape)
    extra = {**decisions.extra, "drift": value.new_zeros(len(decisions))}
    return decisions.with_fields(logp_ref=decisions.logp_old - 0.1, value=value, extra=extra)


@pytest.mark.parametrize("layout", ["tokens", "chain"])
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_plays_and_learns(name, layout):
    recipe, world = Recipe.from_plain(read_recipe(name)), Playground(layout, keys=6, length=4, symbols=2)
    side = collector(name, world)
    for _ in range(2):
        batch = side.collect(2)
        scored = completed(batch.decisions)
        decisions = scored.select(recipe.select(scored))
        assert len(decisions) and bool(decisions.need("reward").isfinite().all())
        advantage = recipe.advantage(decisions)
        logp = world.scored(batch.attempts)[recipe.select(scored)]
        loss, info = recipe.loss(decisions, advantage, logp, decisions.entropy)
        (gradient,) = torch.autograd.grad(loss, world.logits)
        assert bool(gradient.isfinite().all())
        recipe.observe(decisions, info)
        if len(advantage) == len(batch.decisions):
            side.observe(batch, advantage)
    again = collector(name, world)
    again.load_state_dict(side.state_dict())
    state = world.generator.get_state()
    ahead = side.collect(2).decisions
    world.generator.set_state(state)
    assert_close(again.collect(2).decisions.logp_old, ahead.logp_old, rtol=0, atol=0)
