"""Which OpenGL library can draw without a window. Imports nothing heavy, so it may run before any simulator does."""

from __future__ import annotations

import ctypes.util
import os

from robopolicy.errors import UserError

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa", "glfw": "glfw"}


def gl_backend() -> str:
    """Name the usable GL backend as `MUJOCO_GL` does: the user's choice, else egl, else osmesa.

    Also sets `MUJOCO_GL`, so that libraries with a renderer of their own follow the same choice.

    Raises:
        UserError: If no GL library is installed or the user's choice is unknown.
    """
    chosen = os.environ.get("MUJOCO_GL", "").strip().lower()
    if chosen:
        if chosen not in _LIBRARIES:
            raise UserError(f"MUJOCO_GL must be one of {', '.join(_LIBRARIES)}, got '{chosen}'.")
        return chosen
    for name in ("egl", "osmesa"):
        if ctypes.util.find_library(_LIBRARIES[name]):
            os.environ["MUJOCO_GL"] = name
            return name
    raise UserError(
        "Rendering needs an OpenGL library and none was found; install one "
        "(Debian: apt install libegl1 libgl1-mesa-dri, or libosmesa6) or go without cameras and video."
    )
