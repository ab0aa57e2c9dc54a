"""Robot models from MuJoCo Menagerie as replacements of our primitive models."""

from __future__ import annotations

import os
from pathlib import Path

from robopolicy.errors import UserError
from robopolicy.resources import folder

ASSETS = folder("sim_assets")


def resolve_model(ours: str, theirs: str) -> Path:
    """MJCF file of a robot: `sim_assets/<ours>`, or `<theirs>` in the folder `MENAGERIE_ROOT`.

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
