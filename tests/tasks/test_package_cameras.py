"""Tests of images of the cameras of Meta-World and OGBench; skipped where no OpenGL library is installed."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim import gl
from robopolicy.sim.backends.gymnasium import GymnasiumSim, mujoco_objects
from robopolicy.sim.camera_env import SharedRenderer
from robopolicy.sim.registry import SimOptions, get_task, make_sim


@pytest.fixture(scope="module", autouse=True)
def _needs_gl() -> None:
    try:
        gl.gl_backend()
    except UserError as error:
        pytest.skip(str(error))


def opened(task: str, *cameras: str, num_envs: int = 1, size: int = 32) -> GymnasiumSim:
    pytest.importorskip(task.partition("/")[0])
    sim = make_sim(task, SimOptions(num_envs=num_envs, cameras=cameras, image_size=size))
    assert isinstance(sim, GymnasiumSim)
    return sim


def pixels(image: torch.Tensor) -> np.ndarray[Any, Any]:
    return image.permute(1, 2, 0).numpy().astype(int)


def test_images_join_the_observations_of_meta_world() -> None:
    sim = opened("metaworld/reach-v3", "corner4", "gripperPOV", num_envs=2)
    obs = sim.reset(0)
    assert {key: tuple(value.shape) for key, value in obs.items()} == {
        "state": (2, 39),
        "image.corner4": (2, 3, 32, 32),
        "image.gripperPOV": (2, 3, 32, 32),
    }
    plain = make_sim("metaworld/reach-v3", SimOptions(num_envs=2))
    assert torch.equal(obs["state"], plain.reset(0)["state"])
    action = sim.spec.action_high.repeat(2, 1)
    for _ in range(5):
        step = sim.step(action)
    assert not torch.equal(step.obs["image.corner4"], obs["image.corner4"])
    expert = get_task("metaworld/reach-v3").require_expert()()
    assert expert(sim, step.obs).shape == (2, 4)
    sim.close()


def test_shadows_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges differ, since our pictures have no multisampling, while shadows darken whole regions."""
    import mujoco
    from mujoco.rendering.classic import gl_context

    context = import_module(f"mujoco.{gl.gl_backend()}").GLContext
    monkeypatch.setattr(
        gl_context, "GLContext", context
    )  # MuJoCo may have been imported before the choice of a library
    sim = opened("metaworld/reach-v3", "corner4", "corner4_shadows", size=64)
    obs = sim.reset(0)
    model, data = mujoco_objects(sim.envs[0])
    package = mujoco.Renderer(model, 64, 64)
    package.update_scene(data, camera="corner4")
    expected = package.render()[::-1, ::-1].astype(int)  # this camera hangs upside down, too
    package.close()
    images = (pixels(obs[f"image.{name}"][0]) for name in ("corner4", "corner4_shadows"))
    plain, shaded = (np.abs(image - expected).mean() for image in images)
    assert shaded < plain / 2
    sim.close()


def test_the_corner_camera_of_meta_world_is_turned_upright() -> None:
    sim = opened("metaworld/reach-v3", "corner")
    image = sim.reset(0)["image.corner"][0]
    raw = SharedRenderer(32).image(*mujoco_objects(sim.envs[0]), "corner")
    np.testing.assert_array_equal(pixels(image), raw[::-1, ::-1])
    sim.close()


@pytest.mark.parametrize("task", ["scene-singletask-task1-v0", "scene-oraclerep-v0"])
def test_images_join_the_observations_of_ogbench(task: str) -> None:
    sim = opened(f"ogbench/{task}", "front")
    image = sim.reset(0)["image.front"]
    assert tuple(image.shape) == (1, 3, 32, 32) and image.float().std() > 10
    sim.close()


def test_renderers_are_shared_and_opened_again_for_other_meshes() -> None:
    sim = opened("metaworld/reach-v3", "corner4", num_envs=2)
    sim.reset(0)
    environments: list[Any] = sim._envs
    assert environments[0]._renderer is environments[1]._renderer
    import_module("ogbench")
    other = opened("ogbench/scene-singletask-task1-v0", "front")
    shared: SharedRenderer = environments[0]._renderer
    first = shared._renderer
    shared.image(*mujoco_objects(other.envs[0]), "front")
    assert shared._renderer is not first
    sim.close()
    other.close()


def test_unknown_cameras_are_named() -> None:
    with pytest.raises(UserError, match=r"Unknown camera 'corner9'.*corner4"):
        opened("metaworld/reach-v3", "corner9")
