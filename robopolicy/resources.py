"""Data folders of the package: `configs` of the product and of contrib, and `sim_assets`."""

from __future__ import annotations

from pathlib import Path

from robopolicy import plugins

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the path of `configs` or `sim_assets`: the top level of a checkout, else `robopolicy/_data` of a wheel."""
    checkout = PACKAGE.parent / name
    inside = (PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir()
    return checkout if inside else PACKAGE / "_data" / name


def presets() -> list[Path]:
    """Return the folders of presets: `configs` of the product and of the themes of contrib."""
    own = [theme.folder / "configs" for theme in plugins.themes().values()]
    return [folder("configs"), *(place for place in own if place.is_dir())]


def preset_files(group: str) -> dict[str, Path]:
    """Return the preset files `group=NAME`, sorted by name; a ValueError is raised if two files share a name."""
    found: dict[str, Path] = {}
    for file in (file for place in presets() for file in sorted((place / group).glob("*.yaml"))):
        if file.stem in found:
            raise ValueError(f"Preset {group}={file.stem} is defined by {found[file.stem]} and {file}.")
        found[file.stem] = file
    return dict(sorted(found.items()))
