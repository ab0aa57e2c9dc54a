"""Names that the product or a contrib theme adds to the registries."""

from typing import Any

from robopolicy import plugins
from robopolicy.core.registry import REGISTRIES
from robopolicy.recipe_files import read_recipe, recipe_names, recipe_ring


def names_of(registry: plugins.Registry[Any], theme: str) -> list[str]:
    """Entries of a registry from one theme."""
    return [name for name in registry if registry.ring(name) == theme]


def parts_of(theme: str, slot: str) -> list[str]:
    """Parts of one slot from one theme."""
    registry = REGISTRIES[slot]
    return [name for name in registry if registry.ring(name) == theme]


def recipes_of(ring: str, data: str = "") -> list[str]:
    """Recipes of a theme or of the "product"; with `data` only recipes that learn from this data."""
    names = [name for name in recipe_names() if recipe_ring(name) == ring]
    return [name for name in names if data in ("", read_recipe(name).get("data", "rollout"))]


def presets_of(theme: str) -> list[tuple[str, str]]:
    """Group and name of the presets of a theme."""
    files = sorted((plugins.themes()[theme].folder / "configs").glob("*/*.yaml"))
    return [(file.parent.name, file.stem) for file in files]
