"""Offscreen rendering without shadows, reflections and multisampling, which is 20-60x faster on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.gl import gl_backend


class Renderer:
    """Renderer of one model at one image size in pixels; geoms of the groups `hidden` are not drawn."""

    def __init__(self, model: mujoco.MjModel, height: int, width: int, hidden: Sequence[int] = ()) -> None:
        self.data = mujoco.MjData(model)  # set its state, then call `frame`
        self._model = model
        self._context: Any = _gl_context(width, height)
        with self._bound():
            self._draw = _draw_context(model, height, width)
        self._draw.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR  # accurate at large distances
        self._scene = mujoco.MjvScene(model, maxgeom=10_000)
        self._option = mujoco.MjvOption()
        for group in hidden:
            self._option.geomgroup[group] = 0
        self._heights: NDArray[np.float32] = model.hfield_data.copy()  # terrain in the memory of the GL context
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._pixels: NDArray[np.uint8] = np.empty((height, width, 3), np.uint8)
        self._depth: NDArray[np.float32] = np.empty((height, width), np.float32)

    def frame(self, camera: str | None = None, model: mujoco.MjModel | None = None) -> NDArray[np.uint8]:
        """Render `data` from `camera` (free camera if None): `(height, width, 3)`, valid until the next call.

        `model` is a copy of the model with edited fields, except meshes and textures.
        """
        return self.picture(model or self._model, self.data, camera)

    def picture(
        self, model: mujoco.MjModel, data: mujoco.MjData, camera: str | None, *, shadows: bool = False
    ) -> NDArray[np.uint8]:
        """Render `data` of a model with the same meshes and textures: `(height, width, 3)`, valid until the next call.

        `shadows` adds shadows and reflections.
        """
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = shadows
        with self._bound():
            self._render(model, data, camera)
            mujoco.mjr_readPixels(self._pixels, None, self._rect, self._draw)
        return self._pixels[::-1]  # OpenGL starts with the bottom row

    def depth(self, camera: str, model: mujoco.MjModel | None = None) -> NDArray[np.float64]:
        """Depth image `(height, width)` [m] of `data` along the optical axis of `camera`, inf for the background.

        `model` as in `frame`.
        """
        drawn: mujoco.MjModel = self._model if model is None else model
        flat = (
            mujoco.mjtRndFlag.mjRND_SEGMENT,
            mujoco.mjtRndFlag.mjRND_IDCOLOR,
        )  # no sky and no lights: only the depth is used
        with self._bound():
            for flag in flat:
                self._scene.flags[flag] = True
            self._render(drawn, self.data, camera)
            for flag in flat:
                self._scene.flags[flag] = False
            mujoco.mjr_readPixels(None, self._depth, self._rect, self._draw)
        buffer = self._depth[::-1].astype(np.float64)
        near, far = (value * drawn.stat.extent for value in (drawn.vis.map.znear, drawn.vis.map.zfar))
        # Undo the perspective: the buffer runs from 1 at the near plane to 0 at the far plane.
        return np.where(buffer > 0.0, near * far / (near + (far - near) * buffer), np.inf)

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """Bind the GL context to this thread, and unbind it afterwards, since another thread may render next."""
        self._context.make_current()
        try:
            yield
        finally:
            _unbind_context()

    def _render(self, model: mujoco.MjModel, data: mujoco.MjData, camera: str | None) -> None:
        view = mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(model, view)
        if camera is not None:
            view.type = mujoco.mjtCamera.mjCAMERA_FIXED
            view.fixedcamid = model.camera(camera).id
        if model.nhfield and not np.array_equal(model.hfield_data, self._heights):
            for number in range(model.nhfield):
                mujoco.mjr_uploadHField(model, self._draw, number)
            self._heights = model.hfield_data.copy()
        mujoco.mjv_updateScene(model, data, self._option, None, view, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._draw)

    def close(self) -> None:
        """Free the GL context; safe to call twice."""
        if self._context is not None:
            self._context.make_current()
            self._draw.free()
            self._context.free()
            self._context = None

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit the GL library may be unloaded
            self.close()


def _unbind_context() -> None:
    library: Any = import_module(f"mujoco.{gl_backend()}")
    if hasattr(library, "EGL"):
        egl = library.EGL
        egl.eglMakeCurrent(library.EGL_DISPLAY, egl.EGL_NO_SURFACE, egl.EGL_NO_SURFACE, egl.EGL_NO_CONTEXT)
    elif hasattr(library, "glfw"):
        library.glfw.make_context_current(None)  # OSMesa draws into memory and needs no call


def _gl_context(width: int, height: int) -> Any:
    name = gl_backend()
    try:
        return import_module(f"mujoco.{name}").GLContext(width, height)
    except Exception as error:  # each GL library raises different errors
        raise UserError(
            f"Cannot create a '{name}' rendering context ({error}); set MUJOCO_GL=egl or osmesa."
        ) from error


def _draw_context(model: mujoco.MjModel, height: int, width: int) -> mujoco.MjrContext:
    """Create the drawing context; it reads buffer size and multisampling from the model, which are restored."""
    screen, quality = model.vis.global_, model.vis.quality
    before = screen.offwidth, screen.offheight, quality.offsamples
    screen.offwidth, screen.offheight = width, height
    quality.offsamples = 0
    try:
        draw = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, draw)
    finally:
        screen.offwidth, screen.offheight, quality.offsamples = before
    return draw
