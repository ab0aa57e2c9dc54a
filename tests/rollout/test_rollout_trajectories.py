"""Tests of rollouts as rows: padding, ids, rewards, checkpoints and missing environment capabilities."""

from dataclasses import replace

import pytest
import torch
from secret_env import SecretSequenceEnv

from robopolicy.core.advantage import outcome
from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import Task, degenerate, require_capability
from robopolicy.text.rollouts.trajectories import from_dict, group_by_task, stack, to_dict
from robopolicy.training.resume import load_tree, save_tree


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param)


def test_rows_have_ids_and_rewards(env):
    trajectories = env.rollout([Task(2), Task(0), Task(0)])
    batch = stack(trajectories)
    per_rollout = len(trajectories[0].decisions)
    assert batch.group.tolist() == [2] * per_rollout + [0] * 2 * per_rollout
    assert batch.trajectory.tolist() == [i for i in range(3) for _ in range(per_rollout)]
    reward = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    torch.testing.assert_close(outcome(batch)[::per_rollout, 0], reward)


def test_shorter_rollouts_are_padded_and_masked(env):
    env.layout = "tokens"
    whole, truncated = env.rollout([Task(0)]) + env.rollout([Task(1)], units=1)
    batch = stack([replace(whole, reward=2.0), replace(truncated, reward=3.0)])
    assert batch.valid().tolist() == [[True] * 6, [True, True] + [False] * 4]
    assert batch.reward[1].tolist() == [0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert batch.extra["symbols"].shape == (2, 6)


def test_given_tokens_are_not_decisions_and_step_rewards_are_added(env):
    trajectory = env.rollout([env.start_from_solution(Task(0), 1 / 3)])[0]
    assert trajectory.decisions.valid().flatten().tolist() == [False, False, True, True, True, True]
    steps = trajectory.decisions.with_fields(reward=torch.full_like(trajectory.decisions.logp_old, 0.25))
    reward = stack([replace(trajectory, decisions=steps, reward=3.0)]).reward.flatten()
    torch.testing.assert_close(reward, torch.tensor([0.0, 0.0, 0.25, 0.25, 0.25, 2.25], dtype=torch.float64))


def test_behaviour_logp_of_fresh_rows_equals_their_logp(env):
    sampled = env.rollout([env.hint(Task(0), "solution", 0.5), Task(0)])
    batch = stack([*env.rescore(sampled[:1], [Task(0)]), sampled[1]])
    half = len(batch) // 2
    assert not torch.allclose(batch.logp_old[:half], batch.logp_behaviour[:half])
    assert torch.equal(batch.logp_old[half:], batch.logp_behaviour[half:])


def test_rollouts_round_trip_through_a_checkpoint(env, tmp_path):
    trajectory = env.rollout([env.hint(Task(1, temperature=0.5), "plan", 0.5)])[0]
    save_tree(tmp_path, to_dict(trajectory))
    back = from_dict(load_tree(tmp_path))
    assert back.task == trajectory.task and back.reward == trajectory.reward and back.metrics == trajectory.metrics
    assert torch.equal(stack([back]).logp_old, stack([trajectory]).logp_old)
    assert torch.equal(back.decisions.extra["symbols"], trajectory.decisions.extra["symbols"])


def test_group_by_task_preserves_order(env):
    trajectories = env.rollout([Task(2), Task(0), Task(2)])
    assert [[trajectory.task.key for trajectory in group] for group in group_by_task(trajectories)] == [[2, 2], [0]]


def test_capabilities_are_looked_up_and_missing_ones_refused(env):
    assert require_capability(env, "branch") == env.branch
    env.capabilities = {"count": lambda env, keys: env.length + len(keys)}
    assert require_capability(env, "count")([1, 2]) == env.length + 2
    with pytest.raises(UserError, match="ability 'hint', which object lacks"):
        require_capability(object(), "hint")


def test_groups_with_equal_rewards_are_degenerate():
    assert degenerate(torch.tensor([1.0, 1.0])) and not degenerate(torch.tensor([1.0, 0.0]))
