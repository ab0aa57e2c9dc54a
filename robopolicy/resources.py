"""Folders that come with the package but are not Python: `configs` and `sim_assets`."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Path of `configs` or `sim_assets`.

    A checkout has them at its top level, which wins; a wheel installs them as `robopolicy/_data/NAME`.
    """
    checkout = PACKAGE.parent / name
    inside = (PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir()
    return checkout if inside else PACKAGE / "_data" / name
