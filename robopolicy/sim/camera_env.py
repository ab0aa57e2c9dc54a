"""Images of the cameras of a MuJoCo model in the observations of a gymnasium environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import unknown_name
from robopolicy.sim.backends.mujoco.render import Renderer

SHADOWS = "_shadows"  # suffix of a camera whose pictures have shadows and reflections


class SharedRenderer:
    """Renderer of square images of `size` pixels for environments of one task, opened on first use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._renderer: Renderer | None = None
        self._structure: tuple[int, ...] = ()

    def image(self, model: mujoco.MjModel, data: mujoco.MjData, camera: str) -> NDArray[np.uint8]:
        """Image `(size, size, 3)` of `data` from `camera`, as it is; a model with other meshes gets a new renderer."""
        structure = model.nmeshvert, model.ntexdata, model.ngeom
        if self._renderer is None or structure != self._structure:
            self.close()
            self._renderer, self._structure = Renderer(model, self.size, self.size), structure
        name, shadows = camera.removesuffix(SHADOWS), camera.endswith(SHADOWS)
        return self._renderer.picture(model, data, name, shadows=shadows).copy()

    def close(self) -> None:
        """Free the renderer; a later image opens it again."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class CameraEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Environment with one more observation per camera; a single vector becomes `state`.

    Args:
        env: Environment with a MuJoCo model.
        objects: Returns its `MjModel` and `MjData`.
        cameras: Names of cameras of the model, with the suffix `_shadows` for pictures with shadows and reflections,
            which take about eight times as long on a CPU.
        renderer: Renderer that the environments of a task share.

    Raises:
        UserError: The model has no such camera.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        objects: Callable[[gymnasium.Env[Any, Any]], tuple[Any, Any]],
        cameras: Sequence[str],
        renderer: SharedRenderer,
    ) -> None:
        super().__init__(env)
        self._objects, self._cameras, self._renderer = objects, tuple(cameras), renderer
        model, data = objects(env)
        known = [model.camera(index).name for index in range(model.ncam)]
        for camera in cameras:
            if camera.removesuffix(SHADOWS) not in known:
                raise unknown_name("camera", camera, known)
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        self._inverted = {camera for camera in cameras if _is_inverted(model, data, camera.removesuffix(SHADOWS))}
        space = env.observation_space
        images = gymnasium.spaces.Box(0, 255, (renderer.size, renderer.size, 3), np.uint8)
        entries = dict(space) if isinstance(space, gymnasium.spaces.Dict) else {"state": space}
        self.observation_space = gymnasium.spaces.Dict(entries | dict.fromkeys(cameras, images))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_images(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Apply one action."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_images(observation), reward, terminated, truncated, info

    def close(self) -> None:
        """Free the renderer and close the environment."""
        self._renderer.close()
        super().close()

    def _with_images(self, observation: Any) -> dict[str, Any]:
        entries = observation if isinstance(observation, dict) else {"state": observation}
        model, data = self._objects(self.env)
        images: dict[str, NDArray[np.uint8]] = {}
        for camera in self._cameras:
            image = self._renderer.image(model, data, camera)
            images[camera] = image[::-1, ::-1] if camera in self._inverted else image
        return entries | images


def _is_inverted(model: mujoco.MjModel, data: mujoco.MjData, camera: str) -> bool:
    """Whether a camera that is fixed to the world hangs upside down."""
    index = model.camera(camera).id
    return model.cam_bodyid[index] == 0 and data.cam_xmat[index][7] < 0
