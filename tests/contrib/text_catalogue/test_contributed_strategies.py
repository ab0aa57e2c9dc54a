"""Tests of rollout strategies: equal budgets, limits that equal independent sampling, decisions and given tokens."""

from dataclasses import replace

import pytest
import torch
from secret_env import STEP, SecretSequenceEnv
from strategy_limits import same_as_flat
from torch.testing import assert_close

from robopolicy.contrib.text_catalogue.rollout_strategies import (
    AdaptiveHints,
    Paraphrased,
    Privileged,
    PromptModes,
    Resample,
    ResetFromData,
    Tree,
)
from robopolicy.contrib.text_catalogue.windows import PartialRollout, PerTurn, SegmentRollouts
from robopolicy.core.recipe import Recipe
from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import HINTED, POLICY, Task
from robopolicy.text.rollouts.strategies import STRATEGIES, Independent
from robopolicy.text.rollouts.trajectories import group_by_task, stack
from robopolicy.training.resume import load_tree, save_tree

SETTINGS = {"prompt_modes": {"modes": ["think", "act"]}, "segments": {"units": 1}, "partial_rollout": {"units": 1000}}


GROUP_MEAN = {
    "title": "group mean",
    "advantage": [{"name": "baseline", "kind": "mean", "scope": {"partition": "group", "reduce_over": "trajectory"}}],
    "estimator": {"surrogate": "policy_gradient"},
}


def make(name: str):
    return STRATEGIES[name](**SETTINGS.get(name, {}))


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param)


@pytest.mark.parametrize("budget", [1, 2, 5, 8])
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(STRATEGIES.product()) - {"paraphrased"}))
def test_the_budget_is_that_of_flat(env, name, budget):
    """Limit of ARPO for tools (Dong et al. 2025): every strategy spends the whole budget of a task."""
    trajectories = make(name).rollout(env, env.tasks(budget))
    assert [(group[0].task.key, len(group)) for group in group_by_task(trajectories)] == [
        (key, budget) for key in range(4)
    ]
    assert [trajectory.task.key for trajectory in trajectories] == sorted(
        trajectory.task.key for trajectory in trajectories
    )


