"""Robots from MuJoCo Menagerie in place of our own primitive models."""

from __future__ import annotations

import os
from pathlib import Path

from robopolicy.errors import UserError
from robopolicy.resources import folder

ASSETS = folder("sim_assets")


def robot_file(ours: str, theirs: str) -> Path:
    """MJCF of the robot to load: `sim_assets/<ours>`, or `<theirs>` of the folder that `MENAGERIE_ROOT` names.

    Raises:
        UserError: The environment variable is set and its folder lacks the file.
    """
    root = os.environ.get("MENAGERIE_ROOT")
    if not root:
        return ASSETS / ours
    path = Path(root) / theirs
    if not path.is_file():
        raise UserError(
            f"MENAGERIE_ROOT={root} has no {theirs}; point it to a checkout of mujoco_menagerie or unset it to use the "
            "built-in model."
        )
    return path
