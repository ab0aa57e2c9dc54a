"""Tests of locomotion tasks against gymnasium: bit-equal with the exact engine, numerically close with rollout."""

import gymnasium
import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import reward_terms
from robopolicy.sim.registry import SimOptions, make_sim

ROBOTS = {
    "half_cheetah": ("HalfCheetah-v5", 300),
    "hopper": ("Hopper-v5", 300),
    "walker2d": ("Walker2d-v5", 60),
    "swimmer": ("Swimmer-v5", 60),
    "inverted_pendulum": ("InvertedPendulum-v5", 60),
    "ant": ("Ant-v5", 40),
    "humanoid": ("Humanoid-v5", 40),
}


def reward_parts(info: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the reward terms of the first environment under gymnasium's names."""
    return {f"reward_{name}": float(value[0]) for name, value in reward_terms(info).items()}


@pytest.mark.parametrize("short", ROBOTS)
def test_exact_engine_is_bit_equal_to_gymnasium(short: str) -> None:
    env_id, steps = ROBOTS[short]
    sim = make_sim(f"locomotion/{short}", SimOptions(num_envs=2, backend="mujoco-exact"))
    env = gymnasium.make(env_id)
    obs = sim.reset(11)["state"]
    expected, _ = env.reset(seed=11)
    rng = np.random.default_rng(0)
    spans = (sim.spec.action_high - sim.spec.action_low).numpy()
    for _ in range(steps):
        np.testing.assert_array_equal(obs[0].numpy(), expected.astype(np.float32))
        action = (sim.spec.action_low.numpy() + spans * rng.uniform(size=spans.shape)).astype(np.float32)
        step = sim.step(torch.from_numpy(action).expand(2, -1))
        expected, reward, terminated, truncated, info = env.step(action)
        np.testing.assert_array_equal(step.final_obs["state"][0].numpy(), expected.astype(np.float32))
        assert reward_parts(step.info) == {key: np.float32(info[key]) for key in info if key.startswith("reward_")}
        assert step.reward[0].item() == np.float32(reward)
        assert (bool(step.terminated[0]), bool(step.truncated[0])) == (terminated, truncated)
        obs = step.obs["state"]
        if terminated or truncated:
            expected, _ = env.reset(seed=int(sim.episode_seed[0]))


def test_physics_is_bit_equal_before_rounding_to_float32() -> None:
    sim = make_sim("half_cheetah", SimOptions(num_envs=4, backend="mujoco-exact"))
    env = gymnasium.make("HalfCheetah-v5").unwrapped
    sim.reset(0)
    env.reset(seed=2)
    rng = np.random.default_rng(0)
    for _ in range(300):
        action = rng.uniform(-1, 1, 6).astype(np.float32)
        sim.step(torch.from_numpy(action).expand(4, -1))
        env.step(action)
        state = sim.state()  # type: ignore[attr-defined]
        np.testing.assert_array_equal(state.qpos[2], env.data.qpos)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(state.qvel[2], env.data.qvel)  # type: ignore[attr-defined]


@pytest.mark.parametrize("short", ["half_cheetah", "hopper", "walker2d", "swimmer", "inverted_pendulum"])
def test_rollout_engine_starts_equal_and_stays_close(short: str) -> None:
    fast, exact = (make_sim(short, SimOptions(6, backend=backend)) for backend in ("mujoco", "mujoco-exact"))
    assert torch.equal(fast.reset(0)["state"], exact.reset(0)["state"])
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):  # longer trajectories diverge chaotically
        action = torch.rand(6, fast.spec.action_dim, generator=generator) * 2 - 1
        fast_step, exact_step = fast.step(action), exact.step(action)
        torch.testing.assert_close(fast_step.final_obs["state"], exact_step.final_obs["state"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(fast_step.reward, exact_step.reward, atol=1e-4, rtol=1e-4)
        assert reward_terms(fast_step.info)
        torch.testing.assert_close(reward_terms(fast_step.info), reward_terms(exact_step.info), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("short", ROBOTS)
def test_every_observation_and_action_has_a_name(short: str) -> None:
    spec = make_sim(short, SimOptions(num_envs=1)).spec
    entry = spec.observation["state"]
    assert len(entry.names) == entry.shape[0]
    assert len(set(entry.names)) == len(entry.names)
    assert len(spec.action_names) == spec.action_dim


def test_all_backends_agree_on_the_spec() -> None:
    specs = [
        make_sim("ant", SimOptions(1, backend=backend)).spec for backend in ("mujoco", "gymnasium", "mujoco-exact")
    ]
    for spec in specs[1:]:
        assert spec.task == specs[0].task == "locomotion/ant"
        assert spec.observation["state"].shape == specs[0].observation["state"].shape
        assert torch.equal(spec.action_low, specs[0].action_low)
        assert spec.control_dt == pytest.approx(specs[0].control_dt)
        assert spec.max_episode_steps == specs[0].max_episode_steps == 1000


@pytest.mark.parametrize("backend", ["mujoco", "mujoco-exact", "gymnasium"])
def test_reward_terms_sum_to_the_reward_and_are_zero_for_inactive_rows(backend: str) -> None:
    sim = make_sim("walker2d", SimOptions(num_envs=2, backend=backend))
    sim.reset(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        step = sim.step(torch.rand(2, 6, generator=generator) * 2 - 1)
        parts = reward_terms(step.info)
        assert set(parts) == {"forward", "survive", "ctrl"}
        torch.testing.assert_close(sum(parts.values()), step.reward)
    step = sim.step(torch.ones(2, 6), torch.tensor([False, True]))
    assert all(float(part[0]) == 0.0 for part in reward_terms(step.info).values())
    assert float(step.info["reward.ctrl"][1]) == pytest.approx(-6e-3)


def test_evaluation_accepts_chunk_steps_without_active_rows_and_reward_terms() -> None:
    config = GaussianConfig(normalization="identity", action_normalization="identity")
    policy = GaussianPolicy(config, PolicySpec({"state": (11,)}, 3, horizon=4, action_horizon=4))
    result = evaluate(policy, make_sim("hopper", SimOptions(num_envs=3)), episodes=4, deterministic=False)
    assert len(result.returns) == 4 and any(int(length) % 4 for length in result.lengths)


def test_backends_without_cameras_refuse_them() -> None:
    with pytest.raises(UserError, match="use backend 'mujoco'"):
        make_sim("hopper", SimOptions(backend="gymnasium", cameras=("track",)))
