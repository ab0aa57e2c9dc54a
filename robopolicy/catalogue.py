"""The recipes that come along, `configs/text/NAME.yaml`, and those in files of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_yaml
from robopolicy.resources import folder

FOLDER = folder("configs") / "text"


def recipe_names() -> list[str]:
    """Names of the recipes that come along."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def read_recipe(name: str) -> dict[str, Any]:
    """Plain values of a recipe, for `robopolicy.core.recipe.Recipe.from_plain`.

    Args:
        name: One of `recipe_names`, or the path of a file that ends with .yaml.

    Raises:
        UserError: The name is unknown, or the file cannot be read or holds no mapping.
    """
    file = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not name.endswith(".yaml") and name not in recipe_names():
        raise unknown_name("recipe", name, recipe_names())
    try:
        plain = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Recipe {file} cannot be read: {str(error).splitlines()[0]}.") from error
    if not isinstance(plain, dict):
        raise UserError(f"Recipe {file} must be a mapping, found {type(plain).__name__}.")
    return plain
