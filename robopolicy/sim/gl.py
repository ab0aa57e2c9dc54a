"""Choice of the OpenGL library for offscreen rendering, with light imports, so that it can precede any simulator."""

from __future__ import annotations

import ctypes.util
import os

from robopolicy.errors import UserError

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa", "glfw": "glfw"}
_OFF = ("disable", "disabled", "off", "false", "0")  # MuJoCo's values for no rendering


def check_mujoco_gl() -> None:
    """Raise a `UserError` if `MUJOCO_GL` is unknown or its library is not installed."""
    chosen = _chosen()
    if not chosen or chosen in _OFF:
        return
    if chosen not in _LIBRARIES:
        raise UserError(f"MUJOCO_GL must be one of {', '.join(_LIBRARIES)}, got '{chosen}'.")
    if chosen != "glfw" and not ctypes.util.find_library(_LIBRARIES[chosen]):  # glfw is part of its package
        raise UserError(
            f"MUJOCO_GL={chosen}, but lib{_LIBRARIES[chosen]} is not installed; install it or unset MUJOCO_GL."
        )


def gl_backend() -> str:
    """Return the user's choice in `MUJOCO_GL`, else egl, else osmesa, and set `MUJOCO_GL` for other renderers.

    Raises:
        UserError: No GL library is installed, or the choice is unknown or disables rendering.
    """
    check_mujoco_gl()
    chosen = _chosen()
    if chosen in _OFF:
        raise UserError(f"Rendering is disabled by MUJOCO_GL={chosen}; unset it.")
    if chosen:
        return chosen
    for name in ("egl", "osmesa"):
        if ctypes.util.find_library(_LIBRARIES[name]):
            os.environ["MUJOCO_GL"] = name
            return name
    raise UserError(
        "Rendering needs an OpenGL library and none was found; install one "
        "(Debian: apt install libegl1 libgl1-mesa-dri, or libosmesa6) or disable cameras and video."
    )


def _chosen() -> str:
    return os.environ.get("MUJOCO_GL", "").strip().lower()
