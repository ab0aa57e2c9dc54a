"""Tests of relative end-effector poses: composition by hand, exact inverse, agreement with UMI, and export."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.evaluation.action_error import action_error
from robopolicy.nets.rotations import SIZES, from_matrix, to_matrix
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.nested import describe
from robopolicy.policies.wrappers.relative_actions import (
    ActionRepresentation,
    RelativeActionConfig,
    RelativeActionPolicy,
)
from robopolicy.policies.wrappers.relative_poses import PoseEntries
from robopolicy.training.checkpoint import load_policy

SETTINGS = ["task=none", "algorithm=bc", "policy=gaussian", "policy.hidden=[64]", "chunk.horizon=4"]
NAMES = ("x", "y", "z", "rx", "ry", "rz", "gripper")
POSE = "task.poses=[{position: [x, y, z], rotation: [rx, ry, rz]}]"


def pose_of(kind: str, state_kind: str = "") -> PoseEntries:
    """Pose in the first entries, with the rotation behind the position."""
    state_kind = state_kind or kind
    entries = [tuple(range(3, 3 + SIZES[each])) for each in (kind, state_kind)]
    return PoseEntries((0, 1, 2), entries[0], kind, (0, 1, 2), entries[1], state_kind)


def random_pose(*shape: int, kind: str, seed: int) -> torch.Tensor:
    """Poses `(*shape, 3 + n)`."""
    rotations = Rotation.from_quat(np.random.default_rng(seed).normal(size=(math.prod(shape), 4)))
    matrix = torch.from_numpy(rotations.as_matrix()).reshape(*shape, 3, 3)
    positions = torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([positions, from_matrix(matrix, kind)], -1)


def test_a_target_in_front_of_a_turned_hand_is_as_by_hand() -> None:
    """The hand at (1, 2, 3) is turned by a quarter about z, so that its x axis is the y axis of the base."""
    quarter = math.pi / 2
    state = torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.0, quarter]])
    chunk = torch.tensor([[[1.0, 2.5, 3.1, 0.0, 0.0, quarter], [1.0, 2.0, 3.0, 0.0, 0.0, 2 * quarter]]])
    positions, rotations = pose_of("axis_angle").encode(state, chunk)
    torch.testing.assert_close(positions, torch.tensor([[[0.5, 0.0, 0.1], [0.0, 0.0, 0.0]]]))
    expected = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, -1.0, 0.0, 0.0]]])
    torch.testing.assert_close(rotations, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("state_kind", ["axis_angle", "quaternion_xyzw"])
def test_decoding_inverts_encoding(kind: str, state_kind: str) -> None:
    """A gripper stays absolute, and another entry is an ordinary difference."""
    size = 3 + SIZES[kind]
    representation = ActionRepresentation("relative", "state", (size,), (0,), (pose_of(kind, state_kind),))
    state = random_pose(8, 2, kind=state_kind, seed=0)
    chunk = torch.cat([random_pose(8, 5, kind=kind, seed=1), torch.randn(8, 5, 2).double()], -1)
    encoded = representation.encode({"state": state}, chunk)
    assert encoded.shape == (8, 5, representation.encoded_dim(size + 2)) == (8, 5, 11)
    assert torch.equal(encoded[..., 4], chunk[..., -1])  # the gripper
    decoded = representation.decode({"state": state}, encoded)
    rotations = [to_matrix(each[..., 3:size], kind) for each in (decoded, chunk)]
    torch.testing.assert_close(rotations[0], rotations[1], atol=1e-12, rtol=0)
    others = [*range(3), size, size + 1]
    torch.testing.assert_close(decoded[..., others], chunk[..., others], atol=1e-12, rtol=0)
    again = representation.decode({"state": state}, representation.encode({"state": state}, decoded))
    torch.testing.assert_close(again, decoded, atol=1e-12, rtol=0)  # now with the nearest of equal rotations


def test_targets_beyond_half_a_turn_and_of_either_sign_return_without_jumps() -> None:
    """The hand is turned by 3.1 rad and goes on to 3.3 rad, as an axis-angle vector and as a negative quaternion."""

    def stored(angles: list[float], kind: str, sign: int) -> torch.Tensor:
        half = torch.tensor(angles) / 2
        turned = [0 * half, 0 * half, *([2 * half] if kind == "axis_angle" else [half.sin(), half.cos()])]
        return torch.cat([torch.zeros(1, len(angles), 3), sign * torch.stack(turned, -1)[None]], -1)

    for kind, sign in (("axis_angle", 1), ("quaternion_xyzw", -1)):
        representation = ActionRepresentation("relative", "state", poses=(pose_of(kind),))
        obs, chunk = {"state": stored([3.1], kind, sign)}, stored([3.12, 3.2, 3.3], kind, sign)
        torch.testing.assert_close(representation.decode(obs, representation.encode(obs, chunk)), chunk)


def test_errors_on_recorded_actions_compare_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded actions go beyond half a turn, where their vector changes its sign; 0.01 rad are wrong."""
    angles = np.array([3.0, 3.1, 3.2, 3.3], np.float32)
    state = np.zeros((4, 6), np.float32)
    state[:, 3], action = angles - 0.1, state.copy()
    action[:, 3] = np.where(angles > math.pi, angles - 2 * math.pi, angles)
    spec = PolicySpec({"state": (6,)}, action_dim=6)
    inner = GaussianPolicy(GaussianConfig(hidden=(4,)), replace(spec, action_dim=9))
    representation = ActionRepresentation("relative", "state", poses=(pose_of("axis_angle"),))
    policy = RelativeActionPolicy(RelativeActionConfig(describe(inner), representation), spec)
    turn = torch.tensor([0, 0, 0, 0.11, 0, 0])
    monkeypatch.setattr(policy, "act", lambda obs, **_: obs["state"] + turn)
    data = Episodes.from_list([Episode({"state": state, "action": action})], 0.1)
    errors = action_error(policy, data).errors[0]
    np.testing.assert_allclose(errors, [0, 0, 0, 0.01, 0, 0], atol=1e-5)


