"""Tests of rollout strategies: equal budgets, limits with independent rollouts, decisions and given tokens."""

import pytest
import torch
from secret_env import STEP, SecretSequenceEnv
from strategy_limits import same_as_flat

from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.rollouts.strategies import STRATEGIES, Branch, unit_entropy
from robopolicy.text.rollouts.trajectories import group_by_task


def make(name: str):
    return STRATEGIES[name]()


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param)


@pytest.mark.parametrize("budget", [1, 2, 5, 8])
@pytest.mark.parametrize("name", STRATEGIES.product())
def test_every_strategy_spends_exactly_the_rollout_budget_of_a_task(env, name, budget):
    """Limit of ARPO for tools (Dong et al. 2025): every strategy spends exactly the budget of a task."""
    trajectories = make(name).rollout(env, env.tasks(budget))
    assert [(group[0].task.key, len(group)) for group in group_by_task(trajectories)] == [
        (key, budget) for key in range(4)
    ]
    assert [trajectory.task.key for trajectory in trajectories] == sorted(
        trajectory.task.key for trajectory in trajectories
    )


@pytest.mark.parametrize("layout", ["tokens", "chain"])
def test_disabled_branching_equals_independent_rollouts(layout):
    """Limit of ARPO for tools (Dong et al. 2025)."""
    same_as_flat(Branch(initial=1.0), layout)


def test_sampling_resumes():
    first, second = Branch(), Branch()
    warm_up = SecretSequenceEnv()
    first.rollout(warm_up, warm_up.tasks())
    second.load_state_dict(first.state_dict())
    envs = SecretSequenceEnv(seed=5), SecretSequenceEnv(seed=5)
    expected, found = (t.rollout(w, w.tasks(8)) for t, w in zip((first, second), envs, strict=True))
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(expected, found, strict=True))


def test_branches_share_the_prefix_of_the_first_rollout(env):
    trajectories = Branch(threshold=2.0).rollout(env, [Task(0, budget=4)])  # every unit branches
    branches = [trajectory for trajectory in trajectories if trajectory.task.prefix is not None]
    assert len(branches) == 2
    for branch, unit in zip(branches, (1, 2), strict=True):
        shared = branch.record["symbols"][: unit * STEP]
        assert torch.equal(shared, trajectories[0].record["symbols"][: unit * STEP])
        assert bool(branch.decisions.valid().all()), "the beginning was decided by the policy"


def test_uncertain_units_branch(env):
    """The policy is certain in the first and last units; entropy is higher after the first unit than at the start."""
    with torch.no_grad():
        env.know(0)
        env.logits[0, STEP : 2 * STEP] = 0.0
    trajectory = env.rollout([Task(0)])[0]
    assert unit_entropy(trajectory.decisions)[1] > 1.0 > unit_entropy(trajectory.decisions)[2]
    trajectories = Branch(initial=0.25, weight=100.0, threshold=0.0).rollout(env, [Task(0, budget=4)])
    prefixes = [
        len(trajectory.task.prefix["symbols"]) for trajectory in trajectories if trajectory.task.prefix is not None
    ]
    assert prefixes == [STEP]


def test_entropy_is_compared_with_the_first_unit(env):
    """ARPO for tools (Dong et al. 2025): a second uncertain unit branches like the first."""
    with torch.no_grad():
        env.know(0)
        env.logits[0, STEP:] = 0.0
    trajectories = Branch(initial=0.25, weight=100.0, threshold=0.0).rollout(env, [Task(0, budget=3)])
    prefixes = [
        len(trajectory.task.prefix["symbols"]) for trajectory in trajectories if trajectory.task.prefix is not None
    ]
    assert prefixes == [STEP, 2 * STEP]


def test_an_env_without_branching_is_refused(env):
    class Plain:
        rollout = env.rollout

    with pytest.raises(UserError, match="ability 'branch'"):
        Branch(threshold=2.0).rollout(Plain(), env.tasks(4))
