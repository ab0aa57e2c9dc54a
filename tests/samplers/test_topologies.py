"""How attempts hang together: equal budgets, limits at which a topology is flat, what is and is not a decision."""

import pytest
import torch
from playground import STEP, Playground

from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.rollouts.strategies import TOPOLOGIES, Branch, Flat, unit_entropy
from robopolicy.text.rollouts.trajectories import groups_of


def make(name: str):
    return TOPOLOGIES[name]()


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
@pytest.mark.parametrize("name", TOPOLOGIES.product())
def test_the_budget_is_that_of_flat(world, name, budget):
    """Limit of ARPO for tools (Dong et al. 2025): whatever the topology, a task costs its budget."""
    attempts = make(name).rollout(world, world.tasks(budget))
    assert [(group[0].task.key, len(group)) for group in groups_of(attempts)] == [(key, budget) for key in range(4)]
    assert [attempt.task.key for attempt in attempts] == sorted(attempt.task.key for attempt in attempts)


@pytest.mark.parametrize("layout", ["tokens", "chain"])
def test_switched_off_it_is_flat(layout):
    """Limit of ARPO for tools (Dong et al. 2025)."""
    same_as_flat(Branch(initial=1.0), layout)


def test_draws_resume():
    first, second = Branch(), Branch()
    playground = Playground()
    first.rollout(playground, playground.tasks())
    second.load_state_dict(first.state_dict())
    worlds = Playground(seed=5), Playground(seed=5)
    ours, theirs = (t.rollout(w, w.tasks(8)) for t, w in zip((first, second), worlds, strict=True))
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(ours, theirs, strict=True))


def test_branches_share_their_beginning(world):
    attempts = Branch(threshold=2.0).rollout(world, [Task(0, budget=4)])  # every moment branches
    branches = [attempt for attempt in attempts if attempt.task.prefix is not None]
    assert len(branches) == 2
    for branch, unit in zip(branches, (1, 2), strict=True):
        shared = branch.record["symbols"][: unit * STEP]
        assert torch.equal(shared, attempts[0].record["symbols"][: unit * STEP])
        assert bool(branch.decisions.valid().all()), "the beginning was decided by the policy"


def test_uncertain_moments_branch(world):
    """The policy is sure of the first unit and of the last; after the first, entropy is higher than at the start."""
    with torch.no_grad():
        world.know(0)
        world.logits[0, STEP : 2 * STEP] = 0.0
    attempt = world.play([Task(0)])[0]
    assert unit_entropy(attempt.decisions)[1] > 1.0 > unit_entropy(attempt.decisions)[2]
    attempts = Branch(initial=0.25, weight=100.0, threshold=0.0).rollout(world, [Task(0, budget=4)])
    prefixes = [len(attempt.task.prefix["symbols"]) for attempt in attempts if attempt.task.prefix is not None]
    assert prefixes == [STEP]


def test_entropy_is_compared_with_that_of_the_first_unit(world):
    """ARPO for tools (Dong et al. 2025): a second uncertain unit branches as the first one did."""
    with torch.no_grad():
        world.know(0)
        world.logits[0, STEP:] = 0.0
    attempts = Branch(initial=0.25, weight=100.0, threshold=0.0).rollout(world, [Task(0, budget=3)])
    prefixes = [len(attempt.task.prefix["symbols"]) for attempt in attempts if attempt.task.prefix is not None]
    assert prefixes == [STEP, 2 * STEP]


def test_a_world_must_be_able(world):
    class Plain:
        play = world.play

    with pytest.raises(UserError, match="ability 'branch'"):
        Branch(threshold=2.0).rollout(Plain(), world.tasks(4))
