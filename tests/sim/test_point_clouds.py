"""Tests of point clouds from depth: hand-computed geometry and the observation contract."""

from typing import Literal

import numpy as np
import pytest
import torch
from slider import Slider

from robopolicy.errors import UserError
from robopolicy.sim import gl
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.point_cloud import crop, subsample, unproject


def test_unprojected_pixels_match_hand_computed_points() -> None:
    """A camera at height 3 looks down at the plane z = 1 with a field of view of 90 degrees: the image spans 4 m."""
    rotation = np.eye(3)  # right = x, up = y, backwards = z
    points = unproject(np.full((4, 8), 2.0), 90.0, np.array([10.0, 0.0, 3.0]), rotation)
    assert points.shape == (32, 3)
    np.testing.assert_allclose(points[:, 2], 1.0)
    np.testing.assert_allclose(points[0], [10.0 - 3.5, 1.5, 1.0])  # the first pixel is the upper left one
    np.testing.assert_allclose(points[-1], [10.0 + 3.5, -1.5, 1.0])


def test_pixels_without_depth_produce_no_point() -> None:
    depth = np.array([[1.0, np.inf], [np.inf, 2.0]])
    points = unproject(depth, 60.0, np.zeros(3), np.eye(3))
    assert points[:, 2].tolist() == [-1.0, -2.0]


def test_points_outside_the_box_are_removed() -> None:
    points = np.array([[0, 0, 0], [0, 0, 2], [-1.5, 0, 0]], np.float32)
    assert crop(points, (-np.ones(3), np.ones(3))).tolist() == [[0, 0, 0]]


def test_farthest_points_cover_a_small_object_next_to_a_large_one() -> None:
    rng = np.random.default_rng(0)
    table = np.c_[rng.uniform(0, 1, (900, 2)), np.zeros(900)]
    cube = np.array([0.5, 0.5, 0.5]) + rng.uniform(-0.02, 0.02, (20, 3))
    chosen = subsample(np.concatenate([table, cube]).astype(np.float32), 16)
    assert (chosen[:, 2] > 0.4).sum() == 1
    assert np.array_equal(chosen, subsample(np.concatenate([table, cube]).astype(np.float32), 16))
    line = np.c_[np.arange(11), np.zeros(11), np.zeros(11)].astype(np.float32)
    assert subsample(line, 3)[:, 0].tolist() == [0.0, 10.0, 5.0]


def test_few_points_are_repeated_and_empty_clouds_become_zeros() -> None:
    two = np.array([[1, 0, 0], [2, 0, 0]], np.float32)
    assert subsample(two, 5)[:, 0].tolist() == [1, 2, 1, 2, 1]
    assert subsample(two[:0], 2).tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.fixture
def needs_gl() -> None:
    try:
        gl.gl_backend()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("needs_gl")
@pytest.mark.parametrize("engine", ["rollout", "exact"])
def test_point_clouds_satisfy_the_contract(engine: Literal["rollout", "exact"]) -> None:
    def make(num_envs: int) -> MujocoSim:
        return MujocoSim(Slider(0.2), num_envs, engine=engine, point_clouds=("side",), points=16)

    assert check_simulator(make(3), make) == []


@pytest.mark.usefixtures("needs_gl")
def test_cloud_matches_the_front_face_of_the_box_and_moves_with_it() -> None:
    """A camera 6 m in front of the box sees its front face, the square |x - q| <= 0.5, |z| <= 0.5 at y = -0.5."""
    sim = MujocoSim(Slider(), 1, cameras=("side",), point_clouds=("side",), points=64)
    cloud = sim.reset(0)["point_cloud.side"][0].numpy()
    assert sim.spec.observation["point_cloud.side"].shape == cloud.shape == (64, 3)
    np.testing.assert_allclose(cloud[:, 1], -0.5, atol=2e-3)
    assert 0.4 < np.abs(cloud[:, [0, 2]]).max() < 0.5 + 1e-3
    step = sim.step(torch.tensor([[1.0]]))  # x = 1
    moved = step.obs["point_cloud.side"][0].numpy()
    front = moved[moved[:, 1] < -0.49]
    assert 0.5 - 1e-3 < front[:, 0].min() < 0.6 and 1.4 < front[:, 0].max() < 1.5 + 1e-3


@pytest.mark.usefixtures("needs_gl")
def test_final_cloud_shows_the_end_of_the_episode() -> None:
    sim = MujocoSim(Slider(), 2, point_clouds=("side",), points=32)
    first = sim.reset(0)["point_cloud.side"]
    for _ in range(3):
        step = sim.step(torch.tensor([[1.0], [0.0]]))
    assert step.done.tolist() == [True, False]
    assert torch.equal(step.obs["point_cloud.side"], first)
    assert torch.equal(step.final_obs["point_cloud.side"][1], first[1])
    assert not bool(step.final_obs["point_cloud.side"][0].any())  # the box has left the view


def test_an_unknown_camera_is_refused() -> None:
    with pytest.raises(UserError, match="nowhere"):
        MujocoSim(Slider(), 1, point_clouds=("nowhere",))
