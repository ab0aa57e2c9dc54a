"""The product stands without contrib, every theme of contrib without the others, and all that themes offer is there."""

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hiding import THEMES, hidden
from source_tree import ROOT, imported_modules, module_name, python_files

from docs.generate_methods import load as load_tables
from docs.generate_methods import render
from robopolicy import plugins
from robopolicy.cli.commands import COMMANDS
from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.recipe_files import recipe_names
from robopolicy.resources import preset_files

PRODUCT = ("robopolicy", "tasks", "real_robot", "examples", "benchmarks", "docs")
PLAIN = {"compatibility"}  # tables of theme.toml that name no objects
needs_contrib = pytest.mark.skipif(not plugins.themes(), reason="contrib is hidden")


def theme_of(path: Path) -> str:
    """The theme that a file belongs to; empty for the product and for contrib's own files."""
    inside = path.parts[:2] in (("robopolicy", "contrib"), ("tests", "contrib")) and len(path.parts) > 3
    return path.parts[2] if inside else ""


def imports_of_contrib(*folders: str) -> Iterator[tuple[Path, str, str]]:
    """(file, place, imported module) of every import from contrib."""
    for path in python_files(*folders):
        for line, name in imported_modules(path):
            if name == "robopolicy.contrib" or name.startswith("robopolicy.contrib."):
                yield path, f"{path}:{line}", name


def test_the_product_and_its_tests_never_import_contrib() -> None:
    wrong = [
        f"{place}: {name}"
        for path, place, name in imports_of_contrib(*PRODUCT, "tests")
        if "contrib" not in path.parts[:2]
    ]
    assert not wrong, "The product finds what contrib offers by name:\n" + "\n".join(wrong)


def test_themes_and_their_tests_never_import_other_themes() -> None:
    wrong = [
        f"{place}: {name}"
        for path, place, name in imports_of_contrib("robopolicy", "tests")
        if (theme := theme_of(path)) and not f"{name}.".startswith(f"robopolicy.contrib.{theme}.")
    ]
    assert not wrong, "Every theme can be deleted alone:\n" + "\n".join(wrong)


def test_every_theme_says_what_it_is_and_has_tests() -> None:
    for theme in THEMES:
        folder = ROOT / "robopolicy" / "contrib" / theme
        assert (folder / "README.md").is_file(), f"{theme} has no README.md"
        assert list((ROOT / "tests" / "contrib" / theme).glob("test_*.py")), f"{theme} has no tests"


def targets(row: Any) -> Iterator[str]:
    """Everything in a row of theme.toml that says where an object or a module is."""
    if isinstance(row, str) and row.startswith(("robopolicy.", "robopolicy_")):
        yield row
    elif isinstance(row, Mapping):
        for value in row.values():
            yield from targets(value)


@needs_contrib
@pytest.mark.parametrize("theme", THEMES)
def test_every_row_of_a_theme_leads_to_an_object(theme: str) -> None:
    tables = plugins.themes()[theme].tables
    found = [target for kind, table in tables.items() if kind not in PLAIN for target in targets(table)]
    for target in found:
        assert plugins.load(target) if ":" in target else importlib.import_module(target)
    own = [target for target in found if target.startswith("robopolicy.contrib.")]
    assert all(target.startswith(f"robopolicy.contrib.{theme}.") for target in own), own


def kinds(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Kinds of things in a theme.toml; parts and compatibility have nested kinds."""
    for kind, table in tables.items():
        if kind in ("parts", *PLAIN):
            yield from kinds(table, f"{kind}.")
        else:
            yield prefix + kind


@needs_contrib
def test_no_name_is_defined_twice() -> None:
    for kind in {kind for theme in plugins.themes().values() for kind in kinds(theme.tables)}:
        assert plugins.contributed(kind)  # raises where two themes use one name
    assert recipe_names()
    for group in ("task", "experiment", "policy", "sim"):
        preset_files(group)
    commands = Counter([*COMMANDS.product(), *plugins.contributed("commands")])
    assert commands.most_common(1)[0][1] == 1, commands


def test_no_file_of_tests_has_the_name_of_another() -> None:
    names = Counter(path.name for path in python_files("tests") if path.name != "conftest.py")
    assert names.most_common(1)[0][1] == 1, [name for name, count in names.items() if count > 1]


@needs_contrib
@pytest.mark.parametrize("theme", THEMES)
def test_the_product_works_without_a_theme(theme: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hidden(theme):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"robopolicy.contrib.{theme}")
        assert theme not in plugins.themes()
        for path in python_files("robopolicy", "tasks", "real_robot"):
            if path.parts[:2] != ("robopolicy", "contrib") and path.stem != "__main__":
                import_as_far_as_installed(module_name(path))
        assert main(["list", "--json"]) == 0
        rows = [row for table in json.loads(capsys.readouterr().out).values() for row in table]
        assert rows and not [row["name"] for row in rows if row.get("ring") == theme]
        page = "\n".join(render(load_tables()).values())
        assert not re.search(rf"`(robopolicy\.contrib\.{theme}\.[\w.]+:|tests/contrib/{theme}/)", page)
    assert theme in plugins.themes() and importlib.import_module(f"robopolicy.contrib.{theme}")


def import_as_far_as_installed(module: str) -> None:
    """Import a module of the product unless it needs a package of an extra that is not installed."""
    try:
        importlib.import_module(module)
    except UserError:
        pass
    except ModuleNotFoundError as error:
        assert not str(error.name).startswith("robopolicy"), error
