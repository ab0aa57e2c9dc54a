"""The sampling side as one object: what it plays, drops, refills, reports and remembers."""

from dataclasses import replace

import pytest
import torch
from playground import Playground
from torch.testing import assert_close

from robopolicy.core.recipe import Recipe
from robopolicy.text.rollouts.collector import Collector
from robopolicy.text.rollouts.protocols import REPLAYED, Pool

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
    "reward": [{"name": "sum", "terms": {"reward": 1.0, "share": 0.1}}],
    "sampler": {"name": "category_bandit", "rate": 0.5},
    "topology": {"name": "branch", "initial": 0.5},
    "intervention": [{"name": "replay", "mean": 2.0}, {"name": "self_correct", "count": 2}],
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


def test_the_last_batch_is_learned_from_again_and_resumes(world):
    side = collector(world, {"again": True})
    first, second, third = (side.collect(2) for _ in range(3))
    assert [attempt.source for attempt in first.attempts] == [0] * 8
    for before, now in ((first, second), (second, third)):
        assert [attempt.source for attempt in now.attempts] == [0] * 8 + [REPLAYED] * 8
        fresh = [attempt for attempt in before.attempts if attempt.source != REPLAYED]
        assert [attempt.reward for attempt in now.attempts[8:]] == [attempt.reward for attempt in fresh]
        rows = now.decisions.source == REPLAYED
        assert_close(now.decisions.logp_old[rows], before.decisions.logp_old[before.decisions.source != REPLAYED])
    again = collector(world, {"again": True})
    again.load_state_dict(side.state_dict())
    assert [attempt.task.key for attempt in again._last] == [attempt.task.key for attempt in third.attempts[:8]]
    follow = {"name": "gradient_weights", "objectives": ["share"]}
    with pytest.raises(ValueError, match="leave one of them out"):
        collector(world, {"again": True, "reward": [follow]})


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


def test_tied_groups_are_dropped_and_refilled(world):
    """DAPO: every group that is learned from is mixed, at the cost of more attempts; the sampler hears of all."""
    world.know(0)
    world.know(1)
    side = collector(world, {"intervention": ["drop"], "refill": 20})
    heard = []
    side.sampler.observe = lambda keys, rewards, advantage: heard.append((keys, rewards, advantage))
    batch = side.collect(3)
    rewards = batch.decisions.require("reward").sum(1)
    for key in batch.decisions.group.unique():
        assert key >= 2 and 0 < float(rewards[batch.decisions.group == key].sum()) < 4
    assert len(world.played) > 12
    side.observe(batch, torch.ones(len(batch.decisions), 1))
    ((keys, verdicts, size),) = heard
    assert (
        len(keys) == len(world.played) and bool((size[keys < 2] == 0).all()) and bool((verdicts[keys < 2] == 1).all())
    )


def test_faults_under_help_and_in_rewards_are_reported_too(world):
    for key in range(4):
        world.know(key, -1e9)
    play = world.play

    def faulty(tasks, units=None):
        played = play(tasks, units=units)
        told = [replace(a, reward=float("nan")) if a.task.context and a.task.key == 1 else a for a in played]
        return [replace(a, metrics={"share": float("nan")}) if a.task.key == 3 else a for a in told]

    world.play = faulty
    plain = {"intervention": [{"name": "hint", "shares": [1.0]}], "reward": [{"name": "sum", "terms": {"share": 1.0}}]}
    batch = collector(world, plain).collect(4)
    assert sorted(batch.lost) == [1] * 4 + [3] * 4 and {attempt.task.key for attempt in batch.attempts} == {0, 2}
    assert bool(batch.decisions.require("reward").isfinite().all())


def test_a_batch_of_nothing_is_said(world):
    for key in range(4):
        world.know(key)
    with pytest.raises(RuntimeError, match="No group is left to learn from"):
        collector(world, {"intervention": ["drop"]}).collect(2)


def test_interventions_see_verdicts_and_rows_carry_rewards(world):
    """A shaped reward does not hide that a group has failed."""
    plain = {"reward": [{"name": "sum", "terms": {"reward": 0.0, "share": 5.0}}], "intervention": ["replay"]}
    side = collector(world, plain)
    world.know(0)
    side.interventions[0].observe([[world.play([world.tasks()[0]])[0]]])
    world.know(0, -1e9)
    batch = side.collect(4)
    replayed = [attempt for attempt in batch.attempts if attempt.source == REPLAYED]
    assert [attempt.reward for attempt in replayed] == [5.0] and replayed[0].task.key == 0


def test_terms_that_are_no_numbers_are_told(world):
    with pytest.raises(ValueError, match=r"'first' in option 'terms' .* must be a number, got 'a'"):
        collector(world, {"reward": [{"name": "sum", "terms": {"first": "a"}}]})
