"""How attempts hang together: equal budgets, limits at which a topology is flat, what is and is not a decision."""

from dataclasses import replace

import pytest
import torch
from playground import STEP, Playground
from torch.testing import assert_close

from robopolicy.contrib.text_catalogue.rollout_strategies import (
    AdaptiveHints,
    Privileged,
    PromptModes,
    Resample,
    ResetFromData,
    Rewritten,
    Tree,
)
from robopolicy.contrib.text_catalogue.windows import PartialRollout, PerTurn, Segments
from robopolicy.core.recipe import Recipe
from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import HINTED, POLICY, Task
from robopolicy.text.rollouts.strategies import TOPOLOGIES, Flat
from robopolicy.text.rollouts.trajectories import groups_of, stack
from robopolicy.training.resume import load_tree, save_tree

SETTINGS = {"prompt_modes": {"modes": ["think", "act"]}, "segments": {"units": 1}, "partial_rollout": {"units": 1000}}


GROUP_MEAN = {
    "title": "group mean",
    "advantage": [{"name": "baseline", "kind": "mean", "scope": {"partition": "group", "reduce_over": "trajectory"}}],
    "estimator": {"surrogate": "policy_gradient"},
}


def make(name: str):
    return TOPOLOGIES[name](**SETTINGS.get(name, {}))


@pytest.fixture(params=["tokens", "chain"])
def world(request) -> Playground:
    return Playground(request.param)


def same_as_flat(topology, layout: str, budget: int = 6) -> None:
    """The topology plays what `Flat` plays, draw for draw (of one task: some play the tasks in waves)."""
    first, second = Playground(layout, keys=1), Playground(layout, keys=1)
    ours, flat = topology.rollout(first, first.tasks(budget)), Flat().rollout(second, second.tasks(budget))
    assert len(ours) == len(flat)
    for mine, other in zip(ours, flat, strict=True):
        assert mine.task.prefix is None and mine.task.context is None and mine.source == other.source
        assert torch.equal(mine.decisions.logp_old, other.decisions.logp_old)


@pytest.mark.parametrize("budget", [1, 2, 5, 8])
@pytest.mark.parametrize("name", sorted(set(TOPOLOGIES) - set(TOPOLOGIES.product()) - {"rewritten"}))
def test_the_budget_is_that_of_flat(world, name, budget):
    """Limit of ARPO for tools (Dong et al. 2025): whatever the topology, a task costs its budget."""
    attempts = make(name).rollout(world, world.tasks(budget))
    assert [(group[0].task.key, len(group)) for group in groups_of(attempts)] == [(key, budget) for key in range(4)]
    assert [attempt.task.key for attempt in attempts] == sorted(attempt.task.key for attempt in attempts)


@pytest.mark.parametrize(
    "topology",
    [
        Tree(width=1, depth=0),
        ResetFromData(share=0.0),
        AdaptiveHints(high=0.0, noise=0.0),
        Privileged(share=0.0),
        Rewritten(hard=-1.0, easy=-1.0),
    ],
    ids=lambda topology: type(topology).__name__,
)
@pytest.mark.parametrize("layout", ["tokens", "chain"])
def test_switched_off_it_is_flat(topology, layout):
    """Each strategy makes the groups that its definition states."""
    same_as_flat(topology, layout)


@pytest.mark.parametrize("name", ["tree", "reset_from_data", "adaptive_hints"])
def test_draws_resume(name):
    first, second = make(name), make(name)
    playground = Playground()
    first.rollout(playground, playground.tasks())
    second.load_state_dict(first.state_dict())
    worlds = Playground(seed=5), Playground(seed=5)
    ours, theirs = (t.rollout(w, w.tasks(8)) for t, w in zip((first, second), worlds, strict=True))
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(ours, theirs, strict=True))


def test_rates_of_three_and_seven_tenths_are_still_restated():
    """CLPO (Zhang et al. 2025)."""
    world, asked = Playground("tokens"), []
    play, wins = world.play, (3, 4, 7, 8)
    world.play = lambda tasks: [
        replace(attempt, reward=float(place % 10 < wins[attempt.task.key])) for place, attempt in enumerate(play(tasks))
    ]
    world.rewrite = lambda task, how: asked.append((task.key, how)) or task
    Rewritten().rollout(world, [Task(key, budget=10) for key in range(4)])
    assert asked == [(0, "simpler"), (1, "varied"), (2, "varied")]


def test_plans_at_the_threshold_are_asked_for_again_and_worse_ones_forgotten():
    world, values = Playground("tokens"), iter([0.0, -2.0, 1.0, -1.0, -3.0, 0.5, -1.0])
    play = world.play
    world.play = lambda tasks: [replace(attempt, metrics={"advantage": next(values)}) for attempt in play(tasks)]
    attempts = Resample().rollout(world, [Task(0, budget=3)])
    assert [attempt.metrics["advantage"] for attempt in attempts] == [0.5, -1.0, 1.0]


def test_the_noise_of_hints_goes_both_ways(world):
    shares = []
    world.begin = lambda task, share: shares.append(share)
    part = AdaptiveHints(low=0.5, high=0.5, noise=0.25)
    for _ in range(20):
        part.rollout(world, [Task(0, budget=2)])
    assert 0.25 < min(shares) < 0.4 and 0.6 < max(shares) < 0.75


