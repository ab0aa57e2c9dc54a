"""Tests of the Gymnasium and Stable-Baselines3 adapters, including final observations of episodes."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from robopolicy.errors import UserError
from robopolicy.interop.gymnasium import SimEnv, SimVectorEnv
from robopolicy.sim.registry import SimOptions, make_sim

TASKS = ["locomotion/hopper", "locomotion/ant", "toy/point_mass", "manipulation/lift"]


@pytest.mark.parametrize("task", TASKS)
def test_gymnasium_check_env_passes(task: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about unbounded observations
        check_env(SimEnv(make_sim(task, SimOptions(num_envs=1))), skip_render_check=True)


@pytest.mark.parametrize("task", TASKS)
def test_sb3_check_env_passes(task: str) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checker.check_env(SimEnv(make_sim(task, SimOptions(num_envs=1))), skip_render_check=True)


def test_single_env_equals_the_gymnasium_env_over_several_episodes() -> None:
    ours = SimEnv(make_sim("hopper", SimOptions(num_envs=1, backend="mujoco-exact")))
    original = gymnasium.make("Hopper-v5")
    rng = np.random.default_rng(0)
    seed = 3
    obs, expected = ours.reset(seed=seed)[0], original.reset(seed=seed)[0]
    for _ in range(120):
        np.testing.assert_array_equal(obs, expected.astype(np.float32))
        action = rng.uniform(-1, 1, 3).astype(np.float32)
        obs, reward, terminated, truncated, _ = ours.step(action)
        expected, expected_reward, *flags, _ = original.step(action)
        assert [terminated, truncated] == flags
        assert reward == np.float32(expected_reward)
        if terminated or truncated:
            np.testing.assert_array_equal(obs, expected.astype(np.float32))
            seed += 1  # a reset without a seed starts the next episode
            obs, expected = ours.reset()[0], original.reset(seed=seed)[0]


def test_single_env_refuses_a_batch() -> None:
    with pytest.raises(UserError, match="1 environment"):
        SimEnv(make_sim("toy/point_mass", SimOptions(num_envs=2)))


def test_vector_env_reports_final_observations_like_gymnasium() -> None:
    reference = make_sim("hopper", SimOptions(num_envs=4))
    env = SimVectorEnv(make_sim("hopper", SimOptions(num_envs=4)))
    obs, _ = env.reset(seed=0)
    reference.reset(0)
    assert env.observation_space.contains(obs)
    ended = 0
    for _ in range(60):
        action = env.action_space.sample()
        obs, reward, terminated, truncated, infos = env.step(action)
        step = reference.step(torch.from_numpy(action))
        np.testing.assert_array_equal(obs, step.obs["state"].numpy())
        assert reward.dtype == np.float64
        done = terminated | truncated
        assert ("final_obs" in infos) == bool(done.any())
        for row in np.flatnonzero(done):
            ended += 1
            assert infos["_final_obs"][row]
            np.testing.assert_array_equal(infos["final_obs"][row], step.final_obs["state"][row].numpy())
    assert ended > 0


def test_vector_env_returns_images_channels_last() -> None:
    try:
        env = SimVectorEnv(make_sim("hopper", SimOptions(num_envs=2, cameras=("track",), image_size=24)))
        obs, _ = env.reset(seed=0)
    except UserError as error:
        pytest.skip(str(error))
    assert obs["image.track"].shape == (2, 24, 24, 3)
    assert env.observation_space.contains(obs)


def test_sb3_trains_and_receives_terminal_observations() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from robopolicy.interop.stable_baselines3 import SimVecEnv

    env = SimVecEnv(make_sim("hopper", SimOptions(num_envs=4)))
    env.seed(0)
    env.reset()
    for _ in range(60):
        _, _, done, infos = env.step(np.random.default_rng(0).uniform(-1, 1, (4, 3)))
        for row in np.flatnonzero(done):
            assert infos[row]["terminal_observation"].shape == (11,)
            assert infos[row]["TimeLimit.truncated"] is False
    sb3.PPO("MlpPolicy", env, n_steps=8, batch_size=16, n_epochs=1, device="cpu").learn(64)
