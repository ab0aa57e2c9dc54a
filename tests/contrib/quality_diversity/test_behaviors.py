"""Tests of behaviors: episode descriptors, foot heights against MuJoCo, and descriptor observations."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch
from sim_rules import check_refuses_actions_that_are_no_numbers

from robopolicy.contrib.quality_diversity.arm import LINKS
from robopolicy.contrib.quality_diversity.behavior import BehaviorDescriptor
from robopolicy.contrib.quality_diversity.behaviors import BEHAVIORS, TaskBehavior, hand
from robopolicy.contrib.quality_diversity.descriptor import FEATURES
from robopolicy.contrib.quality_diversity.feet import PlanarFeet
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.task import BatchState
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.registry import WrapperSpec
from robopolicy_tasks.locomotion.robots import HalfCheetah, Hopper, Walker2d

DESCRIPTOR = (WrapperSpec("descriptor"),)


def descriptor_sim(name: str, num_envs: int = 3, backend: str = "auto") -> VectorSim:
    return make_sim(name, SimOptions(num_envs=num_envs, backend=backend, wrappers=DESCRIPTOR))


def test_descriptors_are_normalised_and_clipped_to_the_bounds() -> None:
    behavior = BehaviorDescriptor(("x [m]", "y [m]"), (-2.0, 0.0), (2.0, 1.0))
    assert behavior.normalize(torch.tensor([[0.0, 0.25], [5.0, -1.0]])).tolist() == [[0.5, 0.25], [1.0, 0.0]]
    with pytest.raises(UserError, match="low < high"):
        BehaviorDescriptor(("x [m]",), (1.0,), (1.0,))
    with pytest.raises(UserError, match="'sum'"):
        BehaviorDescriptor(("x [m]",), (0.0,), (1.0,), "sum")


@pytest.mark.parametrize("name", ["toy/arm", "toy/point_mass", "locomotion/half_cheetah", "locomotion/ant"])
def test_simulators_with_descriptors_meet_the_contract(name: str) -> None:
    assert check_simulator(descriptor_sim(name), lambda count: descriptor_sim(name, count)) == []


def test_the_hand_position_matches_the_arm_geometry() -> None:
    straight, up = torch.zeros(LINKS), torch.zeros(LINKS)
    up[0] = torch.pi / 2
    torch.testing.assert_close(hand(torch.stack([straight, up])), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    bent = torch.zeros(LINKS)
    bent[LINKS // 2] = torch.pi  # the arm folds back onto itself
    torch.testing.assert_close(hand(bent), torch.zeros(2), atol=1e-6, rtol=0)


def test_the_final_descriptor_is_reported_with_its_error_from_the_target() -> None:
    sim = descriptor_sim("toy/arm", 4)
    target = sim.reset(7)["descriptor"]
    for count in range(20):
        step = sim.step(torch.full((4, LINKS), 0.5))
        assert bool(step.done.all()) == (count == 19)
        assert torch.equal(step.final_obs["descriptor"], target)
    expected = (hand(step.final_obs["state"][:, :LINKS]) + 1) / 2
    torch.testing.assert_close(step.info["descriptor"], expected)
    torch.testing.assert_close(step.info["log.descriptor_error"], (expected - target).norm(dim=1))
    assert not torch.equal(step.obs["descriptor"], target)
    assert torch.equal(descriptor_sim("toy/arm", 1).reset(9)["descriptor"][0], target[2])  # episode 9


def test_mean_descriptors_count_only_active_steps_of_each_row() -> None:
    sim = descriptor_sim("locomotion/half_cheetah", 2)
    sim.reset(0)
    rows, seen = torch.tensor([True, False]), []
    for count in range(8):
        step = sim.step(torch.rand(2, 6) * 2 - 1, None if count % 2 else rows)
        seen.append(step.info[FEATURES].clone())
    both = torch.stack(seen)
    torch.testing.assert_close(step.info["descriptor"][0], both[:, 0].mean(0))
    torch.testing.assert_close(step.info["descriptor"][1], both[1::2, 1].mean(0))


@pytest.mark.parametrize(
    ("robot", "name", "feet"),
    [
        (HalfCheetah, "half_cheetah", ("bfoot", "ffoot")),
        (Hopper, "hopper", ("foot_geom",)),
        (Walker2d, "walker2d", ("foot_geom", "foot_left_geom")),
    ],
)
def test_foot_heights_match_mujoco_kinematics(robot: type, name: str, feet: tuple[str, ...]) -> None:
    task = robot("planar")
    qpos = task.model.qpos0 + np.random.default_rng(0).uniform(-0.8, 0.8, (20, task.model.nq))
    heights, data = PlanarFeet(task.model, feet).heights(qpos), mujoco.MjData(task.model)
    for row, place in enumerate(qpos):
        data.qpos[:] = place
        mujoco.mj_kinematics(task.model, data)
        for column, foot in enumerate(feet):
            geom, shape = data.geom(foot), task.model.geom(foot).size
            reach = shape[1] * abs(geom.xmat.reshape(3, 3)[2, 2])
            assert heights[row, column] == pytest.approx(geom.xpos[2] - reach - shape[0], abs=1e-9)
    task_low = task.model.qpos0 - 0.02 * (np.arange(task.model.nq) == 1)
    of_state = BEHAVIORS[f"locomotion/{name}"].of_state
    assert of_state is not None
    low = BatchState(task.model, task_low[None], np.zeros((1, 1)), np.zeros(1), np.zeros((1, 0)), {})
    assert set(of_state(low).flatten()) <= {0.0, 1.0}


def test_policies_trained_with_descriptors_get_the_descriptor_wrapper() -> None:
    assert observation_options([{"state": (9,), "descriptor": (2,)}]) == {"wrappers": DESCRIPTOR}


def test_tasks_without_behavior_are_refused() -> None:
    with pytest.raises(UserError, match="has no behavior descriptor"):
        descriptor_sim("locomotion/inverted_pendulum")
    with pytest.raises(UserError, match="has no behavior descriptor"):
        descriptor_sim("locomotion/half_cheetah", backend="gymnasium")


def test_a_package_adds_the_behavior_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = TaskBehavior(
        BehaviorDescriptor(("vx [m/s]",), (-4.0,), (4.0,)), of_step=lambda s: s.final_obs["state"][:, 2:3]
    )
    monkeypatch.setitem(BEHAVIORS._rows, "toy/point_mass", speed)
    sim = descriptor_sim("toy/point_mass")
    assert sim.reset(0)["descriptor"].shape == (3, 1)
    step = sim.step(torch.ones(3, 2))
    torch.testing.assert_close(step.info["descriptor"], (step.final_obs["state"][:, 2:3] + 4) / 8)


def test_a_nan_action_is_refused() -> None:
    check_refuses_actions_that_are_no_numbers("arm")