def test_a_tree_of_one_branch_is_flat(world):
    """Limit of DialTree (Guo et al. 2025): the same number of attempts, none of which shares anything with another."""
    attempts = Tree(width=1, depth=2).rollout(world, [Task(0, budget=6)])
    world.know(0, -1.0)
    starts = {tuple(attempt.record["symbols"].tolist()) for attempt in attempts}
    assert len(attempts) == 6 and len(starts) > 3


def test_a_tree_branches_at_every_unit(world):
    attempts = Tree(width=2, depth=2).rollout(world, [Task(0, budget=4)])
    first = {tuple(attempt.record["symbols"][:STEP].tolist()) for attempt in attempts}
    assert len(first) <= 2, "two first units, each continued twice"
    assert all(attempt.finished and len(attempt.record["symbols"]) == world.length for attempt in attempts)


def test_pruned_branches_are_not_continued(world):
    world.play = lambda tasks, units=None, play=world.play: [  # beginnings that differ from the secret are malformed
        type(attempt)(**{**vars(attempt), "metrics": {"malformed": 1.0 - attempt.metrics["share"]}})
        for attempt in play(tasks, units=units)
    ]
    attempts = Tree(width=27, depth=1, prune="malformed").rollout(world, [Task(0, budget=27)])
    continued = [attempt for attempt in attempts if attempt.task.prefix is not None]
    assert continued and all(
        torch.equal(attempt.record["symbols"][:STEP], world.secret[0, :STEP]) for attempt in continued
    )


def test_where_every_branch_would_be_pruned_none_is(world):
    world.play = lambda tasks, units=None, play=world.play: [
        replace(attempt, metrics={"malformed": 1.0}) for attempt in play(tasks, units=units)
    ]
    attempts = Tree(width=2, depth=1, prune="malformed").rollout(world, [Task(0, budget=2)])
    assert len(attempts) == 2 and all(attempt.task.prefix is not None for attempt in attempts)


def test_given_beginnings_are_no_decisions(world):
    attempts = ResetFromData(seed=1).rollout(world, world.tasks(2))
    for attempt in attempts:
        given = len(attempt.task.prefix["symbols"])
        valid = attempt.decisions.valid().flatten().tolist()
        assert valid == [False] * given + [True] * (world.length - given)
        assert torch.equal(attempt.record["symbols"][:given], world.secret[attempt.task.key, :given])
    assert len({len(attempt.task.prefix["symbols"]) for attempt in attempts}) > 1
    assert all(len({len(a.task.prefix["symbols"]) for a in group}) == 1 for group in groups_of(attempts))


def test_failing_tasks_get_longer_hints(world):
    world.know(0, -1e9)
    world.know(1)
    attempts = AdaptiveHints(low=0.0, high=2 / 3, noise=0.0).rollout(world, world.tasks(4)[:2])
    hard, solved = groups_of(attempts)
    assert [attempt.source for attempt in hard] == [POLICY, POLICY, HINTED, HINTED]
    assert [int(attempt.decisions.valid().sum()) for attempt in hard] == [6, 6, 2, 2]
    assert [attempt.source for attempt in solved] == [POLICY] * 4


def test_restated_tasks_follow_the_success(world):
    world.know(0, -1e9)
    world.know(1)
    attempts = Rewritten().rollout(world, world.tasks(4)[:2])
    assert [attempt.task.context for attempt in attempts] == [None] * 8 + [{"kind": "simpler", "share": 0.5}] * 4


def test_privileged_attempts_answer_the_plain_task(world):
    """Pitfall h: scored without the document, while what was drawn with it is kept beside."""
    attempts = Privileged().rollout(world, [Task(0, budget=4)])
    batch = stack(attempts)
    told = batch.source == HINTED
    assert int(told.sum()) * 2 == len(batch) and all(attempt.task.context is None for attempt in attempts)
    assert torch.equal(batch.logp_old[~told], batch.logp_behaviour[~told])
    assert bool((batch.logp_old[told] < batch.logp_behaviour[told]).any())
    assert_close(batch.logp_old, world.scored(attempts).detach())  # the ratio of fresh data is 1


def test_modes_share_a_group(world):
    attempts = PromptModes(["think", "act"]).rollout(world, world.tasks(4)[:1])
    assert [attempt.task.context["text"] for attempt in attempts] == ["think", "act", "think", "act"]


def test_an_endless_window_is_flat(world):
    """Limit of SUPO (Lu et al. 2025): threshold infinite."""
    same_as_flat(Segments(units=1000), world.layout)


