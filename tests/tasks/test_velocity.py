"""Tests of the Go1 with velocity commands: contract, readings against MuJoCo, rewards by hand, model edits."""

from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch

from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import ResetState
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy_tasks.velocity import rewards
from robopolicy_tasks.velocity.go1 import HOME, MAX_MEAN_ERROR, Go1
from robopolicy_tasks.velocity.motion import BaseMotion, matrix, read
from robopolicy_tasks.velocity.randomization import NOMINAL, TRAINING, Randomization
from robopolicy_tasks.velocity.rewards import ControlStep
from robopolicy_tasks.velocity.scene import FEET


def open_sim(ranges: Randomization = NOMINAL, num_envs: int = 2, reward: str = "sparse", command=(0.0, 0.0, 0.0)):
    task = Go1("velocity/test", reward, ranges, commands=np.tile(np.array(command, float), (4, 1)))
    sim = MujocoSim(task, num_envs, threads=1)
    sim.reset(0)
    return sim


def stand(sim: MujocoSim, steps: int):
    for _ in range(steps):
        step = sim.step(torch.zeros(sim.num_envs, 12))
    return step


def control_step(**values) -> ControlStep:
    """Returns a robot at its home pose with a command to stand."""
    motion = BaseMotion(
        velocity=np.zeros((1, 3)), turning=np.zeros((1, 3)), gravity=np.array([[0.0, 0.0, -1.0]]),
        height=np.array([0.29]), joints=HOME[None], speeds=np.zeros((1, 12)), contact=np.ones((1, 4), bool),
        foot_height=np.full((1, 4), 0.023), foot_speed=np.zeros((1, 4)),
    )  # fmt: skip
    of_motion = {name: np.asarray(values.pop(name)) for name in list(values) if name in BaseMotion._fields}
    rest = {
        "command": np.zeros((1, 3)), "action": np.zeros((1, 12)), "last_action": np.zeros((1, 12)),
        "torque": np.zeros((1, 12)), "air_time": np.zeros((1, 4)), "offset": np.zeros((1, 12)),
    }  # fmt: skip
    return ControlStep(motion._replace(**of_motion), **(rest | {k: np.asarray(v) for k, v in values.items()}))


@pytest.mark.parametrize("name", ["velocity/go1", "velocity/go1_randomized"])
def test_task_satisfies_the_simulator_contract(name: str):
    sim = make_sim(name, SimOptions(num_envs=3, threads=1, reward="shaped"))
    for spec in sim.spec.observation.values():
        assert len(spec.names) == spec.shape[0] == len(set(spec.names))
    assert check_simulator(sim) == []


def test_rotations_and_readings_match_mujoco():
    sim = open_sim()
    task, rng = sim.task, np.random.default_rng(0)
    data = mujoco.MjData(task.model)
    data.qpos[:] = np.concatenate([[0, 0, 1], rng.normal(size=4), HOME])
    data.qpos[3:7] /= np.linalg.norm(data.qpos[3:7])
    data.qvel[:] = rng.normal(size=18)
    mujoco.mj_forward(task.model, data)
    np.testing.assert_allclose(matrix(data.qpos[None, 3:7])[0], data.body("trunk").xmat.reshape(3, 3), atol=1e-12)
    local = np.zeros(6)
    mujoco.mj_objectVelocity(task.model, data, mujoco.mjtObj.mjOBJ_XBODY, data.body("trunk").id, local, 1)
    sim.engine.states[0, 1:38] = np.concatenate([data.qpos, data.qvel])
    motion = read(sim.state())
    np.testing.assert_allclose(motion.turning[0], local[:3], atol=1e-12)
    np.testing.assert_allclose(motion.velocity[0], local[3:], atol=1e-12)


def test_robot_at_home_stands_on_four_feet_and_succeeds():
    sim = open_sim()
    step = stand(sim, 999)
    assert not step.done.any()
    motion = read(sim.state())
    assert motion.contact.all()
    weight = sum(sim.state().sensor(f"{foot}_touch")[:, 0] for foot in FEET)
    np.testing.assert_allclose(weight, 9.81 * sim.task.model.body("trunk").subtreemass[0], rtol=0.02)
    step = stand(sim, 1)
    assert step.truncated.all() and step.info["success"].all()


