"""The `lerobot` package, imported where it is used."""

from __future__ import annotations

import sys
from typing import Any

from robopolicy.errors import UserError
from robopolicy.extras import need

EXTRA = "lerobot"
OLDEST_PYTHON = (3, 12)


def lerobot_module(name: str) -> Any:
    """Import `lerobot.{name}`.

    Raises:
        UserError: It is not installed, or cannot be.
    """
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        raise UserError(f"LeRobot needs Python 3.12, this is {found}; run: pip install 'robopolicy[{EXTRA}]' there.")
    return need(f"lerobot.{name}", EXTRA)
