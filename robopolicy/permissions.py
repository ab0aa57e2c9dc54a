"""Permissions for code in files: load policies that contain programs, and run programs without confinement.

The options `--allow-code` and `--unsafe-code` of the command line set them; in Python, `code_permissions` does:

    with code_permissions(allow=True):
        policy, manifest = load_policy("runs/walk")

An environment variable holds them, so that worker processes have them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "ROBOPOLICY_CODE"  # words: allow, unsafe


@contextmanager
def code_permissions(*, allow: bool = False, unsafe: bool = False) -> Iterator[None]:
    """Grant permissions in this process and the processes it starts, in addition to those it has."""
    before = os.environ.get(VARIABLE, "")
    granted = {*before.split(), *(["allow"] if allow else []), *(["unsafe"] if unsafe else [])}
    os.environ[VARIABLE] = " ".join(sorted(granted))
    try:
        yield
    finally:
        os.environ[VARIABLE] = before


def may_load_code() -> bool:
    """Whether checkpoints that contain programs may be loaded."""
    return "allow" in os.environ.get(VARIABLE, "").split()


def may_run_unconfined() -> bool:
    """Whether programs may run on a machine that cannot confine them."""
    return "unsafe" in os.environ.get(VARIABLE, "").split()
