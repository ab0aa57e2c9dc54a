"""Tests of the rollout collector: replay, dropping, resampling, reported errors and exact resume."""

from dataclasses import replace

import pytest
import torch
from collected_groups import collector, learn
from secret_env import SecretSequenceEnv
from torch.testing import assert_close

from robopolicy.text.rollouts.protocols import REPLAYED

EVERYTHING = {
    "reward": [{"name": "sum", "terms": {"reward": 1.0, "share": 0.1}}],
    "sampler": {"name": "category_bandit", "rate": 0.5},
    "strategy": {"name": "branch", "initial": 0.5},
    "intervention": [{"name": "replay", "mean": 2.0}, {"name": "self_correct", "count": 2}],
    "temperature": 0.7,
}


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param, length=4, symbols=2)


def test_the_last_batch_is_replayed_and_restored(env):
    side = collector(env, {"replay_last_batch": True})
    first, second, third = (side.collect(2) for _ in range(3))
    assert [trajectory.source for trajectory in first.trajectories] == [0] * 8
    for before, now in ((first, second), (second, third)):
        assert [trajectory.source for trajectory in now.trajectories] == [0] * 8 + [REPLAYED] * 8
        fresh = [trajectory for trajectory in before.trajectories if trajectory.source != REPLAYED]
        assert [trajectory.reward for trajectory in now.trajectories[8:]] == [trajectory.reward for trajectory in fresh]
        rows = now.decisions.source == REPLAYED
        assert_close(now.decisions.logp_old[rows], before.decisions.logp_old[before.decisions.source != REPLAYED])
    again = collector(env, {"replay_last_batch": True})
    again.load_state_dict(side.state_dict())
    assert [trajectory.task.key for trajectory in again._last] == [
        trajectory.task.key for trajectory in third.trajectories[:8]
    ]
    follow = {"name": "gradient_weights", "objectives": ["share"]}
    with pytest.raises(ValueError, match="remove one of them"):
        collector(env, {"replay_last_batch": True, "reward": [follow]})


def test_runs_resume_exactly(env):
    side = collector(env, EVERYTHING)
    for _ in range(4):
        learn(env, side)
    state, generator = side.state_dict(), env.generator.get_state()
    logits = env.logits.detach().clone()
    ahead = [learn(env, side) for _ in range(4)]
    again = SecretSequenceEnv(env.layout, length=4, symbols=2)
    again.generator.set_state(generator)
    again.logits = logits.requires_grad_()
    other = collector(again, EVERYTHING)
    other.load_state_dict(state)
    assert [learn(again, other) for _ in range(4)] == ahead


def test_tied_groups_are_dropped_and_resampled(env):
    """DAPO: every training group is mixed, at the cost of more rollouts; the sampler observes all rollouts."""
    env.know(0)
    env.know(1)
    side = collector(env, {"intervention": ["drop"], "max_resample_rounds": 20})
    observed = []
    side.sampler.observe = lambda keys, rewards, advantage: observed.append((keys, rewards, advantage))
    batch = side.collect(3)
    rewards = batch.decisions.require("reward").sum(1)
    for key in batch.decisions.group.unique():
        assert key >= 2 and 0 < float(rewards[batch.decisions.group == key].sum()) < 4
    assert len(env.completed) > 12
    side.observe(batch, torch.ones(len(batch.decisions), 1))
    ((keys, verdicts, size),) = observed
    assert (
        len(keys) == len(env.completed) and bool((size[keys < 2] == 0).all()) and bool((verdicts[keys < 2] == 1).all())
    )


def test_nan_rewards_in_interventions_and_reward_terms_are_reported(env):
    for key in range(4):
        env.know(key, -1e9)
    rollout = env.rollout

    def faulty(tasks, units=None):
        completed = rollout(tasks, units=units)
        with_nan = [replace(a, reward=float("nan")) if a.task.context and a.task.key == 1 else a for a in completed]
        return [replace(a, metrics={"share": float("nan")}) if a.task.key == 3 else a for a in with_nan]

    env.rollout = faulty
    plain = {"intervention": [{"name": "hint", "shares": [1.0]}], "reward": [{"name": "sum", "terms": {"share": 1.0}}]}
    batch = collector(env, plain).collect(4)
    assert sorted(batch.invalid) == [1] * 4 + [3] * 4 and {
        trajectory.task.key for trajectory in batch.trajectories
    } == {0, 2}
    assert bool(batch.decisions.require("reward").isfinite().all())


def test_an_empty_batch_raises(env):
    for key in range(4):
        env.know(key)
    with pytest.raises(RuntimeError, match="No group is left to train on"):
        collector(env, {"intervention": ["drop"]}).collect(2)


def test_interventions_use_verdicts_and_rows_contain_shaped_rewards(env):
    """A shaped reward does not hide a failed group from interventions."""
    plain = {"reward": [{"name": "sum", "terms": {"reward": 0.0, "share": 5.0}}], "intervention": ["replay"]}
    side = collector(env, plain)
    env.know(0)
    side.interventions[0].observe([[env.rollout([env.tasks()[0]])[0]]])
    env.know(0, -1e9)
    batch = side.collect(4)
    replayed = [trajectory for trajectory in batch.trajectories if trajectory.source == REPLAYED]
    assert [trajectory.reward for trajectory in replayed] == [5.0] and replayed[0].task.key == 0


def test_non_numeric_terms_are_refused(env):
    with pytest.raises(ValueError, match=r"'first' in option 'terms' .* must be a number, got 'a'"):
        collector(env, {"reward": [{"name": "sum", "terms": {"first": "a"}}]})
