"""Tests of cameras on MuJoCo Warp, on the CPU: pictures against OpenGL, point clouds by hand and against numpy."""

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from slider import XML, Slider
from warp_on_device import use_simulated_memory

from robopolicy.errors import UserError
from robopolicy.sim import gl
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.sim.backends.warp import WarpSim
from robopolicy.sim.backends.warp_cameras import WarpCameras
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.point_cloud import crop, subsample, unproject
from robopolicy.sim.registry import SimOptions, make_sim

warp = pytest.importorskip("warp")
pytest.importorskip("mujoco_warp")
pytestmark = [pytest.mark.compiles, pytest.mark.filterwarnings("ignore:MULTICCD")]


def opened(
    task: MujocoTask, count: int, cameras: Sequence[str] = (), clouds: Sequence[str] = (), points: int = 64
) -> WarpCameras:
    options: dict[str, Any] = {"cameras": cameras, "image_size": 64, "point_clouds": clouds, "points": points}
    return WarpCameras(task, count, torch.device("cpu"), **options)


@pytest.mark.parametrize(
    ("name", "camera", "largest"), [("lift", "front", 8), ("lift", "wrist", 8), ("half_cheetah", "track", 24)]
)
def test_pictures_match_opengl(name: str, camera: str, largest: float) -> None:
    """The mean difference is 2.0 of 255 in lift, 1.2 at its wrist, and 20 for distant black and white checks."""
    try:
        gl.gl_backend()
    except UserError as error:
        pytest.skip(str(error))
    sim = make_sim(name, SimOptions(3, threads=1, cameras=(camera,), image_size=64))
    assert isinstance(sim, MujocoSim)
    sim.reset(500)
    expected = sim.step(torch.full((3, sim.spec.action_dim), 0.5)).obs[f"image.{camera}"]
    found = opened(sim.task, 3, [camera]).views(torch.from_numpy(sim.state().qpos))[f"image.{camera}"]
    assert found.shape == (3, 3, 64, 64) and found.dtype == torch.uint8
    assert (found.int() - expected.int()).abs().float().mean() <= largest


def test_cloud_is_the_front_face_of_the_box_and_moves_with_it() -> None:
    """A camera 6 m in front of the box sees its front face, the square |x - q| <= 0.5, |z| <= 0.5 at y = -0.5."""
    cameras = opened(Slider(), 3, clouds=("side",))
    clouds = cameras.views(torch.tensor([[0.0], [1.0], [99.0]]))["point_cloud.side"]
    assert clouds.shape == (3, 64, 3)
    torch.testing.assert_close(clouds[0, :, 1], torch.full((64,), -0.5), atol=1e-5, rtol=0)
    assert 0.45 < clouds[0, :, [0, 2]].abs().max() < 0.5
    front = clouds[1, clouds[1, :, 1] < -0.49]
    assert 0.5 < front[:, 0].min() < 0.6 and 1.4 < front[:, 0].max() < 1.5
    assert not clouds[2].any()  # out of view


def test_invisible_geoms_are_not_drawn() -> None:
    task = Slider()
    ball = '<geom type="sphere" size=".1" pos="0 -9 0"/><body>'  # behind the camera
    task.model = mujoco.MjModel.from_xml_string(XML.replace("<body>", ball))
    task.model.geom_rgba[1, 3] = 0  # of the box
    assert not opened(task, 1, clouds=("side",)).views(torch.zeros(1, 1))["point_cloud.side"].any()


def test_the_colour_of_a_geom_replaces_that_of_its_material() -> None:
    task = Slider()
    green = '<asset><material name="green" rgba="0 1 0 1"/></asset><worldbody>'
    xml = XML.replace("<worldbody>", green).replace('mass="1" rgba=".9 .2 .1 1"', 'mass="1" material="green"{}')
    for rgba, channel in (("", 1), (' rgba="0 0 1 1"', 2)):
        task.model = mujoco.MjModel.from_xml_string(xml.format(rgba))
        picture = opened(task, 1, cameras=["side"]).views(torch.zeros(1, 1))["image.side"]
        assert picture[0, :, 32, 32].argmax() == channel


