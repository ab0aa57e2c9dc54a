"""Single tasks of OGBench: equal to the environments of the package step by step, with dense and sparse reward."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, make_sim

pytest.importorskip("ogbench")

from robopolicy_tasks.ogbench.env import GoalTaskEnv, SingleTaskEnv, compiled_once, numpy_seed


def official(task: str) -> Any:
    with compiled_once():
        env = gymnasium.make(task, disable_env_checker=True)
        env.unwrapped.reset()
    return env


def reset_official(env: Any, seed: int) -> Any:
    """Reset with the random steps of the package at the goal drawn from `seed`; the package draws them unseeded."""
    space = env.unwrapped.action_space
    space.seed(seed)
    with numpy_seed(seed), patch.object(type(env.unwrapped), "action_space", space):
        return env.reset(seed=seed)[0]


@pytest.mark.parametrize(
    ("task", "limit", "goals"),
    [
        ("scene-singletask-task1-v0", 750, 5),  # cube, two buttons, drawer, window
        ("scene-singletask-v0", 750, 5),  # task 2
        ("puzzle-3x3-singletask-task4-v0", 500, 9),
        ("cube-double-singletask-task5-v0", 500, 2),
    ],
)
def test_single_task_equals_the_official_environment(task: str, limit: int, goals: int) -> None:
    reference, made = official(task), SingleTaskEnv(task, sparse=False)
    sim = make_sim(f"ogbench/{task}", SimOptions(num_envs=1, reward="shaped"))
    assert (sim.spec.max_episode_steps, sim.spec.action_dim, sim.spec.control_dt) == (limit, 5, 0.05)
    sim_obs = sim.reset(3)["state"]
    obs = reset_official(reference, 3)
    assert np.array_equal(obs, made.reset(seed=3)[0])
    rng = np.random.default_rng(0)
    for _ in range(40):
        assert np.array_equal(obs.astype(np.float32), sim_obs[0].numpy())
        action = rng.uniform(-1, 1, 5).astype(np.float32)
        obs, reward, terminated, truncated, info = reference.step(action)
        same_obs, *same, same_info = made.step(action)
        step = sim.step(torch.from_numpy(action)[None])
        assert np.array_equal(obs, same_obs) and same == [reward, terminated, truncated]
        assert (step.reward.item(), step.info["success"].item()) == (reward, info["success"])
        assert same_info["success"] == info["success"] and -goals <= reward < 0
        sim_obs = step.obs["state"]


def test_success_ends_the_episode_one_step_later_with_reward_zero() -> None:
    """The package computes reward and end from the state before the step."""
    for sparse, before in ((False, -5.0), (True, -1.0)):
        env = SingleTaskEnv("puzzle-3x3-singletask-task4-v0", sparse=sparse)
        env.reset(seed=0)
        base_env: Any = env.unwrapped
        action = np.zeros(5, np.float32)
        _, first, *_ = env.step(action)
        assert first == before
        base_env._cur_button_states = base_env._target_button_states.copy()
        _, reward, terminated, _, info = env.step(action)
        assert reward == 0 and not terminated and not info["success"]  # success was computed in the step before
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, bool(info["success"])) == (0.0, True, False, True)


def test_single_task_without_number_is_the_default_task() -> None:
    defaults = {"scene": 2, "puzzle-3x3": 4, "cube-double": 2}
    for domain, number in defaults.items():
        env = SingleTaskEnv(f"{domain}-singletask-v0", sparse=True)
        env.reset(seed=0)
        assert env.unwrapped.cur_task_id == number  # type: ignore[attr-defined]


def test_goal_task_equals_the_official_environment() -> None:
    with compiled_once():
        reference: Any = gymnasium.make("puzzle-3x3-v0", disable_env_checker=True, use_oracle_rep=True)
        reference.unwrapped.reset()
    made = GoalTaskEnv("puzzle-3x3-v0")
    tasks = set()
    for seed in (0, 1, 2):
        space = reference.unwrapped.action_space
        space.seed(seed)
        with numpy_seed(seed), patch.object(type(reference.unwrapped), "action_space", space):
            obs, info = reference.reset(seed=seed)
        own, _ = made.reset(seed=seed)
        tasks.add(reference.unwrapped.cur_task_id)
        assert np.array_equal(own["state"], obs) and np.array_equal(own["goal"], info["goal"])
        for _ in range(5):
            action = np.random.default_rng(seed).uniform(-1, 1, 5).astype(np.float32)
            obs, reward, terminated, truncated, _ = reference.step(action)
            own, *same, _ = made.step(action)
            assert np.array_equal(own["state"], obs) and same == [reward, terminated, truncated]
    assert len(tasks) > 1 and own["goal"].shape == (9,)
    base_env: Any = made.unwrapped
    base_env._cur_button_states = base_env._target_button_states.copy()
    _, reward, terminated, _, _ = made.step(np.zeros(5, np.float32))
    assert (reward, terminated) == (1.0, True)


def test_unknown_single_task_is_refused() -> None:
    with pytest.raises(UserError, match="scene-singletask-task6-v0"):
        make_sim("ogbench/scene-singletask-task6-v0")