def test_standing_is_no_success_when_the_command_is_to_walk():
    step = stand(open_sim(command=(2 * MAX_MEAN_ERROR, 0, 0)), 1000)
    assert step.truncated.all() and not step.info["success"].any()


def test_robot_on_its_side_terminates_with_a_penalty():
    sim = open_sim(reward="shaped")
    sim.engine.states[0, 4:8] = np.sqrt(0.5), np.sqrt(0.5), 0, 0
    step = stand(sim, 1)
    assert step.terminated.tolist() == [True, False]
    assert float(step.reward[0]) < rewards.TERMINATION_PENALTY + 0.05


def test_tracking_reward_is_1_5_per_second_at_the_command_and_decreases_with_error():
    wanted = {"command": [[0.5, -0.2, 0.4]], "velocity": [[0.5, -0.2, 0.1]], "turning": [[0.0, 0.0, 0.4]]}
    assert rewards.total(rewards.TRACKING, control_step(**wanted)) == pytest.approx(1.5)
    off = rewards.total(rewards.TRACKING, control_step(**wanted | {"velocity": [[0.0, -0.2, 0.1]]}))
    assert off == pytest.approx(np.exp(-1) + 0.5)


def test_style_terms_match_hand_computed_values():
    assert rewards.total(rewards.STYLE, control_step()) == 0
    assert rewards.flat_orientation_l2(control_step(gravity=[[0.6, 0.0, -0.8]])) == pytest.approx(0.36)
    torque, speeds = np.full((1, 12), 2.0), np.full((1, 12), -0.5)
    assert rewards.power(control_step(torque=torque, speeds=speeds)) == pytest.approx(12.0)
    landed = {"air_time": [[0.3, 0.0, 0.9, 0.05]], "contact": [[True, True, True, False]], "command": [[1.0, 0, 0]]}
    assert rewards.feet_air_time(control_step(**landed)) == pytest.approx((0.3 - 0.12) + (0.4 - 0.12))
    assert rewards.feet_air_time(control_step(**landed | {"command": [[0.0, 0, 0]]})) == 0
    offset = np.zeros((1, 12))
    offset[0, :2] = 0.2, -0.1  # a hip and a thigh
    assert rewards.joint_deviation_l2(control_step(offset=offset)) == pytest.approx(0.04 + 0.001)
    assert rewards.stand_still(control_step(offset=offset)) == pytest.approx(0.3)


def test_commands_and_last_actions_are_observed():
    sim = open_sim(command=(0.3, -0.1, 0.7))
    action = torch.linspace(-0.1, 0.1, 12).expand(2, -1)
    state = sim.step(action).obs["state"]
    assert torch.allclose(state[:, -15:-3], action)
    assert torch.allclose(state[0, -3:], torch.tensor([0.3, -0.1, 0.7]))


def test_air_time_counts_the_time_of_feet_in_the_air():
    sim = open_sim()
    sim.engine.states[:, 3] = 0.6  # [m]; falls for a while
    stand(sim, 6)
    assert np.allclose(sim.state().memory["air_time"], 5 * sim.task.dt, atol=sim.task.dt + 1e-9)


@pytest.mark.parametrize("backend", ["mujoco", "mujoco-exact"])
def test_every_episode_has_its_own_friction_and_payload_even_after_resume(backend: str):
    sim = make_sim("velocity/go1_randomized", SimOptions(num_envs=3, backend=backend, threads=1))
    sim.reset(0)
    masses = [model.body_mass.sum() for model in sim.engine.models]
    assert len(set(masses)) == 3 and all(11.0 < mass < 16.0 for mass in masses)
    assert len({model.geom("FR").friction[0] for model in sim.engine.models}) == 3
    twin = make_sim("velocity/go1_randomized", SimOptions(num_envs=3, backend=backend, threads=1))
    for _ in range(5):
        sim.step(torch.zeros(3, 12))
    twin.reset(99)
    twin.load_state_dict(sim.state_dict())
    for _ in range(5):
        left, right = sim.step(torch.zeros(3, 12)), twin.step(torch.zeros(3, 12))
        assert torch.equal(left.obs["state"], right.obs["state"])


