"""Checks of the numbers of a recipe by dotted paths."""

from typing import Any, cast

from robopolicy.core.recipe import DEFAULTS
from robopolicy.recipe_files import read_recipe

CLIP = "estimator.bounds."
STAGE, ROLLOUT, HELP = "advantage.", "rollout.", "rollout.intervention."


def found(plain: Any, path: str) -> Any:
    """The value at a dotted path; list entries are named by name or index."""
    for key in path.split("."):
        if isinstance(plain, list) and key.isdigit():
            plain = cast(list[Any], plain)[int(key)]
        elif isinstance(plain, list):
            (plain,) = (entry for entry in plain if isinstance(entry, dict) and entry["name"] == key)
        else:
            plain = plain[key]
    return plain


def check_numbers(name: str, numbers: dict[str, Any]) -> None:
    """A recipe has these numbers, independent of the defaults of its parts."""
    plain = DEFAULTS | read_recipe(name)
    assert {path: found(plain, path) for path in numbers} == numbers
