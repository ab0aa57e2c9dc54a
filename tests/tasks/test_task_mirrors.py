"""Tests of declared task symmetries: mirrored actions in a mirrored state lead to the mirrored next state."""

import numpy as np
import pytest
import torch

from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import ResetState
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy_tasks.locomotion import robots
from robopolicy_tasks.toy.point_mass import PointMassSim

ROBOTS = {"ant": robots.Ant, "swimmer": robots.Swimmer}


def robot(short: str, mirrored: bool) -> MujocoSim:
    """Returns one robot at a start sampled from its initial distribution, or at the mirror image of that start."""
    task = ROBOTS[short](f"locomotion/{short}")
    assert task.mirror is not None
    first = task.initial(np.random.default_rng(3))
    if mirrored:
        visible = np.concatenate([first.qpos[task.skipped :], first.qvel])
        reflection = task.mirror.observation["state"]
        full = np.zeros(reflection.size)
        full[: len(visible)] = visible
        image = np.asarray(reflection.sign) * full[list(reflection.order)]
        count = len(first.qpos) - task.skipped
        qpos = np.concatenate([first.qpos[: task.skipped] * [1, -1][: task.skipped], image[:count]])
        first = ResetState(qpos, image[count : len(visible)], first.memory)
    task.initial = lambda rng: first  # type: ignore[method-assign]
    return MujocoSim(task, 1, engine="exact" if task.needs_exact_engine else "auto")


def follow(sim: VectorSim, other: VectorSim, steps: int) -> None:
    mirror = sim.spec.mirror
    assert mirror is not None
    g = torch.Generator().manual_seed(0)
    span = sim.spec.action_high - sim.spec.action_low
    for _ in range(steps):
        action = sim.spec.action_low + span * torch.rand(sim.num_envs, sim.spec.action_dim, generator=g)
        step, image = sim.step(action), other.step(mirror.action(action))
        torch.testing.assert_close(mirror.mirror_obs(step.final_obs), dict(image.final_obs), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(step.reward, image.reward, rtol=1e-3, atol=1e-3)
        assert torch.equal(step.terminated, image.terminated)


@pytest.mark.parametrize("short", ROBOTS)
def test_mirrored_robot_follows_the_mirrored_trajectory(short: str) -> None:
    sim, other = robot(short, False), robot(short, True)
    sim.reset(0)
    other.reset(0)
    follow(sim, other, 30)


def test_mirrored_point_mass_follows_the_mirrored_trajectory() -> None:
    sim, other = (PointMassSim(SimOptions(num_envs=4, reward="shaped")) for _ in range(2))
    obs = sim.reset(0)
    other.reset(0)
    mirror = sim.spec.mirror
    assert mirror is not None
    other.load_state_dict(sim.state_dict() | {"state": mirror.mirror_obs(obs)["state"]})
    follow(sim, other, 20)


@pytest.mark.parametrize("backend", ["mujoco", "gymnasium"])
def test_every_backend_of_a_robot_declares_its_mirror(backend: str) -> None:
    sim = make_sim("swimmer", SimOptions(num_envs=1, backend=backend))
    assert sim.spec.mirror == robots.Swimmer.mirror
    sim.close()
