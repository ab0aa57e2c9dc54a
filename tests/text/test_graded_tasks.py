"""Tests of tasks that grade more than success, including judges, and of the recipes that require these grades."""

import pytest
from graded_tasks import check_solutions_solve_and_fit

pytest.importorskip("transformers")

import torch

from robopolicy.policies.base import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.text_env import TextEnv
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import LARGE, SIZE, Grid, GridEpisode, Pits, Waypoints, distances


def small(seed=0):
    torch.manual_seed(seed)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2, context=256), PolicySpec({"text": (104,)}, 10))


def graded(task, seed, *messages):
    """Returns the grades of each message, and the last turn."""
    episode = task.episode(seed)
    turns = [episode.step(message) for message in messages]
    return [turn.metrics for turn in turns], turns[-1]


TASKS = (Grid(), Pits(), Waypoints(), Calculator())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_solutions_succeed_and_fit_the_limits(task):
    check_solutions_solve_and_fit(task)


def test_moves_are_graded_by_the_remaining_distance():
    episode = Grid().episode(0)
    before = episode.far[episode.at]
    word = episode.demonstration()[0]
    back = {"e": "w", "w": "e", "n": "s", "s": "n"}[word]
    grades, _ = graded(Grid(), 0, word, back, "x")
    assert [grade["advantage"] for grade in grades] == [1.0, -1.0, 0.0]
    assert [grade["efficiency"] for grade in grades] == [1.0, 0.0, 0.0]
    assert [grade["legal"] for grade in grades] == [1.0, 1.0, 0.0]
    assert before == len(episode.demonstration()) and "safe" not in grades[0]


def test_distances_go_around_pits():
    far = distances((3, 1), [(1, 1)])
    assert far[(0, 1)] == 5 and far[(2, 1)] == 1  # straight ahead it would be 3
    neighbours = [far[(0, 1)], far[(2, 1)], far[(1, 0)], far[(1, 2)]]
    assert far[(1, 1)] > max(neighbours) and len(far) == SIZE * SIZE
    walks = (GridEpisode(seed, pits=1) for seed in range(100))
    walk = next(walk for walk in walks if walk.far[walk.at] == 5 and walk.at[1] == walk.goal[1])
    ahead = "e" if walk.goal[0] > walk.at[0] else "w"
    turns = [walk.step(ahead) for _ in range(3)]
    assert turns[-1].success and min(turn.metrics["safe"] for turn in turns) == 0.0


def test_pits_leave_a_path_to_every_position_and_the_goal_is_near():
    assert distances((0, 0), [(0, 1), (1, 0)], 5) == {}
    episodes = [Pits().episode(seed) for seed in range(200)]
    assert {len(episode.far) for episode in episodes} == {LARGE * LARGE}
    assert {episode.far[episode.at] for episode in episodes} == {1, 2, 3}


def test_announced_waypoints_are_subgoals():
    seed = next(seed for seed in range(100) if len(Waypoints().episode(seed).demonstration()) == 6)
    responses = Waypoints().episode(seed).demonstration()
    places = [len(word) == 2 for word in responses]
    assert places[0] and sum(places) == 2
    env = TextEnv(small(), Waypoints(), torch.Generator().manual_seed(0))
    conversation = env.start_conversation(Task(seed, payload=seed))
    for message in responses:
        env.append_message(conversation, message, own=True)
    rows = env.batch([env.trajectory_of(conversation)])
    subgoal, unit, own = rows.extra["subgoal"][0], rows.require("unit")[0], rows.valid()[0]
    assert torch.equal(subgoal, own & torch.tensor(places)[unit])
    assert torch.equal(rows.extra["switch"], rows.extra["subgoal"]) and subgoal.any() and (own & ~subgoal).any()


def test_message_with_a_failed_reward_has_no_subgoal():
    env = TextEnv(small(), Waypoints(), torch.Generator().manual_seed(0))
    trajectory = env.rollout([Task(3, payload=3)], units=1)[0]
    conversation = trajectory.record
    tokens = env.policy.encode_message("n")
    conversation.append_tokens(tokens, env.policy.generation_order(len(tokens), env.generator))
    env.record_turn(conversation, "n", None)
    assert conversation.reward_failed and not env.trajectories_of([conversation])[0].decisions.extra["subgoal"].any()


def test_answers_are_grounded_only_after_a_tool_call():
    task = Calculator()
    right = task.episode(0).answer
    (call, answer), turn = graded(task, 0, "?", right)
    assert turn.success and call["grounding"] == answer["grounding"] == 1.0
    (alone,), turn = graded(task, 0, right)
    assert turn.success and alone["grounding"] == 0.0


def test_blamed_unit_is_the_worst_message():
    policy = small()
    env = TextEnv(policy, Grid(), torch.Generator().manual_seed(0))
    trajectories = env.rollout([Task(seed, payload=seed) for seed in range(12)])
    rows = env.batch(trajectories)
    for trajectory, blamed in zip(trajectories, rows.extra["blamed_unit"].tolist(), strict=True):
        grades = trajectory.record.metrics["advantage"]
        assert blamed == (grades.index(min(grades)) if min(grades) < 0 else -1)
