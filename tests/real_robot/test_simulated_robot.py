"""Tests of the simulated robot: the same episodes as the simulator, its time-out, delays and sensor noise."""

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy_robots.messages import JointState, Time
from robopolicy_robots.simulated.robot import SensorNoise, SimulatedRobot
from robopolicy_robots.task_embodiment import TaskEmbodiment
from robopolicy_robots.transports.base import Received
from robopolicy_tasks.manipulation.experts import LiftExpert
from robopolicy_tasks.manipulation.lift import Lift


def received(robot: SimulatedRobot):
    return {key: Received(message, 0.0, None, "robot", 1) for key, message in robot.messages(Time(1, 0)).items()}


@pytest.mark.parametrize("seed", [0, 10_000])
def test_every_step_of_an_episode_equals_the_simulator(seed):
    """The demonstrator's actions give the states and the success of the simulator, bit for bit."""
    sim, expert = MujocoSim(Lift(), 1), LiftExpert()
    robot, embodiment = SimulatedRobot(Lift(), period=0.05), TaskEmbodiment(Lift())
    obs = sim.reset(seed)
    robot.reset(seed)
    embodiment.start(received(robot))
    while not robot.episode.done:
        state = received(robot)
        np.testing.assert_array_equal(embodiment.observe(state)["state"], obs["state"][0].numpy())
        action = expert(sim, obs)
        robot.command(embodiment.joints, embodiment.command(action[0].numpy(), state))
        robot.advance()
        step = sim.step(action)
        obs = step.obs
        assert robot.episode.done == bool(step.done[0])
        assert robot.episode.success == bool(step.info["success"][0])
    assert robot.episode.success


def test_an_episode_ends_at_its_time_limit():
    robot = SimulatedRobot(Lift(), period=0.02, timeout=9.0)
    robot.reset(1)
    for _ in range(10):
        robot.advance()
    assert robot.episode.steps == 0  # the episode clock starts with the first command
    robot.command(("joint1",), np.zeros(1))
    for _ in range(150):
        assert not robot.episode.done
        robot.advance()
    assert robot.episode.done and robot.episode.steps == 60 and not robot.episode.success


def test_without_commands_the_robot_holds_within_its_timeout():
    robot = SimulatedRobot(Lift(), period=0.01, timeout=0.1)
    begin, start = robot.time, robot.messages(Time())["joints"].position[0]
    for step in range(30):  # 2 rad/s
        robot.command(("joint1", "finger_joint1"), np.array([start + 0.02 * step, 0.01]))
        robot.advance()
    while not robot.holding:
        robot.advance()
    assert robot.time - begin == pytest.approx(0.3 - 0.01 + 0.1 + 0.01)  # the last command, the time-out, a period
    held = robot.messages(Time())["joints"].position
    for _ in range(100):
        robot.advance()
    later = robot.messages(Time())["joints"].position
    assert abs(later[0] - held[0]) < 0.02
    assert later[7] == pytest.approx(0.01, abs=2e-3)  # the gripper holds its position
    robot.command(("joint1",), np.array([start]))
    robot.advance()
    assert not robot.holding


def test_commands_reach_the_motors_after_the_delay():
    positions = {}
    for delay in (0.0, 0.03):
        robot = SimulatedRobot(Lift(), period=0.01, sensor_noise=SensorNoise(delay=delay))
        robot.reset(0)
        start = robot.messages(Time())["joints"].position[0]
        robot.command(("joint1",), np.array([start + 0.5]))
        positions[delay] = []
        for _ in range(20):
            robot.advance()
            positions[delay].append(robot.messages(Time())["joints"].position[0] - start)
    assert max(np.abs(positions[0.03][:3])) < 1e-4 < positions[0.0][0]
    np.testing.assert_allclose(positions[0.03][3:], positions[0.0][:17], atol=1e-3)


def test_noise_and_encoders_change_only_the_measurements():
    step = 2e-3
    robot = SimulatedRobot(
        Lift(), sensor_noise=SensorNoise(encoder_step=step, velocity_noise=0.1, pose_noise=0.01, position_noise=1e-3)
    )
    exact = SimulatedRobot(Lift())
    noisy: list[JointState] = [robot.messages(Time())["joints"] for _ in range(400)]
    true = exact.messages(Time())["joints"]
    positions = np.stack([message.position for message in noisy])
    np.testing.assert_allclose(positions / step, np.round(positions / step), atol=1e-9)
    np.testing.assert_allclose(positions.mean(0), true.position, atol=3e-4)
    assert np.std([message.velocity for message in noisy]) == pytest.approx(0.1, rel=0.1)
    cubes = np.array([robot.messages(Time())["object.cube"].pose.position.x for _ in range(400)])
    assert cubes.std() == pytest.approx(0.01, rel=0.15)
    again = SimulatedRobot(Lift(), sensor_noise=robot.sensor_noise)
    np.testing.assert_array_equal(again.messages(Time())["joints"].velocity, noisy[0].velocity)


def test_invalid_commands_and_settings_are_refused():
    robot = SimulatedRobot(Lift())
    for joints, targets in ((("elbow",), [0.0]), (("joint1",), [np.nan]), (("joint1",), [0.0, 1.0])):
        with pytest.raises(UserError, match="Invalid command"):
            robot.command(joints, np.array(targets))
    with pytest.raises(UserError, match="not a multiple"):
        SimulatedRobot(Lift(), period=0.012)
    with pytest.raises(UserError, match="delay"):
        SensorNoise(delay=-1.0)
