"""The sampling side on a robot: episodes as attempts, branches without snapshots, curricula and recipes on a chain."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from robopolicy.catalogue import read_recipe
from robopolicy.core.recipe import Recipe
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.chains.sde_chain import SDEChain
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.samplers.collector import Collector
from robopolicy.samplers.protocols import Branching, Pool, Task
from robopolicy.samplers.sim_world import SimWorld
from robopolicy.samplers.topologies import Branch, Tree
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim


def chain() -> SDEChain:
    torch.manual_seed(0)
    config = FlowConfig(
        hidden=(16,), steps=3, normalization="identity", action_normalization="identity", action_clip=0.0
    )
    return SDEChain(FlowPolicy(config, PolicySpec({"state": (6,)}, action_dim=2, horizon=8, execute=8)), 0.5)


def world(policy: SDEChain, num_envs: int = 4, seed: int = 0) -> SimWorld:
    sim = ChunkedSim(
        make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped")), execute=8, obs_horizon=1
    )
    return SimWorld(sim, policy.sample, seed=seed)


def scored(policy: SDEChain, decisions) -> torch.Tensor:
    obs = {"state": decisions.extra["obs.state"]}
    return policy.decisions(obs, {"chain": decisions.extra["record.chain"]}).logp


def test_attempts_are_episodes():
    """Whichever environment plays it and however many there are, an attempt starts where its seed says."""
    policy = chain()
    tasks = [Task(0), Task(7, payload=100), Task(2), Task(100), Task(5)]
    attempts = world(policy).play(tasks)
    assert [attempt.task.key for attempt in attempts] == [0, 7, 2, 100, 5]
    starts = [attempt.decisions.extra["obs.state"][0] for attempt in attempts]
    assert torch.equal(starts[1], starts[3]) and not torch.equal(starts[0], starts[2])
    for attempt in attempts:
        assert attempt.finished and attempt.metrics["length"] <= 40
        assert attempt.reward == pytest.approx(float(attempt.decisions.reward.sum()))


def test_the_ratio_of_fresh_rows_is_one():
    policy = chain()
    batch = world(policy).batch(world(policy).play([Task(key) for key in range(6)]))
    assert_close(scored(policy, batch), batch.logp_old, rtol=1e-4, atol=1e-4)


def test_branches_repeat_what_was_played():
    """The same states, actions and log-probabilities up to the branch, whatever else is played beside it."""
    played = world(chain())
    assert isinstance(played, Branching)
    first = played.play([Task(3)])[0]
    branch = played.play([Task(1), played.branch(first, 2), Task(0)])[1]
    for name, value in first.decisions.extra.items():
        assert_close(branch.decisions.extra[name][:2], value[:2])
    assert torch.equal(branch.decisions.logp_old[:2], first.decisions.logp_old[:2])
    assert_close(branch.decisions.extra["obs.state"][2], first.decisions.extra["obs.state"][2])
    assert not torch.allclose(branch.record[2], first.record[2])


@pytest.mark.parametrize("topology", [Branch(threshold=2.0), Tree(width=2, depth=2)], ids=["branch", "tree"])
def test_trees_of_episodes(topology):
    policy = chain()
    played = world(policy)
    play = played.play
    played.play = lambda tasks, units=None: [with_entropy(attempt) for attempt in play(tasks, units=units)]
    attempts = topology.rollout(played, [Task(0, budget=4), Task(1, budget=4)])
    assert len(attempts) == 8 and all(attempt.finished for attempt in attempts)
    assert any(attempt.task.prefix is not None for attempt in attempts)
    batch = played.batch(attempts)
    assert_close(scored(policy, batch), batch.logp_old, rtol=1e-4, atol=1e-4)


def with_entropy(attempt):
    decisions = attempt.decisions.with_fields(entropy=torch.zeros_like(attempt.decisions.logp_old))
    return type(attempt)(**{**vars(attempt), "decisions": decisions})


@pytest.mark.parametrize("name", ["grpo", "s131_pcl", "s167_ssb", "s024_otc", "s059_agentflow", "s162_arpo"])
def test_recipes_of_language_models_train_a_robot(name):
    """Curriculum, buffer, step cost, turns and branches of text recipes, and one update of a denoising chain."""
    policy = chain()
    played, plain = world(policy), read_recipe(name)
    play = played.play
    played.play = lambda tasks, units=None: [counted(with_entropy(a)) for a in play(tasks, units=units)]
    recipe = Recipe.from_plain(plain)
    pool = Pool([Task(key) for key in range(8)])
    side = Collector(plain.get("rollout", {}), pool, played, group_size=4)
    batch = side.collect(2)
    advantage = recipe.advantage(batch.decisions)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    loss, info = recipe.loss(
        batch.decisions, advantage, scored(policy, batch.decisions).view_as(batch.decisions.logp_old)
    )
    loss.backward()
    torch.optim.SGD(policy.parameters(), lr=1e-3).step()
    side.observe(batch, advantage)
    assert bool(loss.isfinite()) and info["ratio_max"] < 1e-2
    assert any(not torch.equal(a, b.detach()) for a, b in zip(before, policy.parameters(), strict=True))


def counted(attempt):
    return type(attempt)(**{**vars(attempt), "metrics": {**attempt.metrics, "calls": attempt.metrics["length"]}})


def test_play_resumes():
    policy = chain()
    first, second = world(policy), world(policy, seed=9)
    first.play([Task(0)])
    second.load_state_dict(first.state_dict())
    ours, theirs = (w.play([Task(1)])[0] for w in (first, second))
    assert torch.equal(ours.decisions.logp_old, theirs.decisions.logp_old)