def test_nominal_robots_share_one_model():
    sim = open_sim(num_envs=3)
    assert not sim.engine.edits and len({id(model) for model in sim.engine.models}) == 1


def test_payload_adds_weight_on_the_feet_and_push_moves_the_robot():
    heavy = open_sim(Randomization(payload=(3.0, 3.0)))
    stand(heavy, 200)
    weight = sum(heavy.state().sensor(f"{foot}_touch")[:, 0] for foot in FEET)
    nominal = heavy.task.model.body("trunk").subtreemass[0]
    np.testing.assert_allclose(weight, 9.81 * (nominal + 3.0), rtol=0.03)
    pushed = open_sim(Randomization(push=1.0), num_envs=8)
    fastest = np.zeros(8)
    for _ in range(250):
        stand(pushed, 1)
        fastest = np.maximum(fastest, np.linalg.norm(read(pushed.state()).velocity[:, :2], axis=1))
    force = np.linalg.norm(pushed.state().memory["push"][:, 0], axis=1)
    assert np.corrcoef(force, fastest)[0, 1] > 0.8 and fastest.max() > 0.3


def test_sensor_noise_is_bounded_and_repeats_with_the_seed():
    noisy = Randomization(noise=1.0)
    clean, first, second = (open_sim(ranges) for ranges in (NOMINAL, noisy, noisy))
    seen = [stand(sim, 3).obs["state"] for sim in (clean, first, second)]
    assert torch.equal(seen[1], seen[2])
    error = (seen[1] - seen[0]).abs()
    assert 0 < float(error[:, :3].max()) <= 0.2 and float(error[:, -15:].max()) == 0


def test_training_ranges_contain_the_nominal_robot():
    for name in ("friction", "payload", "motor_strength"):
        low, high = getattr(TRAINING, name)
        assert low <= getattr(NOMINAL, name)[0] <= high


def symmetric_sim(start: ResetState, command: np.ndarray) -> MujocoSim:
    """Returns the robot without the small asymmetries of its inertias; every episode begins at `start`."""
    task = Go1("velocity/test", "shaped", commands=np.tile(command, (4, 1)))
    uneven = [task.model.body("trunk").id, *(task.model.body(f"{foot}_calf").id for foot in FEET)]
    task.model.body_ipos[uneven, 1] = 0.0
    task.model.body_iquat[uneven] = 1, 0, 0, 0
    start = replace(start, memory=start.memory | {"commands": task.commands})
    task.initial = lambda rng: start  # type: ignore[method-assign]
    return MujocoSim(task, 1, threads=1)


def test_mirrored_robot_follows_the_mirrored_trajectory():
    command = np.array([0.4, -0.3, 0.5])
    start = Go1("velocity/test").initial(np.random.default_rng(0))
    legs = lambda x: Go1.mirror.action(torch.from_numpy(x)).numpy()  # noqa: E731
    qpos = np.concatenate([start.qpos[:7] * [1, -1, 1, 1, -1, 1, -1], HOME + legs(start.qpos[7:] - HOME)])
    qvel = np.concatenate([start.qvel[:6] * [1, -1, 1, -1, 1, -1], legs(start.qvel[6:])])
    sim = symmetric_sim(start, command)
    other = symmetric_sim(replace(start, qpos=qpos, qvel=qvel), command * [1, -1, -1])
    first, image = sim.reset(0), other.reset(0)
    torch.testing.assert_close(Go1.mirror.mirror_obs(first), dict(image), rtol=1e-4, atol=1e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        action = torch.rand(1, 12, generator=generator) - 0.5
        step, mirrored = sim.step(action), other.step(Go1.mirror.action(action))
        torch.testing.assert_close(Go1.mirror.mirror_obs(step.obs), dict(mirrored.obs), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(step.reward, mirrored.reward, rtol=1e-2, atol=1e-3)