def test_differences_equal_the_relative_poses_of_umi() -> None:
    """UMI multiplies the inverse of the homogeneous matrix of the measured pose by the matrix of the target."""

    def homogeneous(pose: torch.Tensor) -> np.ndarray:
        found = np.eye(4)
        found[:3, :3], found[:3, 3] = Rotation.from_rotvec(pose[3:].numpy()).as_matrix(), pose[:3]
        return found

    state, chunk = random_pose(1, kind="axis_angle", seed=2), random_pose(1, 6, kind="axis_angle", seed=3)
    positions, rotations = pose_of("axis_angle").encode(state, chunk)
    for step in range(6):
        expected = np.linalg.inv(homogeneous(state[0])) @ homogeneous(chunk[0, step])
        np.testing.assert_allclose(positions[0, step], expected[:3, 3], atol=1e-12)
        np.testing.assert_allclose(rotations[0, step], [*expected[:3, 0], *expected[:3, 1]], atol=1e-12)


def record(path: Path, *, named: bool = True) -> Path:
    """Demonstrations of a hand that moves forward along its own x axis and turns about its own z axis."""
    rng, step = np.random.default_rng(0), Rotation.from_rotvec([0.0, 0.0, 0.05])

    def one() -> Episode:
        rotation, position = Rotation.from_quat(rng.normal(size=4)), rng.normal(size=3)
        rows: list[np.ndarray] = []
        for _ in range(16):
            rows.append(np.concatenate([position, rotation.as_rotvec(), [0.5]]))
            position, rotation = position + rotation.apply([0.02, 0.0, 0.0]), rotation * step
        states = np.array(rows, np.float32)
        return Episode({"state": states[:-1], "action": states[1:]}, "advance")

    names = {"state": NAMES, "action": NAMES} if named else {}
    write_lerobot(Episodes.from_list([one() for _ in range(12)], 0.1, names), path, video=False)
    return path