def test_points_are_selected_as_by_numpy() -> None:
    """The second world has fewer points than requested in the box, the third none."""
    from robopolicy.sim.backends.warp_points import BLOCK, select_points

    rng = np.random.default_rng(0)
    depth = rng.uniform(0.5, 2.0, (3, 6, 6)).astype(np.float32)
    depth[1, 1:], depth[2] = 0.0, 0.0
    position, rotation = np.array([0.1, -0.2, 0.3]), np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    low, high = np.array([-0.7, -0.9, -9.0]), np.array([0.8, 0.7, 9.0])
    rays = unproject(np.ones((6, 6)), 70.0, np.zeros(3), np.eye(3))
    chosen = warp.zeros((3, 12), dtype=warp.vec3)
    inputs = [warp.array(depth.reshape(3, 36)), warp.array(rays, dtype=warp.vec3), 1]
    inputs += [warp.array(np.tile(position, (3, 2, 1)), dtype=warp.vec3)]
    inputs += [warp.array(np.tile(rotation, (3, 2, 1, 1)), dtype=warp.mat33), warp.vec3(*low), warp.vec3(*high)]
    inputs += [warp.zeros((3, 36), dtype=warp.vec3), warp.zeros((3, 36), dtype=float), chosen]
    warp.launch_tiled(select_points, dim=[3], inputs=inputs, block_dim=BLOCK, device="cpu")
    found = chosen.numpy()
    for world in range(3):
        image = np.where(depth[world] > 0, depth[world], np.inf)
        inside = crop(unproject(image, 70.0, position, rotation), (low, high))
        expected = subsample(inside, 12)
        if len(inside) > 12:
            np.testing.assert_allclose(found[world], expected, atol=1e-6)
        else:  # the order of the points differs
            assert {tuple(point.round(4)) for point in found[world]} == {tuple(point.round(4)) for point in expected}
    assert len(inside) == 0


def test_an_unknown_camera_is_refused() -> None:
    with pytest.raises(UserError, match="nowhere"):
        opened(Slider(), 1, clouds=("nowhere",))


def test_simulators_with_cameras_satisfy_the_contract() -> None:
    def make(num_envs: int) -> WarpSim:
        return WarpSim(Slider(0.2), num_envs, cameras=("side",), image_size=16, point_clouds=("side",), points=8)

    assert check_simulator(make(3), make) == []


def test_final_views_show_the_end_of_the_episode_and_obs_the_start_of_the_next() -> None:
    sim = WarpSim(Slider(), 2, cameras=("side",), image_size=16, point_clouds=("side",), points=8)
    first = sim.reset(0)
    for _ in range(3):
        step = sim.step(torch.tensor([[1.0], [0.0]]))
    assert step.done.tolist() == [True, False]
    for key in ("image.side", "point_cloud.side"):
        assert torch.equal(step.obs[key], first[key]) and torch.equal(step.final_obs[key][1], first[key][1])
        assert not torch.equal(step.final_obs[key][0], first[key][0])
    assert not step.final_obs["point_cloud.side"][0].any()  # the box has left the view
    assert torch.equal(sim.load_state_dict(sim.state_dict())["image.side"], step.obs["image.side"])


def test_a_step_with_cameras_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = pytest.importorskip("simulated", exc_type=ImportError)
    use_simulated_memory(monkeypatch)
    sim = WarpSim(Slider(), 2, device=simulated.NAME, cameras=("side",), image_size=16, point_clouds=("side",))
    reference = WarpSim(Slider(), 2, cameras=("side",), image_size=16, point_clouds=("side",))
    obs, expected = sim.reset(0), reference.reset(0)
    action = torch.tensor([[1.0], [0.0]])
    on_device = action.to(simulated.DEVICE)
    for _ in range(5):
        with simulated.record() as found:
            obs = sim.step(on_device).obs
        expected = reference.step(action).obs
        assert {value.device.type for value in obs.values()} == {simulated.NAME}
        for key, value in expected.items():
            torch.testing.assert_close(obs[key].cpu(), value)
    assert found.waits <= 1, found.places()
    assert found.launches <= 43, found.places()