@pytest.mark.parametrize(
    "strategy",
    [
        Tree(width=1, depth=0),
        ResetFromData(share=0.0),
        AdaptiveHints(high=0.0, noise=0.0),
        Privileged(share=0.0),
        Paraphrased(hard=-1.0, easy=-1.0),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
@pytest.mark.parametrize("layout", ["tokens", "chain"])
def test_switched_off_it_is_independent(strategy, layout):
    """A strategy with its mechanism off equals independent sampling, I (5.12, 5.13, 5.06, 5.16, 5.03)."""
    same_as_flat(strategy, layout)


@pytest.mark.parametrize("name", ["tree", "reset_from_data", "adaptive_hints"])
def test_random_state_resumes(name):
    first, second = make(name), make(name)
    playground = SecretSequenceEnv()
    first.rollout(playground, playground.tasks())
    second.load_state_dict(first.state_dict())
    envs = SecretSequenceEnv(seed=5), SecretSequenceEnv(seed=5)
    original, resumed = (t.rollout(w, w.tasks(8)) for t, w in zip((first, second), envs, strict=True))
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(original, resumed, strict=True))


def test_success_rates_of_0_3_and_0_7_are_still_paraphrased():
    """CLPO (Zhang et al. 2025): both thresholds are inclusive."""
    env, rewrites = SecretSequenceEnv("tokens"), []
    rollout, wins = env.rollout, (3, 4, 7, 8)
    env.rollout = lambda tasks: [
        replace(trajectory, reward=float(place % 10 < wins[trajectory.task.key]))
        for place, trajectory in enumerate(rollout(tasks))
    ]
    env.rewrite = lambda task, how: rewrites.append((task.key, how)) or task
    Paraphrased().rollout(env, [Task(key, budget=10) for key in range(4)])
    assert rewrites == [(0, "simpler"), (1, "varied"), (2, "varied")]


def test_plans_at_the_threshold_are_resampled_and_worse_ones_discarded():
    env, values = SecretSequenceEnv("tokens"), iter([0.0, -2.0, 1.0, -1.0, -3.0, 0.5, -1.0])
    rollout = env.rollout
    env.rollout = lambda tasks: [
        replace(trajectory, metrics={"advantage": next(values)}) for trajectory in rollout(tasks)
    ]
    trajectories = Resample().rollout(env, [Task(0, budget=3)])
    assert [trajectory.metrics["advantage"] for trajectory in trajectories] == [0.5, -1.0, 1.0]


def test_hint_noise_is_two_sided(env):
    shares = []
    env.start_from_solution = lambda task, share: shares.append(share)
    part = AdaptiveHints(low=0.5, high=0.5, noise=0.25)
    for _ in range(20):
        part.rollout(env, [Task(0, budget=2)])
    assert 0.25 < min(shares) < 0.4 and 0.6 < max(shares) < 0.75


def test_tree_of_width_one_samples_independent_rollouts(env):
    """Limit of DialTree (Guo et al. 2025): the number of rollouts is the same, and no two share a prefix."""
    trajectories = Tree(width=1, depth=2).rollout(env, [Task(0, budget=6)])
    env.know(0, -1.0)
    starts = {tuple(trajectory.record["symbols"].tolist()) for trajectory in trajectories}
    assert len(trajectories) == 6 and len(starts) > 3


def test_a_tree_branches_at_every_unit(env):
    trajectories = Tree(width=2, depth=2).rollout(env, [Task(0, budget=4)])
    first = {tuple(trajectory.record["symbols"][:STEP].tolist()) for trajectory in trajectories}
    assert len(first) <= 2, "two first units, each continued twice"
    assert all(trajectory.finished and len(trajectory.record["symbols"]) == env.length for trajectory in trajectories)


def test_pruned_branches_are_not_continued(env):
    env.rollout = lambda tasks, units=None, rollout=env.rollout: [  # prefixes that differ from the secret are malformed
        type(trajectory)(**{**vars(trajectory), "metrics": {"malformed": 1.0 - trajectory.metrics["share"]}})
        for trajectory in rollout(tasks, units=units)
    ]
    trajectories = Tree(width=27, depth=1, prune="malformed").rollout(env, [Task(0, budget=27)])
    continued = [trajectory for trajectory in trajectories if trajectory.task.prefix is not None]
    assert continued and all(
        torch.equal(trajectory.record["symbols"][:STEP], env.secret[0, :STEP]) for trajectory in continued
    )


def test_no_branch_is_pruned_if_all_would_be(env):
    env.rollout = lambda tasks, units=None, rollout=env.rollout: [
        replace(trajectory, metrics={"malformed": 1.0}) for trajectory in rollout(tasks, units=units)
    ]
    trajectories = Tree(width=2, depth=1, prune="malformed").rollout(env, [Task(0, budget=2)])
    assert len(trajectories) == 2 and all(trajectory.task.prefix is not None for trajectory in trajectories)


def test_prefix_tokens_from_data_resets_are_masked(env):
    trajectories = ResetFromData(seed=1).rollout(env, env.tasks(2))
    for trajectory in trajectories:
        given = len(trajectory.task.prefix["symbols"])
        valid = trajectory.decisions.valid().flatten().tolist()
        assert valid == [False] * given + [True] * (env.length - given)
        assert torch.equal(trajectory.record["symbols"][:given], env.secret[trajectory.task.key, :given])
    assert len({len(trajectory.task.prefix["symbols"]) for trajectory in trajectories}) > 1
    assert all(len({len(a.task.prefix["symbols"]) for a in group}) == 1 for group in group_by_task(trajectories))


def test_failing_tasks_get_longer_hints(env):
    env.know(0, -1e9)
    env.know(1)
    trajectories = AdaptiveHints(low=0.0, high=2 / 3, noise=0.0).rollout(env, env.tasks(4)[:2])
    hard, solved = group_by_task(trajectories)
    assert [trajectory.source for trajectory in hard] == [POLICY, POLICY, HINTED, HINTED]
    assert [int(trajectory.decisions.valid().sum()) for trajectory in hard] == [6, 6, 2, 2]
    assert [trajectory.source for trajectory in solved] == [POLICY] * 4


def test_only_failing_tasks_get_a_simpler_paraphrase(env):
    env.know(0, -1e9)
    env.know(1)
    trajectories = Paraphrased().rollout(env, env.tasks(4)[:2])
    assert [trajectory.task.context for trajectory in trajectories] == [None] * 8 + [
        {"kind": "simpler", "share": 0.5}
    ] * 4


def test_privileged_rollouts_are_scored_without_the_document(env):
    """Pitfall h: logp_old excludes the document; logp_behaviour is the sampling log-probability with the document."""
    trajectories = Privileged().rollout(env, [Task(0, budget=4)])
    batch = stack(trajectories)
    hinted = batch.source == HINTED
    assert int(hinted.sum()) * 2 == len(batch) and all(trajectory.task.context is None for trajectory in trajectories)
    assert torch.equal(batch.logp_old[~hinted], batch.logp_behaviour[~hinted])
    assert bool((batch.logp_old[hinted] < batch.logp_behaviour[hinted]).any())
    assert_close(batch.logp_old, env.scored(trajectories).detach())  # the ratio of fresh data is 1


def test_prompt_modes_alternate_within_a_group(env):
    trajectories = PromptModes(["think", "act"]).rollout(env, env.tasks(4)[:1])
    assert [trajectory.task.context["text"] for trajectory in trajectories] == ["think", "act", "think", "act"]


def test_segment_rollouts_with_a_large_window_equal_independent_rollouts(env):
    """Limit of SUPO (Lu et al. 2025): infinite threshold."""
    same_as_flat(SegmentRollouts(units=1000), env.layout)


def test_segments_share_the_advantage_of_the_whole_rollout(env):
    """Limit of SUPO: the gradient is the sum over segments, each with the advantage of the undivided rollout."""
    recipe = Recipe.from_dict(GROUP_MEAN)
    env.layout = "tokens"
    trajectories = SegmentRollouts(units=1, summaries=2).rollout(env, [Task(0, budget=6)])
    trajectories = [type(a)(**{**vars(a), "reward": float(i % 3)}) for i, a in enumerate(trajectories)]
    batch = stack(trajectories)
    assert len(batch) == 18 and batch.valid().sum(1).tolist() == [STEP] * 18
    advantage = recipe.advantage(batch)
    assert_close(advantage.view(6, 3), (batch.require("reward").sum(1).view(6, 3).sum(1) - 1.0)[:, None].expand(6, 3))
    loss, _ = recipe.loss(batch, advantage, env.scored(trajectories))
    (found,) = torch.autograd.grad(loss, env.logits)
    whole = torch.stack([env.logp(Task(0)).gather(1, a.record["symbols"][:, None]).sum() for a in trajectories])
    weights = torch.tensor([float(i % 3) for i in range(6)], dtype=torch.float64) - 1.0
    (expected,) = torch.autograd.grad(-(weights * whole).sum() / 36, env.logits)
    assert_close(found, expected)


def test_unfinished_rollouts_are_masked(env):
    trajectories = SegmentRollouts(units=1, summaries=1).rollout(env, [Task(0, budget=2)])
    assert not any(trajectory.finished or bool(trajectory.decisions.valid().any()) for trajectory in trajectories)


def test_partial_rollouts_train_on_every_decision_exactly_once(env):
    """Limit of T-PPO: over the batches each decision is new exactly once and keeps its sampling log-probability."""
    strategy, new = PartialRollout(units=1), 0
    for number in range(3):
        trajectories = strategy.rollout(env, [Task(0), Task(1)])
        batch = stack(trajectories)
        fresh = batch.valid() & ~batch.extra["seen"]
        assert len(trajectories) == 2 and int(fresh.sum()) == 2 * STEP
        assert bool(batch.extra["finished"].all()) == (number == 2)
        new += int(fresh.sum())
    assert new == 2 * env.length == int(batch.valid().sum())
    assert_close(batch.logp_old[batch.valid()], env.scored(trajectories).detach()[batch.valid()])
    assert [trajectory.task.prefix for trajectory in strategy.rollout(env, [Task(2)])] == [None]


def test_open_windows_resume(env, tmp_path):
    first, second = PartialRollout(units=1), PartialRollout(units=1)
    first.rollout(env, [Task(0), Task(1)])
    save_tree(tmp_path, first.state_dict())
    second.load_state_dict(load_tree(tmp_path))
    envs = SecretSequenceEnv(env.layout, seed=5), SecretSequenceEnv(env.layout, seed=5)
    original, resumed = (t.rollout(w, [Task(2), Task(3)]) for t, w in zip((first, second), envs, strict=True))
    assert [a.task.key for a in original] == [0, 1] == [a.task.key for a in resumed]
    assert all(torch.equal(a.decisions.logp_old, b.decisions.logp_old) for a, b in zip(original, resumed, strict=True))


def test_longer_rollouts_weigh_more_in_the_group_mean():
    """AgentFlow: the rows of a rollout share its final reward, and long rollouts weigh more in the group mean."""
    env = SecretSequenceEnv("tokens")
    long, short = Independent().rollout(env, [Task(0, budget=2)])
    short = env.rollout([Task(0)], units=1)[0]
    strategy = PerTurn(Given([long, short]))
    trajectories = [
        type(a)(**{**vars(a), "reward": r}) for a, r in zip(strategy.rollout(env, []), (1.0, 0.0), strict=True)
    ]
    batch = stack(trajectories)
    assert len(batch) == 4
    recipe = Recipe.from_dict(
        {**GROUP_MEAN, "advantage": [{"name": "baseline", "kind": "mean", "scope": {"partition": "group"}}]}
    )
    assert_close(recipe.advantage(batch).flatten(), torch.tensor([0.25, 0.25, 0.25, -0.75], dtype=torch.float64))


def test_single_turn_rows_equal_independent_rollouts():
    """Limit of AgentFlow (Li et al. 2025): with one turn, the rows equal independent rollouts."""
    env = SecretSequenceEnv("tokens", length=STEP)
    trajectories = Independent().rollout(env, [Task(0, budget=3)])
    rows = PerTurn(Given(trajectories)).rollout(env, [])
    assert torch.equal(stack(rows).logp_old, stack(trajectories).logp_old)
    assert torch.equal(stack(rows).valid(), stack(trajectories).valid())


class Given(Independent):
    """Strategy that returns fixed trajectories."""

    def __init__(self, trajectories) -> None:
        self.trajectories = trajectories

    def rollout(self, env, tasks):
        return list(self.trajectories)


def test_environment_without_the_ability_is_refused(env):
    class Plain:
        rollout = env.rollout

    with pytest.raises(UserError, match="ability 'branch'"):
        Tree().rollout(Plain(), env.tasks(2))


def test_rollouts_with_low_critic_values_are_resampled(env):
    """ReAd (Zhang et al. 2024): no threshold gives independent sampling; a threshold costs and improves rollouts."""
    tasks = env.tasks(budget=6)
    flat = Resample("share", threshold=-float("inf")).rollout(env, tasks)
    assert len(env.completed) == 24 == len(flat)
    assert [trajectory.task.key for trajectory in flat] == [key for key in range(4) for _ in range(6)]
    env.completed.clear()
    chosen = Resample("share", threshold=0.5, queries=4).rollout(env, tasks)
    assert len(chosen) == 24 < len(env.completed) <= 96
    assert sum(a.metrics["share"] for a in chosen) > sum(a.metrics["share"] for a in flat)
    with pytest.raises(ValueError, match="needs the metric 'foresight'; the environment measures: "):
        Resample("foresight").rollout(env, tasks)
