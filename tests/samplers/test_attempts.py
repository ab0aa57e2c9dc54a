"""Attempts become rows: padding, ids, rewards, what checkpoints keep; and worlds that lack an ability say so."""

from dataclasses import replace

import pytest
import torch
from playground import Playground

from robopolicy.core.advantage import outcome
from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import Task, able, degenerate
from robopolicy.text.rollouts.trajectories import from_dict, groups_of, stack, to_dict
from robopolicy.training.resume import load_tree, save_tree


@pytest.fixture(params=["tokens", "chain"])
def world(request) -> Playground:
    return Playground(request.param)


def test_rows_carry_ids_and_rewards(world):
    attempts = world.play([Task(2), Task(0), Task(0)])
    batch = stack(attempts)
    per_attempt = len(attempts[0].decisions)
    assert batch.group.tolist() == [2] * per_attempt + [0] * 2 * per_attempt
    assert batch.trajectory.tolist() == [i for i in range(3) for _ in range(per_attempt)]
    reward = torch.tensor([attempt.reward for attempt in attempts], dtype=torch.float64)
    torch.testing.assert_close(outcome(batch)[::per_attempt, 0], reward)


def test_shorter_attempts_are_padded_and_masked(world):
    world.layout = "tokens"
    whole, cut = world.play([Task(0)]) + world.play([Task(1)], units=1)
    batch = stack([replace(whole, reward=2.0), replace(cut, reward=3.0)])
    assert batch.valid().tolist() == [[True] * 6, [True, True] + [False] * 4]
    assert batch.reward[1].tolist() == [0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert batch.extra["symbols"].shape == (2, 6)


def test_given_decisions_are_no_decisions_and_step_rewards_stay(world):
    attempt = world.play([world.begin(Task(0), 1 / 3)])[0]
    assert attempt.decisions.valid().flatten().tolist() == [False, False, True, True, True, True]
    steps = attempt.decisions.with_fields(reward=torch.full_like(attempt.decisions.logp_old, 0.25))
    reward = stack([replace(attempt, decisions=steps, reward=3.0)]).reward.flatten()
    torch.testing.assert_close(reward, torch.tensor([0.0, 0.0, 0.25, 0.25, 0.25, 2.25], dtype=torch.float64))


def test_behaviour_of_fresh_rows_is_their_own(world):
    drawn = world.play([world.hint(Task(0), "solution", 0.5), Task(0)])
    batch = stack([*world.rescore(drawn[:1], [Task(0)]), drawn[1]])
    half = len(batch) // 2
    assert not torch.allclose(batch.logp_old[:half], batch.logp_behaviour[:half])
    assert torch.equal(batch.logp_old[half:], batch.logp_behaviour[half:])


def test_checkpoints_keep_attempts(world, tmp_path):
    attempt = world.play([world.hint(Task(1, temperature=0.5), "plan", 0.5)])[0]
    save_tree(tmp_path, to_dict(attempt))
    back = from_dict(load_tree(tmp_path))
    assert back.task == attempt.task and back.reward == attempt.reward and back.metrics == attempt.metrics
    assert torch.equal(stack([back]).logp_old, stack([attempt]).logp_old)
    assert torch.equal(back.decisions.extra["symbols"], attempt.decisions.extra["symbols"])


def test_groups_keep_order(world):
    attempts = world.play([Task(2), Task(0), Task(2)])
    assert [[attempt.task.key for attempt in group] for group in groups_of(attempts)] == [[2, 2], [0]]


def test_worlds_are_asked_for_their_abilities(world):
    assert able(world, "branch") == world.branch
    world.abilities = {"count": lambda world, keys: world.length + len(keys)}
    assert able(world, "count")([1, 2]) == world.length + 2
    with pytest.raises(UserError, match="ability 'hint', which object lacks"):
        able(object(), "hint")


def test_groups_in_need():
    assert degenerate(torch.tensor([1.0, 1.0])) and not degenerate(torch.tensor([1.0, 0.0]))
