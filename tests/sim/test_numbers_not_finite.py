"""Tests of non-finite numbers: they end only the episode of their environment, or are refused before execution."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sim_rules import check_refuses_actions_that_are_no_numbers
from slider import Slider

from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import Array, BatchState, namespace
from robopolicy.sim.backends.mujoco.task import StepResult as TaskOutcome
from robopolicy.sim.backends.warp import WarpSim
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim


class Broken(Slider):
    """Its reward or its observation is not finite beyond 1.2 m."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> TaskOutcome:
        found = super().outcome(before, action, after)
        x = after.qpos[:, 0]
        xp = namespace(x)
        reward = xp.where(x > 1.2, xp.nan, x) if self.what == "reward" else found.reward
        return TaskOutcome(reward, found.terminated, {"success": x > 1.2})

    def observe(self, state: BatchState) -> dict[str, Array]:
        seen = super().observe(state)["state"]
        xp = namespace(seen)
        return {"state": xp.where(seen[:, :1] > 1.2, xp.inf, seen) if self.what == "obs" else seen}


BACKENDS: dict[str, Callable[[str], VectorSim]] = {
    "rollout": lambda what: MujocoSim(Broken(what), 3, engine="rollout"),
    "exact": lambda what: MujocoSim(Broken(what), 3, engine="exact"),
    "warp": lambda what: WarpSim(Broken(what), 3, device="cpu"),
}


@pytest.mark.parametrize("what", ["reward", "obs"])
@pytest.mark.parametrize("backend", ["rollout", "exact", pytest.param("warp", marks=pytest.mark.compiles)])
def test_non_finite_reward_or_observation_ends_only_its_episode(backend: str, what: str) -> None:
    if backend == "warp":
        pytest.importorskip("mujoco_warp")
    sim = BACKENDS[backend](what)
    sim.reset(0)
    push = torch.tensor([[0.1], [0.5], [0.1]])
    first = sim.step(push)
    step = sim.step(push)  # x = 0.3, 1.5, 0.3
    lost = [False, True, False]
    assert step.info["diverged"].tolist() == step.terminated.tolist() == lost
    assert step.info["success"].tolist() == [False] * 3
    torch.testing.assert_close(step.reward, torch.tensor([0.3, 0.0, 0.3]))
    assert torch.isfinite(step.final_obs["state"]).all()
    torch.testing.assert_close(step.final_obs["state"][0], torch.tensor([0.3, 0.2, 2.0]))
    if backend != "warp":  # warp stores no earlier observation
        assert torch.equal(step.final_obs["state"][1], first.obs["state"][1])
    assert sim.episode_seed.tolist() == [0, 3, 2]
    torch.testing.assert_close(step.obs["state"][1], torch.zeros(3))


@pytest.mark.parametrize("task", ["gymnasium/HalfCheetah-v5", "dm_control/cheetah-run"])
def test_internal_reset_of_the_simulation_counts_as_divergence(task: str) -> None:
    if task.startswith("dm_control"):
        pytest.importorskip("dm_control")
    sim = make_sim(task, SimOptions(num_envs=2))
    assert isinstance(sim, GymnasiumSim)
    sim.reset(0)
    before = sim.step(torch.zeros(2, 6))
    inside: Any = sim.envs[0].unwrapped
    data = inside._env.physics.data if task.startswith("dm_control") else inside.data
    data.qpos[3] = np.nan  # MuJoCo resets such a state by itself and returns finite numbers again
    step = sim.step(torch.zeros(2, 6))
    assert step.info["diverged"].tolist() == step.terminated.tolist() == [True, False]
    assert float(step.reward[0]) == 0 and torch.equal(step.final_obs["state"][0], before.obs["state"][0])
    assert sim.episode_step.tolist() == [0, 2]


@pytest.mark.parametrize("task", ["point_mass", "toy/push"])
def test_nan_actions_are_refused(task: str) -> None:
    check_refuses_actions_that_are_no_numbers(task)
