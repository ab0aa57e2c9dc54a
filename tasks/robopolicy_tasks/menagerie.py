"""Robot models from MuJoCo Menagerie as replacements of the built-in primitive models."""

from __future__ import annotations

import os
from pathlib import Path

from robopolicy.errors import UserError
from robopolicy.resources import folder

ASSETS = folder("sim_assets")


def resolve_model(builtin: str, menagerie: str) -> Path:
    """MJCF file of a robot: `sim_assets/<builtin>`, or `<menagerie>` in the folder `MENAGERIE_ROOT` if that is set."""
    root = os.environ.get("MENAGERIE_ROOT")
    if not root:
        return ASSETS / builtin
    path = Path(root) / menagerie
    if not path.is_file():
        raise UserError(
            f"MENAGERIE_ROOT={root} has no {menagerie}; set it to a copy of mujoco_menagerie or unset it for the "
            "built-in model."
        )
    return path
