"""Tests of camera observations and rendered frames; skipped where no OpenGL library is installed."""

import os
from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from slider import XML, Slider

from robopolicy.errors import UserError
from robopolicy.sim import gl
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.render import Renderer
from robopolicy.sim.backends.mujoco.task import ResetState
from robopolicy.sim.checker import check_simulator


@pytest.fixture(scope="module", autouse=True)
def _needs_gl() -> None:
    try:
        gl.gl_backend()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("engine", ["rollout", "exact"])
def test_camera_observations_satisfy_the_contract(engine: str) -> None:
    def make(num_envs: int) -> MujocoSim:
        return MujocoSim(Slider(0.2), num_envs, engine=engine, cameras=("side",), image_size=24)  # type: ignore[arg-type]

    assert check_simulator(make(3), make) == []


def test_final_image_shows_the_end_of_the_episode_and_obs_the_start_of_the_next() -> None:
    sim = MujocoSim(Slider(), 2, cameras=("side",), image_size=32)
    first = sim.reset(0)["image.side"]
    for _ in range(3):
        step = sim.step(torch.tensor([[1.0], [0.0]]))
    assert step.done.tolist() == [True, False]
    assert torch.equal(step.obs["image.side"], first)
    assert not torch.equal(step.final_obs["image.side"][0], first[0])
    assert torch.equal(step.final_obs["image.side"][1], first[1])


def test_render_returns_frames_of_the_requested_size() -> None:
    sim = MujocoSim(Slider(), 3)
    sim.reset(0)
    frames = sim.render("side", width=40, height=30, envs=2)
    assert frames.shape == (2, 3, 30, 40)
    assert frames.dtype == torch.uint8
    red, green = frames[0, :, 15, 20].tolist()[:2]
    assert red > green  # the box is red and in the middle
    assert sim.render(width=16, height=16).shape == (1, 3, 16, 16)
    with pytest.raises(UserError, match="camera"):
        sim.render("nowhere")
    sim.close()
    sim.close()


def test_missing_gl_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(gl.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(UserError, match="install one"):
        gl.gl_backend()
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    with pytest.raises(UserError, match="MUJOCO_GL must be"):
        gl.gl_backend()
    assert os.environ["MUJOCO_GL"] == "nonsense"


SCENE = XML.replace(
    "<worldbody>",
    """<asset><hfield name="hills" nrow="8" ncol="8" size="3 3 1 .1"/></asset>
  <worldbody>
    <geom name="wall" type="box" size=".3 .1 2"/>
    <geom type="hfield" hfield="hills" pos="0 3 -1" contype="0" conaffinity="0"/>""",
)


class MovedWall(Slider):
    """Slider with a wall whose place, and with terrain whose height, differ between episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mujoco.MjModel.from_xml_string(SCENE)

    def initial(self, rng: np.random.Generator) -> ResetState:
        place, heights = self.model.geom_pos.copy(), np.zeros_like(self.model.hfield_data)
        place[0] = rng.uniform(1.0, 2.0), 1.0, 0.0
        heights[20:44] = rng.uniform(0.5, 1.0)
        return replace(super().initial(rng), model={"geom_pos": place, "hfield_data": heights})


@pytest.mark.parametrize("engine", ["rollout", "exact"])
def test_images_show_the_model_of_their_episode(engine: str) -> None:
    sim = MujocoSim(MovedWall(), 3, engine=engine, cameras=("side",), image_size=48)  # type: ignore[arg-type]
    images = sim.reset(0)["image.side"]
    assert not torch.equal(images[0], images[1])
    for row, image in enumerate(images):
        fresh = Renderer(sim.engine.models[row], 48, 48)  # uploads the terrain of this model
        sim.engine.pose(row, fresh.data)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), fresh.frame("side"))
        fresh.close()
    for _ in range(4):
        step = sim.step(torch.zeros(3, 1))
    assert step.done.all()
    assert torch.equal(step.final_obs["image.side"], images), "the mass stays, and the model is still the old one"
    assert not torch.equal(step.obs["image.side"], images)
