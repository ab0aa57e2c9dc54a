"""`robopolicy list`: list tasks, policies, algorithms, experiments etc. and the extras of missing packages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from robopolicy.cli.commands import extra_registries

if TYPE_CHECKING:
    from robopolicy.plugins import Registry
    from robopolicy.sim.backends import Backend
    from robopolicy.sim.registry import TaskEntry, TaskFamily

EXAMPLES = """\
examples:
  robopolicy list
  robopolicy list tasks
  robopolicy list algorithms --json
"""

Row = dict[str, Any]
TRIED_ON = "Tried on: "  # start of the comment of a preset with the tasks


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "list",
        description="List the names for the command line and for configurations.",
        epilog=EXAMPLES,
    )
    parser.add_argument("what", nargs="?", metavar="KIND", help=f"{' | '.join(kinds())} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the lists; return 0."""
    from robopolicy.errors import unknown_name

    known = kinds()
    if args.what is not None and args.what not in known:
        raise unknown_name("kind", args.what, known)
    sections = {kind: rows() for kind, rows in known.items() if args.what in (None, kind)}
    if args.json:
        print(json.dumps(sections))
        return 0
    for kind, rows in sections.items():
        width = max(len(row["name"]) for row in rows)
        print(kind)
        for row in rows:
            missing = f"  [missing: pip install 'robopolicy[{row['missing']}]']" if row["missing"] else ""
            print(f"  {row['name']:<{width}}  {row['description']}{_remarks(row)}{missing}")
    return 0


def tasks() -> list[Row]:
    """Return the registered tasks, then the families that take ids of another library, or files."""
    from robopolicy.sim.registry import get_task, task_families, task_names, task_ring

    rows: list[Row] = []
    for name in task_names():
        entry = get_task(name)
        rows.append(
            {
                "name": name,
                "description": entry.description,
                "missing": _missing(entry),
                "expert": entry.make_expert is not None,
                "backends": list(entry.backends),
                "success": entry.success,
                "ring": task_ring(name),
            }
        )
    for prefix, family in task_families().items():
        rows.append({"name": f"{prefix}/<id>", "description": family.description, "missing": _missing(family)})
    return rows


def policies() -> list[Row]:
    """Return the registered policies."""
    from robopolicy.policies.registry import POLICIES

    return [_row(name, POLICIES) for name in POLICIES]


def algorithms() -> list[Row]:
    """Return the registered algorithms with their training data."""
    from robopolicy.algorithms.registry import ALGORITHMS
    from robopolicy.training.make_source import SOURCES

    rows: list[Row] = []
    for name in ALGORITHMS:
        data_source = ALGORITHMS.attribute(name, "data_source")
        rows.append(_row(name, ALGORITHMS) | {"data_source": data_source, "data": SOURCES.summary(data_source)})
    return rows


def experiments() -> list[Row]:
    """Return the presets for `experiment=` with the first sentence of their comments.

    Kinds of experiments also have the tasks that they were tried on, and the algorithms with settings of their own.
    """
    from robopolicy.resources import preset_files

    rows: list[Row] = []
    for name, file in preset_files("experiment").items():
        lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
        comments = [line.lstrip("# ") for line in lines if "@package" not in line]
        tried = [line.removeprefix(TRIED_ON) for line in comments if line.startswith(TRIED_ON)]
        text = " ".join(line for line in comments if not line.startswith(TRIED_ON)).partition(". ")[0]
        row = {"name": name, "description": f"{text.rstrip('.')}.", "missing": ""}
        settings = [path.stem for path in sorted((file.parents[1] / "settings" / name).glob("*.yaml"))]
        rows.append(row | ({"tried_on": tried[0].split(", "), "algorithms": settings} if tried else {}))
    return rows


def backends() -> list[Row]:
    """Return the simulator backends."""
    from robopolicy.sim.backends import BACKENDS

    return [_backend(name, row) | {"ring": BACKENDS.ring(name)} for name, row in BACKENDS.items()]


def recipes() -> list[Row]:
    """Return the recipes for `algorithm=recipe` and text policies with their source and training data."""
    from robopolicy.core.recipe_keys import DEFAULTS
    from robopolicy.recipe_files import read_recipe, recipe_names, recipe_ring

    plain = [(name, DEFAULTS | read_recipe(name)) for name in recipe_names()]
    return [
        {
            "name": name,
            "description": f"{recipe['title']}{_cited(recipe)}: "
            f"{recipe['implementation']}, learns from {recipe['data']}",
            "missing": "",
            "source": recipe["source"],
            "ring": recipe_ring(name),
        }
        for name, recipe in plain
    ]


def kinds() -> dict[str, Callable[[], list[Row]]]:
    """Return all listing functions: `KINDS`, then the components of commands."""
    return KINDS | {registry.kind: partial(_components, registry) for registry in extra_registries()}


KINDS: dict[str, Callable[[], list[Row]]] = {
    "tasks": tasks,
    "policies": policies,
    "algorithms": algorithms,
    "experiments": experiments,
    "backends": backends,
    "recipes": recipes,
}


def _row(name: str, registry: Registry[Any]) -> Row:
    return {"name": name, "description": registry.summary(name), "missing": "", "ring": registry.ring(name)}


def _components(registry: Registry[Any]) -> list[Row]:
    rows: list[Row] = []
    for name in registry:
        extra = registry.attribute(name, "extra") if _lacks(registry.attribute(name, "module")) else ""
        rows.append(_row(name, registry) | {"missing": extra})
    return rows


def _backend(name: str, row: Backend) -> Row:
    text = row.help if row.repeatable else f"{row.help}; episodes are not repeatable"
    label = f"{name}:{row.argument}" if row.argument else name
    return {"name": label, "description": text, "missing": row.extra if _lacks(row.module) else ""}


def _cited(recipe: Mapping[str, Any]) -> str:
    from robopolicy.citations import citation

    return f" ({citation(recipe['source'])})" if recipe["source"] else ""


def _remarks(row: Row) -> str:
    from robopolicy.sim.registry import SUCCESS

    parts = ["scripted expert"] if row.get("expert") else []
    parts += [f"backends: {', '.join(row['backends'])}"] if "backends" in row else []
    parts += [f"tried on {', '.join(row['tried_on'])}"] if "tried_on" in row else []
    parts += [f"settings for {', '.join(row['algorithms'])}"] if row.get("algorithms") else []
    parts += [SUCCESS[row["success"]]] if "success" in row else []
    parts += [f"data: {row['data'][:1].lower()}{row['data'][1:].rstrip('.')}"] if "data" in row else []
    return f" ({'; '.join(parts)})" if parts else ""


def _missing(entry: TaskEntry | TaskFamily) -> str:
    """Return the extra to install, if any."""
    return entry.requires if _lacks(entry.module or entry.requires) else ""


def _lacks(module: str) -> bool:
    return bool(module) and find_spec(module) is None