def test_segments_share_their_advantage(world):
    """Limit of SUPO: the gradient is the sum over segments of the same advantage: that of the undivided attempt."""
    recipe = Recipe.from_dict(GROUP_MEAN)
    world.layout = "tokens"
    attempts = Segments(units=1, summaries=2).rollout(world, [Task(0, budget=6)])
    attempts = [type(a)(**{**vars(a), "reward": float(i % 3)}) for i, a in enumerate(attempts)]
    batch = stack(attempts)
    assert len(batch) == 18 and batch.valid().sum(1).tolist() == [STEP] * 18
    advantage = recipe.advantage(batch)
    assert_close(advantage.view(6, 3), (batch.require("reward").sum(1).view(6, 3).sum(1) - 1.0)[:, None].expand(6, 3))
    loss, _ = recipe.loss(batch, advantage, world.scored(attempts))
    (found,) = torch.autograd.grad(loss, world.logits)
    whole = torch.stack([world.logp(Task(0)).gather(1, a.record["symbols"][:, None]).sum() for a in attempts])
    weights = torch.tensor([float(i % 3) for i in range(6)], dtype=torch.float64) - 1.0
    (expected,) = torch.autograd.grad(-(weights * whole).sum() / 36, world.logits)
    assert_close(found, expected)


def test_what_never_ends_is_masked(world):
    attempts = Segments(units=1, summaries=1).rollout(world, [Task(0, budget=2)])
    assert not any(attempt.finished or bool(attempt.decisions.valid().any()) for attempt in attempts)


def test_windows_learn_from_every_decision_once(world):
    """Limit of T-PPO: over the batches each decision is new exactly once, and carries what it was drawn with."""
    topology, new = PartialRollout(units=1), 0
    for number in range(3):
        attempts = topology.rollout(world, [Task(0), Task(1)])
        batch = stack(attempts)
        fresh = batch.valid() & ~batch.extra["seen"]
        assert len(attempts) == 2 and int(fresh.sum()) == 2 * STEP
        assert bool(batch.extra["finished"].all()) == (number == 2)
        new += int(fresh.sum())
    assert new == 2 * world.length == int(batch.valid().sum())
    assert_close(batch.logp_old[batch.valid()], world.scored(attempts).detach()[batch.valid()])
    assert [attempt.task.prefix for attempt in topology.rollout(world, [Task(2)])] == [None]


def test_open_windows_resume(world, tmp_path):
    first, second = PartialRollout(units=1), PartialRollout(units=1)
    first.rollout(world, [Task(0), Task(1)])
    save_tree(tmp_path, first.state_dict())
    second.load_state_dict(load_tree(tmp_path))
    worlds = Playground(world.layout, seed=5), Playground(world.layout, seed=5)
    ours, theirs = (t.rollout(w, [Task(2), Task(3)]) for t, w in zip((first, second), worlds, strict=True))
    assert [a.task.key for a in ours] == [0, 1] == [a.task.key for a in theirs]
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(ours, theirs, strict=True))


def test_turns_count_in_the_statistics():
    """AgentFlow: rows of turns share the final reward, and long attempts weigh more in the group's mean."""
    world = Playground("tokens")
    long, short = Flat().rollout(world, [Task(0, budget=2)])
    short = world.play([Task(0)], units=1)[0]
    topology = PerTurn(Given([long, short]))
    attempts = [
        type(a)(**{**vars(a), "reward": r}) for a, r in zip(topology.rollout(world, []), (1.0, 0.0), strict=True)
    ]
    batch = stack(attempts)
    assert len(batch) == 4
    recipe = Recipe.from_dict(
        {**GROUP_MEAN, "advantage": [{"name": "baseline", "kind": "mean", "scope": {"partition": "group"}}]}
    )
    assert_close(recipe.advantage(batch).flatten(), torch.tensor([0.25, 0.25, 0.25, -0.75], dtype=torch.float64))


def test_one_turn_is_flat():
    """Limit of AgentFlow (Li et al. 2025)."""
    world = Playground("tokens", length=STEP)
    attempts = Flat().rollout(world, [Task(0, budget=3)])
    rows = PerTurn(Given(attempts)).rollout(world, [])
    assert torch.equal(stack(rows).logp_old, stack(attempts).logp_old)
    assert torch.equal(stack(rows).valid(), stack(attempts).valid())


class Given(Flat):
    """Returns what it was given."""

    def __init__(self, attempts) -> None:
        self.attempts = attempts

    def rollout(self, world, tasks):
        return list(self.attempts)


def test_a_world_must_be_able(world):
    class Plain:
        play = world.play

    with pytest.raises(UserError, match="ability 'branch'"):
        Tree().rollout(Plain(), world.tasks(2))


def test_what_the_critic_doubts_is_asked_for_again(world):
    """ReAd (Zhang et al. 2024): accepting everything is flat; a threshold costs more attempts and gives better ones."""
    asked = world.tasks(budget=6)
    flat = Resample("share", threshold=-float("inf")).rollout(world, asked)
    assert len(world.played) == 24 == len(flat)
    assert [attempt.task.key for attempt in flat] == [key for key in range(4) for _ in range(6)]
    world.played.clear()
    chosen = Resample("share", threshold=0.5, queries=4).rollout(world, asked)
    assert len(chosen) == 24 < len(world.played) <= 96
    assert sum(a.metrics["share"] for a in chosen) > sum(a.metrics["share"] for a in flat)
    with pytest.raises(ValueError, match="needs the metric 'foresight'; the world measures: "):
        Resample("foresight").rollout(world, asked)
