"""Tests of Gymnasium and EnvPool environments by id: they follow the simulator contract."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from robopolicy.errors import UserError
from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.sim.spaces import ObservationMap


def test_any_gymnasium_id_is_a_task() -> None:
    sim = make_sim("gymnasium/Pendulum-v1", SimOptions(num_envs=3))
    assert sim.spec.task == "gymnasium/Pendulum-v1"
    assert sim.spec.max_episode_steps == 200
    assert check_simulator(sim, lambda n: make_sim("gymnasium/Pendulum-v1", SimOptions(n))) == []


@pytest.mark.parametrize(
    ("name", "lesson"),
    [
        ("gymnasium/Pendulun-v1", "Pendulun"),
        ("gymnasium/no_such_module:Thing-v0", "no_such_module"),
        ("gymnasium/CartPole-v1", "Discrete actions"),
    ],
)
def test_unavailable_environments_are_explained(name: str, lesson: str) -> None:
    with pytest.raises(UserError, match=lesson):
        make_sim(name, SimOptions(num_envs=1))


def test_pass_through_tasks_refuse_unsupported_options() -> None:
    with pytest.raises(UserError, match="cameras"):
        make_sim("gymnasium/Pendulum-v1", SimOptions(cameras=("front",)))
    with pytest.raises(UserError, match="backend"):
        make_sim("gymnasium/Pendulum-v1", SimOptions(backend="mujoco"))
    with pytest.raises(UserError, match="Unknown task"):
        get_task("gymnasium/")


def test_nested_observations_become_flat_vectors_and_images() -> None:
    space = spaces.Dict(
        {
            "goal": spaces.Box(-1, 1, (2, 2), np.float64),
            "camera": spaces.Box(0, 255, (4, 6, 3), np.uint8),
            "robot": spaces.Dict({"gripper": spaces.Discrete(3), "speed": spaces.Box(-1, 1, (), np.float32)}),
        }
    )
    mapping = ObservationMap(space)
    shapes = {key: entry.shape for key, entry in mapping.specs.items()}
    assert shapes == {"goal": (4,), "image.camera": (3, 4, 6), "robot.gripper": (3,), "robot.speed": (1,)}
    sample = space.sample()
    sample["robot"]["gripper"] = np.int64(1)
    flat = mapping.single(sample)
    np.testing.assert_array_equal(flat["image.camera"], sample["camera"].transpose(2, 0, 1))
    np.testing.assert_array_equal(flat["robot.gripper"], [0, 1, 0])
    np.testing.assert_array_equal(flat["goal"], sample["goal"].reshape(-1).astype(np.float32))


def test_gymnasium_frames_are_scaled_to_the_requested_size() -> None:
    try:
        gl_backend()
    except UserError as error:
        pytest.skip(str(error))
    sim = GymnasiumSim("InvertedPendulum-v5", 2)
    sim.reset(0)
    assert sim.render(width=32, height=24, envs=2).shape == (2, 3, 24, 32)
    sim.close()


def test_unbounded_actions_are_refused() -> None:
    class Unbounded(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = spaces.Box(-1, 1, (1,))
        action_space = spaces.Box(-np.inf, np.inf, (1,))

    with pytest.raises(UserError, match="unbounded"):
        GymnasiumSim(Unbounded, 1)


def test_envpool_passes_the_checker() -> None:
    pytest.importorskip("envpool")
    sim = make_sim("envpool/InvertedPendulum-v5", SimOptions(num_envs=3))
    assert not sim.spec.seeded_episodes
    assert check_simulator(sim) == []


def test_envpool_returns_the_true_final_observation_and_resets_in_the_same_step() -> None:
    pytest.importorskip("envpool")
    from robopolicy.sim.backends.envpool import EnvPoolSim

    short = EnvPoolSim("HalfCheetah-v5", 3, options={"max_episode_steps": 4})
    long = EnvPoolSim("HalfCheetah-v5", 3)
    assert torch.equal(short.reset(5)["state"], long.reset(5)["state"])
    generator = torch.Generator().manual_seed(0)
    for action in torch.rand(4, 3, 6, generator=generator) * 2 - 1:
        ended, continued = short.step(action), long.step(action)
    assert ended.truncated.all()
    assert not ended.terminated.any()
    assert torch.equal(ended.final_obs["state"], continued.obs["state"])
    assert not torch.equal(ended.obs["state"], ended.final_obs["state"])
    assert short.episode_step.tolist() == [0, 0, 0]
    assert not short.step(action).done.any()  # the next action belongs to the new episode


def test_envpool_returns_match_hand_computed_values() -> None:
    """The pendulum earns 1 per step while upright, so a return is the number of steps before the fall."""
    pytest.importorskip("envpool")
    sims = [make_sim("inverted_pendulum", SimOptions(4, backend=name)) for name in ("envpool", "mujoco", "gymnasium")]
    for sim in sims:
        sim.reset(0)
        total, length = torch.zeros(4), torch.zeros(4)
        falls = 0
        for _ in range(60):
            step = sim.step(torch.full((4, 1), 3.0))
            total, length = total + step.reward, length + 1
            assert torch.equal(step.truncated, torch.zeros(4, dtype=torch.bool))
            assert torch.equal(total[step.done], length[step.done] - 1)
            assert (step.final_obs["state"][step.done, 1].abs() > 0.2).all()
            falls += int(step.done.sum())
            total, length = total * ~step.done, length * ~step.done
        assert falls >= 8


def test_envpool_ends_the_episodes_of_non_finite_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("envpool")
    sim = make_sim("envpool/InvertedPendulum-v5", SimOptions(num_envs=2))
    first = sim.reset(0)["state"].clone()
    pool = sim._pool  # type: ignore[attr-defined]
    pool_step = pool.step

    class Spoiled:
        """The pool with NaN observations in the second row."""

        reset, close = pool.reset, pool.close

        def step(self, *action: Any) -> Any:
            observation, *rest = pool_step(*action)
            return np.where(np.arange(2)[:, None] == 1, np.nan, observation), *rest

    monkeypatch.setattr(sim, "_pool", Spoiled())
    step = sim.step(torch.zeros(2, 1))
    assert step.info["diverged"].tolist() == step.terminated.tolist() == [False, True]
    assert step.reward.tolist() == [1.0, 0.0]
    assert torch.equal(step.final_obs["state"][1], first[1])
    assert step.obs["state"].isfinite().all()


def test_envpool_observations_contain_meta_world_goals() -> None:
    pytest.importorskip("envpool")
    goals = make_sim("envpool/MetaWorld/Push-v3", SimOptions(num_envs=4)).reset(0)["state"][:, -3:]
    assert (goals != 0).any(1).all()
    assert len(goals.unique(dim=0)) > 1


def test_unknown_envpool_id_suggests_similar_ones() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(UserError, match="Did you mean HalfCheetah-v5"):
        make_sim("envpool/HalfCheeta-v5")
