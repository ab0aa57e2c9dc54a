"""Files of text recipes: `configs/text/NAME.yaml`, `recipes/` of contrib themes, and files of the user."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from robopolicy import plugins
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_yaml
from robopolicy.resources import folder


@cache
def recipe_files() -> dict[str, Path]:
    """Return the files of the installed recipes by name; a ValueError is raised if two files share a name."""
    folders = [folder("configs") / "text", *(theme.folder / "recipes" for theme in plugins.themes().values())]
    found: dict[str, Path] = {}
    for file in sorted(file for place in folders for file in place.glob("*.yaml")):
        if file.stem in found:
            raise ValueError(f"Recipe '{file.stem}' is defined by {found[file.stem]} and {file}.")
        found[file.stem] = file
    return found


def recipe_names() -> list[str]:
    """Return the names of the installed recipes."""
    return sorted(recipe_files())


def recipe_ring(name: str) -> str:
    """Return the origin of a recipe: "product" or a theme of contrib."""
    file = recipe_files()[name]
    return next((theme.name for theme in plugins.themes().values() if theme.folder in file.parents), plugins.PRODUCT)


def read_recipe(name: str) -> dict[str, Any]:
    """Read a recipe, by name or by a path that ends with .yaml, for `robopolicy.core.recipe.Recipe.from_dict`.

    Raises:
        UserError: The name is unknown, the file cannot be read, or it contains no mapping.
    """
    if not name.endswith(".yaml") and name not in recipe_files():
        raise unknown_name("recipe", name, recipe_names())
    file = Path(name) if name.endswith(".yaml") else recipe_files()[name]
    try:
        plain = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Recipe {file} cannot be read: {str(error).splitlines()[0]}.") from error
    if not isinstance(plain, dict):
        raise UserError(f"Recipe {file} must be a mapping, found {type(plain).__name__}.")
    return plain
