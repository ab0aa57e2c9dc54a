import subprocess
import sys

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy_tasks.manipulation import kinematics
from robopolicy_tasks.manipulation.lift import Lift
from robopolicy_tasks.manipulation.scene import ASSETS

TASKS = ("manipulation/lift", "manipulation/pick_place", "manipulation/drawer")


def open_sim(name: str, num_envs: int, backend: str = "auto", reward: str = "sparse") -> MujocoSim:
    sim = make_sim(name, SimOptions(num_envs=num_envs, backend=backend, reward=reward, threads=1))
    assert isinstance(sim, MujocoSim)
    return sim


def expert_successes(name: str, sim: MujocoSim) -> torch.Tensor:
    make_expert = get_task(name).make_expert
    assert make_expert is not None
    expert = make_expert()
    success, active = torch.zeros(sim.num_envs, dtype=torch.bool), torch.ones(sim.num_envs, dtype=torch.bool)
    while active.any():
        step = sim.step(expert(sim, {}), active)
        success |= step.info["success"]
        active &= ~step.done
    return success


def grasped_cube(num_envs: int) -> MujocoSim:
    """Returns lift with the cube in the gripper, well above the table."""
    task = Lift()
    task.hold_steps = task.max_episode_steps = 10_000
    sim = MujocoSim(task, num_envs, threads=1)
    sim.reset(0)
    make_expert = get_task("lift").make_expert
    assert make_expert is not None
    expert = make_expert()
    for _ in range(35):
        sim.step(expert(sim, {}))
    return sim


def test_registering_the_family_imports_no_simulator():
    code = "import sys, robopolicy_tasks; robopolicy_tasks.register_tasks(); print('mujoco' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("name", TASKS)
def test_task_satisfies_the_simulator_contract(name: str):
    sim = open_sim(name, 3)
    spec = sim.spec.observation["state"]
    assert len(spec.names) == spec.shape[0] == len(set(spec.names))
    assert check_simulator(sim, lambda count: open_sim(name, count)) == []


@pytest.mark.parametrize("name", TASKS)
def test_the_expert_succeeds_in_95_percent_of_200_seeds(name: str):
    sim = open_sim(name, 200)
    sim.reset(500)
    assert expert_successes(name, sim).float().mean() >= 0.95


def test_the_expert_succeeds_with_the_exact_engine_too():
    sim = open_sim("pick_place", 8, backend="mujoco-exact")
    sim.reset(500)
    assert expert_successes("pick_place", sim).all()


def test_an_episode_of_the_expert_does_not_depend_on_the_number_of_environments():
    make_expert = get_task("lift").make_expert
    assert make_expert is not None
    finals = []
    for count in (1, 5):
        sim, expert = open_sim("lift", count), make_expert()
        sim.reset(40)
        for _ in range(14):
            step = sim.step(expert(sim, {}))
        finals.append(step.obs["state"][0])
    assert torch.equal(*finals)


@pytest.mark.parametrize("name", TASKS)
def test_random_actions_never_break_the_physics(name: str):
    sim = open_sim(name, 40)
    sim.reset(0)
    generator = torch.Generator().manual_seed(0)
    action = torch.zeros(40, 5)
    for _ in range(60):
        action = 0.8 * action + 0.6 * torch.randn(40, 5, generator=generator)  # slow noise reaches the table's edges
        step = sim.step(action)
        assert step.obs["state"].isfinite().all()
        assert not step.info["diverged"].any()


def test_the_gripper_holds_the_cube_while_it_moves_sideways_at_full_speed():
    sim = grasped_cube(6)
    task = sim.task
    assert isinstance(task, Lift)
    assert task.held(task.arm(sim.state()), sim.state()).all()
    for k in range(40):
        sideways = 1.0 if (k // 5) % 2 else -1.0
        sim.step(torch.tensor([0.0, sideways, 0.0, 0.0, 1.0]).expand(6, 5))
    assert task.held(task.arm(sim.state()), sim.state()).all()


def test_the_cube_falls_when_the_gripper_opens():
    sim = grasped_cube(2)
    for _ in range(20):
        sim.step(torch.tensor([0.0, 0.0, 0.0, 0.0, -1.0]).expand(2, 5))
    task = sim.task
    assert isinstance(task, Lift)
    np.testing.assert_allclose(task.cube(sim.state())[0][:, 2], 0.02, atol=2e-3)


def test_joint_targets_respect_position_and_velocity_limits():
    sim = open_sim("lift", 8)
    sim.reset(3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(25):
        before = np.array(sim.state().memory["joints"], dtype=np.float64)
        sim.step(torch.rand(8, 5, generator=generator).round() * 2 - 1)
        after = np.array(sim.state().memory["joints"], dtype=np.float64)
        assert (np.abs(after - before) <= kinematics.JOINT_VELOCITY * sim.spec.control_dt + 1e-9).all()
        assert ((after >= kinematics.JOINT_LOW) & (after <= kinematics.JOINT_HIGH)).all()


@pytest.mark.parametrize("name", TASKS)
def test_shaped_reward_is_success_plus_a_change_of_progress(name: str):
    sim = open_sim(name, 4, reward="shaped")
    sim.reset(9)
    task, make_expert = sim.task, get_task(name).make_expert
    assert make_expert is not None
    expert, total = make_expert(), torch.zeros(4)
    start = task.shaping_potential(task.arm(sim.state()), sim.state())  # type: ignore[attr-defined]
    for _ in range(10):
        step = sim.step(expert(sim, {}))
        total += step.reward
    assert not step.done.any()
    end = task.shaping_potential(task.arm(sim.state()), sim.state())  # type: ignore[attr-defined]
    np.testing.assert_allclose(total.numpy(), end - start, atol=1e-5)
    assert ((end >= 0) & (end <= 1)).all()


def test_user_mesh_model_replaces_the_bundled_model(tmp_path, monkeypatch):
    folder = tmp_path / "franka_emika_panda"
    folder.mkdir()
    user_xml = (ASSETS / "panda.xml").read_text().replace("0.93 0.94 0.95 1", "1 0 0 1").replace("-4500", "-1")
    (folder / "panda.xml").write_text(user_xml)
    monkeypatch.setenv("MENAGERIE_ROOT", str(tmp_path))
    mesh = Lift().model
    monkeypatch.delenv("MENAGERIE_ROOT")
    np.testing.assert_allclose(mesh.material("panda_shell").rgba, [1, 0, 0, 1])
    np.testing.assert_allclose(mesh.actuator_biasprm, Lift().model.actuator_biasprm)  # the bundled servo tuning stays


def test_a_menagerie_without_the_panda_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MENAGERIE_ROOT", str(tmp_path))
    with pytest.raises(UserError, match=r"has no franka_emika_panda/panda\.xml"):
        Lift()


def test_an_unknown_reward_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="sparse"):
        make_sim("lift", SimOptions(reward="dense"))


def test_both_cameras_see_the_cube():
    sim = make_sim("lift", SimOptions(num_envs=1, cameras=("front", "wrist"), image_size=64))
    try:
        obs = sim.reset(1)
    except UserError as error:
        pytest.skip(str(error))
    for camera in ("front", "wrist"):
        red, _, blue = obs[f"image.{camera}"][0].int()
        assert ((red - blue) > 120).sum() >= 4  # only the cube is orange
    sim.close()
