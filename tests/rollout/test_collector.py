"""Tests of the collector: rollouts, dropped and resampled groups, reports and saved state."""

from dataclasses import replace

import pytest
import torch
from collected_groups import collector, learn
from secret_env import SecretSequenceEnv
from torch.testing import assert_close

EVERYTHING = {"sampler": {"name": "uncertain"}, "strategy": {"name": "branch", "initial": 0.5}, "temperature": 0.7}


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param, length=4, symbols=2)


def test_a_recipe_without_rollout_settings_samples_flat_groups(env):
    batch = collector(env).collect(3)
    assert [trajectory.task.budget for trajectory in batch.trajectories] == [4] * 12
    assert len(set(batch.decisions.group.tolist())) == 3 and batch.invalid == []


def test_collected_batches_train_the_policy(env):
    torch.manual_seed(0)
    side = collector(env, size=8)
    first = [sum(learn(env, side, 4)) for _ in range(3)]
    for _ in range(40):
        learn(env, side, 4)
    last = [sum(learn(env, side, 4)) for _ in range(3)]
    assert sum(first) / 96 < 0.35 and sum(last) / 96 > 0.8


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


def test_nan_rewards_are_reported(env):
    """A NaN reward drops its rollout, reports the task, and leaves the other rewards finite."""
    rollout = env.rollout

    def faulty(tasks, units=None):
        completed = rollout(tasks, units=units)
        return [replace(a, reward=float("nan")) if a.task.key == 2 and i % 2 else a for i, a in enumerate(completed)]

    env.rollout = faulty
    batch = collector(env).collect(4)
    assert batch.invalid == [2, 2] and len(batch.trajectories) == 14
    assert bool(batch.decisions.require("reward").isfinite().all())


def test_the_sampler_observes_the_advantage_of_decisions(env):
    side = collector(env)
    observed = {}
    side.sampler.observe = lambda keys, rewards, advantage: observed.update(
        zip(keys.tolist(), advantage.tolist(), strict=True)
    )
    batch = side.collect(2)
    advantage = torch.where(batch.decisions.valid(), -batch.decisions.group[:, None].double(), 9.0)
    side.observe(batch, advantage)
    assert_close(
        torch.tensor([observed[key] for key in sorted(observed)]),
        torch.tensor([float(key) for key in sorted(observed)]),
    )


def test_unknown_names_are_refused(env):
    with pytest.raises(ValueError, match="Unknown key 'rewards' of rollout; known: reward, sampler"):
        collector(env, {"rewards": []})
    with pytest.raises(ValueError, match="Unknown intervention 'hints'; known: "):
        collector(env, {"intervention": ["hints"]})


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"temperature": -1}, "rollout.temperature must be positive, got -1"),
        ({"max_resample_rounds": 1.5}, "rollout.max_resample_rounds must be a whole number, got 1.5"),
        ({"replay_last_batch": "yes"}, "rollout.replay_last_batch must be true or false, got 'yes'"),
        ({"reward": "sum"}, "rollout.reward must be a list, got 'sum'"),
        ({"strategy": 3}, "Expected a name or a mapping of options for strategy, found 3"),
    ],
)
def test_invalid_values_are_refused(env, plain, message):
    with pytest.raises(ValueError, match=message):
        collector(env, plain)
