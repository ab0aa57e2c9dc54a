"""The sampling side as one object: what it plays, drops, refills, reports and remembers."""

from dataclasses import replace

import pytest
import torch
from playground import Playground
from torch.testing import assert_close

from robopolicy.core.recipe import Recipe
from robopolicy.text.rollouts.collector import Collector
from robopolicy.text.rollouts.protocols import Pool

GRPO = {
    "title": "grpo",
    "advantage": [
        {
            "name": "baseline",
            "kind": "mean",
            "scope": {"partition": "group", "reduce_over": "trajectory"},
            "singleton": "zero",
        }
    ],
    "estimator": {"surrogate": "policy_gradient"},
}
EVERYTHING = {
    "sampler": {"name": "uncertain"},
    "topology": {"name": "branch", "initial": 0.5},
    "temperature": 0.7,
}


def collector(world: Playground, plain=(), size: int = 4) -> Collector:
    count = len(world.secret)
    pool = Pool(world.tasks(), category=torch.arange(count) % 2, difficulty=torch.arange(count))
    return Collector(dict(plain), pool, world, group_size=size, seed=1)


def learn(world: Playground, side: Collector, groups: int = 3) -> list[float]:
    """One update of REINFORCE with a baseline; the rewards that were played."""
    recipe = Recipe.from_dict(GRPO)
    batch = side.collect(groups)
    advantage = recipe.advantage(batch.decisions)
    loss, _ = recipe.loss(batch.decisions, advantage, world.scored(batch.attempts))
    (gradient,) = torch.autograd.grad(loss, world.logits)
    with torch.no_grad():
        world.logits -= 20.0 * gradient
    side.observe(batch, advantage)
    return [attempt.reward for attempt in batch.attempts]


@pytest.fixture(params=["tokens", "chain"])
def world(request) -> Playground:
    return Playground(request.param, length=4, symbols=2)


def test_a_silent_recipe_plays_flat_groups(world):
    batch = collector(world).collect(3)
    assert [attempt.task.budget for attempt in batch.attempts] == [4] * 12
    assert len(set(batch.decisions.group.tolist())) == 3 and batch.lost == []


def test_it_learns(world):
    torch.manual_seed(0)
    side = collector(world, size=8)
    first = [sum(learn(world, side, 4)) for _ in range(3)]
    for _ in range(40):
        learn(world, side, 4)
    last = [sum(learn(world, side, 4)) for _ in range(3)]
    assert sum(first) / 96 < 0.35 and sum(last) / 96 > 0.8


def test_runs_resume_exactly(world):
    side = collector(world, EVERYTHING)
    for _ in range(4):
        learn(world, side)
    state, generator = side.state_dict(), world.generator.get_state()
    logits = world.logits.detach().clone()
    ahead = [learn(world, side) for _ in range(4)]
    again = Playground(world.layout, length=4, symbols=2)
    again.generator.set_state(generator)
    again.logits = logits.requires_grad_()
    other = collector(again, EVERYTHING)
    other.load_state_dict(state)
    assert [learn(again, other) for _ in range(4)] == ahead


def test_rewards_that_are_no_numbers_are_reported(world):
    """A faulty verdict leaves out its attempt, names the task, and poisons nothing."""
    play = world.play

    def faulty(tasks, units=None):
        played = play(tasks, units=units)
        return [replace(a, reward=float("nan")) if a.task.key == 2 and i % 2 else a for i, a in enumerate(played)]

    world.play = faulty
    batch = collector(world).collect(4)
    assert batch.lost == [2, 2] and len(batch.attempts) == 14
    assert bool(batch.decisions.require("reward").isfinite().all())


def test_the_advantage_is_that_of_decisions(world):
    side = collector(world)
    heard = {}
    side.sampler.observe = lambda keys, rewards, advantage: heard.update(
        zip(keys.tolist(), advantage.tolist(), strict=True)
    )
    batch = side.collect(2)
    advantage = torch.where(batch.decisions.valid(), -batch.decisions.group[:, None].double(), 9.0)
    side.observe(batch, advantage)
    assert_close(
        torch.tensor([heard[key] for key in sorted(heard)]), torch.tensor([float(key) for key in sorted(heard)])
    )


def test_unknown_names_are_told(world):
    with pytest.raises(ValueError, match="Unknown key 'rewards' of rollout; known: reward, sampler"):
        collector(world, {"rewards": []})
    with pytest.raises(ValueError, match="Unknown intervention 'hints'; known: "):
        collector(world, {"intervention": ["hints"]})


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"temperature": -1}, "rollout.temperature must be positive, got -1"),
        ({"refill": 1.5}, "rollout.refill must be a whole number, got 1.5"),
        ({"again": "yes"}, "rollout.again must be true or false, got 'yes'"),
        ({"reward": "sum"}, "rollout.reward must be a list, got 'sum'"),
        ({"topology": 3}, "Expected a name or a mapping of options for topology, found 3"),
    ],
)
def test_values_that_do_not_fit_are_told(world, plain, message):
    with pytest.raises(ValueError, match=message):
        collector(world, plain)