def test_a_policy_of_poses_without_names_drives_no_joints(tmp_path: Path, refused) -> None:
    """A robot with as many joints as entries refuses it, since the checkpoint names the entries of the pose."""
    pytest.importorskip("robopolicy_robots")
    data = record(tmp_path / "data", named=False)
    numbers = "task.poses=[{position: [0, 1, 2], rotation: [3, 4, 5]}]"
    settings = [*SETTINGS, f"dataset={data}", "task.action_representation=relative", numbers, "budget.updates=1"]
    assert main(["train", *settings, "evaluation.episodes=0", f"out={tmp_path}", "name=run"]) == 0
    last = tmp_path / "run" / "checkpoints" / "last"
    expected = ("x [m]", "y [m]", "z [m]", "axis_angle 0", "axis_angle 1", "axis_angle 2", "entry 6")
    assert load_policy(last)[1].task_metadata.action_names == expected  # type: ignore[union-attr]
    line = refused("deploy", "--robot", "franka_panda", "--policy", last, "--task", "none", "--check")
    assert "The actions of the policy are x, y, z, axis_angle 0" in line


def test_a_policy_of_poses_trains_and_exports(tmp_path: Path) -> None:
    """The motion is the same in every frame of the hand, so that few updates learn it anywhere; the graph agrees."""
    pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")
    pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
    from robopolicy.deploy.bundle import open_bundle

    data = record(tmp_path / "data")
    settings = [*SETTINGS, f"dataset={data}", "task.action_representation=relative", POSE]
    settings += ["task.absolute_entries=[gripper]", "algorithm.lr=3e-3", "budget.updates=150"]
    assert main(["train", *settings, "evaluation.episodes=0", f"out={tmp_path}", "name=run"]) == 0
    last = tmp_path / "run" / "checkpoints" / "last"
    loaded, manifest = load_policy(last)
    assert manifest.config["representation"]["poses"][0]["rotation"] == [3, 4, 5]
    assert loaded.spec.action_dim == 7 and loaded.base.spec.action_dim == 10  # type: ignore[union-attr]
    assert main(["export", str(last), "--out", str(tmp_path / "bundle")]) == 0
    bundle = open_bundle(tmp_path / "bundle")
    state = np.array([[0.3, -0.5, 0.2, 1.2, -0.4, 0.7, 0.5]], np.float32)
    chunk = bundle.chunk({"state": state})
    turned = Rotation.from_rotvec(state[0, 3:6])
    assert np.abs(chunk[0, :3] - (state[0, :3] + turned.apply([0.02, 0.0, 0.0]))).max() < 0.02
    angle = (turned.inv() * Rotation.from_rotvec(chunk[0, 3:6])).as_rotvec()
    assert np.abs(angle - [0.0, 0.0, 0.05]).max() < 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([POSE, "task.action_representation=delta"], "set task.action_representation=relative"),
        ([POSE.replace("rz", "rw")], "Unknown entry 'rw' in 'rotation' of task.poses"),
        ([POSE.replace(", rz", "")], "'rotation' of task.poses needs 3 entries, found rx, ry"),
        ([POSE.replace("rx, ry, rz", "rx, ry, z")], "Entry 2 of the action is in task.poses twice"),
        ([POSE.replace("}", ", rotation_type: euler}")], "Unknown type of rotations 'euler' in task.poses"),
        (["task.poses=[{position: [0, 1, 2], rotation: [3, 4, 5, 6], rotation_type: quaternion_xyzw}]"],
         "Entries 3, 4, 5, 6 of 'state' are no rotations of type quaternion_xyzw"),
        (["task.poses=[hand]"], "must be a pose"),
    ],
)  # fmt: skip
def test_poses_that_do_not_fit_are_refused(settings, message, tmp_path, refused) -> None:
    data = record(tmp_path / "data")
    words = [*SETTINGS, f"dataset={data}", "budget.updates=1", "task.action_representation=relative", *settings]
    words = list({word.partition("=")[0]: word for word in words}.values())
    line = refused("train", *words, f"out={tmp_path}/runs")
    assert message in line and not (tmp_path / "runs").exists()
