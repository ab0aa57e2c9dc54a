"""Tests that the embodiment of a MuJoCo task, driven by messages, matches the simulator."""

from copy import copy

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy_robots.messages import JointState, PoseStamped, Time
from robopolicy_robots.mujoco_topics import MujocoTopics
from robopolicy_robots.task_embodiment import TaskEmbodiment
from robopolicy_robots.transports.base import Received
from robopolicy_tasks.manipulation.drawer import Drawer
from robopolicy_tasks.manipulation.experts import DrawerExpert, LiftExpert, PickPlaceExpert
from robopolicy_tasks.manipulation.lift import Lift
from robopolicy_tasks.manipulation.panda_task import PandaTask
from robopolicy_tasks.manipulation.pick_place import PickPlace


def received(messages):
    return {key: Received(message, 0.0, None, "robot", 1) for key, message in messages.items()}


def measured(sim: MujocoSim, wiring: MujocoTopics):
    state = sim.state()
    return received(wiring.messages(state.qpos[0], state.qvel[0], Time(1, 0)))


def started():
    """An embodiment of lift that has started, and the state that it was given."""
    embodiment = TaskEmbodiment(Lift(), "panda_")
    sim = MujocoSim(embodiment.task, 1)
    sim.reset(0)
    state = measured(sim, embodiment.topics)
    embodiment.start(state)
    return embodiment, state


@pytest.mark.parametrize(("kind", "expert"), [(Lift, LiftExpert), (PickPlace, PickPlaceExpert), (Drawer, DrawerExpert)])
def test_messages_give_the_observations_and_commands_of_the_simulator(kind: type[PandaTask], expert):
    sim, demonstrator = MujocoSim(kind(), 1), expert()
    embodiment = TaskEmbodiment(kind(), prefix="panda_")
    obs, success, steps = sim.reset(7), False, 0
    embodiment.start(measured(sim, embodiment.topics))
    while True:
        state = measured(sim, embodiment.topics)
        seen = embodiment.observe(state)
        assert seen.keys() == obs.keys()
        for key, value in seen.items():
            np.testing.assert_array_equal(value, obs[key][0].numpy())
        action = demonstrator(sim, obs)
        targets = embodiment.command(action[0].numpy(), state)
        step = sim.step(action)
        np.testing.assert_array_equal(targets, sim.engine._control[0, 0, embodiment.topics.actuators])
        obs, steps = step.obs, steps + 1
        if bool(step.done[0]):
            success = bool(step.info["success"][0])
            break
    assert success and steps > 10


def test_joints_are_found_by_name_in_any_order_and_among_extra_joints():
    embodiment = TaskEmbodiment(Lift(), "panda_")
    sim = MujocoSim(embodiment.task, 1)
    sim.reset(3)
    state = measured(sim, embodiment.topics)
    joints = state["joints"].message
    order = np.random.default_rng(0).permutation(len(joints.name))
    shuffled = JointState(
        joints.header,
        (*(joints.name[i] for i in order), "camera_tilt"),
        np.append(joints.position[order], 9.0),
        np.append(joints.velocity[order], 9.0),
    )
    embodiment.start(state)
    wanted = embodiment.observe(state)["state"]
    found = embodiment.observe({**state, **received({"joints": shuffled})})["state"]
    np.testing.assert_array_equal(found, wanted)


def test_missing_sources_and_joints_are_named():
    embodiment = TaskEmbodiment(Lift(), "panda_")
    sim = MujocoSim(embodiment.task, 1)
    sim.reset(0)
    state = measured(sim, embodiment.topics)
    with pytest.raises(UserError, match=r"object\.cube"):
        embodiment.start({"joints": state["joints"]})
    joints = state["joints"].message
    fewer = JointState(joints.header, joints.name[:-1], joints.position[:-1], joints.velocity[:-1])
    with pytest.raises(UserError, match="panda_finger_joint2"):
        embodiment.start({**state, **received({"joints": fewer})})


def test_a_bad_action_is_refused_and_changes_nothing():
    embodiment, state = started()
    before = embodiment.observe(state)["state"]
    for action in (np.array([0, 0, np.nan, 0, 0]), np.zeros(4)):
        with pytest.raises(UserError, match="finite"):
            embodiment.command(action, state)
    np.testing.assert_array_equal(embodiment.observe(state)["state"], before)
    targets = embodiment.command(np.zeros(5), state)
    np.testing.assert_allclose(targets[:7], state["joints"].message.position[:7], atol=0.1)


def test_commands_of_a_copy_do_not_change_the_original():
    embodiment, state = started()
    before, ahead = embodiment.observe(state)["state"], copy(embodiment)
    action = np.array([1.0, 1, 1, 1, -1])
    targets = [ahead.command(action, state) for _ in range(3)]
    np.testing.assert_array_equal(embodiment.observe(state)["state"], before)
    np.testing.assert_array_equal(embodiment.command(action, state), targets[0])


def test_targets_are_named_like_the_joints_of_the_robot():
    embodiment = TaskEmbodiment(Lift(), "panda_")
    assert embodiment.joints == (*(f"panda_joint{i}" for i in range(1, 8)), "panda_finger_joint1")
    assert embodiment.control_dt == pytest.approx(0.05)
    assert embodiment.sources == {"joints": JointState, "object.cube": PoseStamped}


def test_actions_are_clipped_to_the_bounds():
    embodiments = [TaskEmbodiment(Lift(), "panda_") for _ in range(2)]
    sim = MujocoSim(Lift(), 1)
    sim.reset(0)
    state = measured(sim, embodiments[0].topics)
    for embodiment in embodiments:
        embodiment.start(state)
    wild = embodiments[0].command(torch.full((5,), 7.0).numpy(), state)
    np.testing.assert_array_equal(wild, embodiments[1].command(np.ones(5), state))
