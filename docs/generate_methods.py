"""Turn `docs/methods.toml` into the readable `docs/methods.md`.

Run `python -m docs.generate_methods` after an edit of the table, and `--check` to see whether the page is up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docs.algorithm_sections import AlgorithmRow, Choice, render_algorithms, render_chooser, render_matrix
from docs.markdown import cite, table
from docs.measured import recipes_measured
from robopolicy import plugins
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.recipe_files import read_recipe, recipe_names

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "methods.toml"
PAGE = FOLDER / "methods.md"
THEME = re.compile(r"(?:robopolicy\.|tests/)contrib[./](\w+)[./]")  # in a symbol or a test id

STATUSES = {
    "works": "runs, tested against what the source claims or derives",
    "experimental": "runs and is tested, but has not reproduced what the source claims",
    "reconstructed": "runs and is tested; the source leaves details open, which we filled in",
    "nothing-to-run": "contains nothing that could be trained, tested or measured here",
}

HEADER = """\
<!-- Generated from docs/methods.toml by `python -m docs.generate_methods`; edit the table, not this page. -->
# Methods

What can be run comes first: what to use, which policy goes with it, and a section per algorithm. Behind it, every
published source that the project is built from, and the part it plays here.
"""

SOURCES = """\
## Sources

S000 to S183, with their entries in the [references](references.md). Symbols are written `module:Name`; every symbol and
test named below is resolved by the test suite.
"""

COLUMNS = ("source", "paper", "title", "part", "status", "where")

VERBS = """\
### Which verb a method needs

A policy implements the verbs that make sense for it (`robopolicy/policies/base.py`); a method asks for few of them.
"""


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    id: str  # S000 .. S183
    reference: str  # key in `docs/references.bib`
    title: str  # of the source, exactly
    family: str  # heading under which the row is printed
    part: str  # one sentence: what it becomes in this project
    symbols: list[str]  # "module:Name"
    tests: list[str]  # pytest ids
    benchmark: str  # name under `benchmarks/`, or empty
    status: str  # key of `STATUSES`
    note: str  # doubts, deviations, or why there is nothing to run


@dataclass(frozen=True)
class Verb:
    """One verb of the policy contract."""

    name: str
    shape: str  # of its result
    use: str
    methods: str  # who needs it


@dataclass(frozen=True)
class Tables:
    """Everything in `methods.toml`."""

    choices: list[Choice]
    algorithms: list[AlgorithmRow]
    verbs: list[Verb]
    methods: list[Method]


def load(path: Path = SOURCE, *, whole: bool = False) -> Tables:
    """Read the tables; an unknown or missing field is a `TypeError` that names it.

    Args:
        path: The file.
        whole: Whether to keep what belongs to themes of contrib that are not here (algorithms, and symbols and tests of
            sources); otherwise it is left out.
    """
    found: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text(encoding="utf-8"))
    tables = Tables(
        choices=[Choice(**row) for row in found["choose"]],
        algorithms=[AlgorithmRow(**row) for row in found["algorithm"]],
        verbs=[Verb(**row) for row in found["verb"]],
        methods=[Method(**row) for row in found["method"]],
    )
    return tables if whole else _without_absent_themes(tables)


def _without_absent_themes(tables: Tables) -> Tables:
    return replace(
        tables,
        choices=[replace(row, use=[name for name in row.use if name in ALGORITHMS]) for row in tables.choices],
        algorithms=[row for row in tables.algorithms if row.name in ALGORITHMS],
        methods=[replace(row, symbols=_present(row.symbols), tests=_present(row.tests)) for row in tables.methods],
    )


def _present(places: list[str]) -> list[str]:
    """Symbols or test ids without those of themes that are not here."""
    found = [(place, THEME.match(place)) for place in places]
    return [place for place, theme in found if theme is None or theme[1] in plugins.themes()]


def render(tables: Tables) -> str:
    """Return the page as Markdown."""
    parts = [
        HEADER,
        render_chooser(tables.choices),
        render_matrix([row.name for row in tables.algorithms]),
        render_algorithms(tables.algorithms),
        _sources(tables.methods, tables.verbs),
    ]
    return "\n".join(parts)


def _sources(methods: list[Method], verbs: list[Verb]) -> str:
    recipes = [(name, str(read_recipe(name).get("source", ""))) for name in recipe_names()]
    counts = Counter(method.status for method in methods)
    summary = [[status, str(counts[status]), meaning] for status, meaning in STATUSES.items()]
    needs = [[f"`{verb.name}`", verb.shape, verb.use, verb.methods] for verb in verbs]
    parts = [SOURCES, table(["status", "rows", "meaning"], summary), VERBS]
    parts.append(table(["verb", "result", "for", "methods"], needs))
    for family in sorted({method.family for method in methods}):
        rows = [_row(method, recipes) for method in methods if method.family == family]
        parts += [f"### {family[0].upper()}{family[1:]}\n", table(COLUMNS, rows)]
    return "\n".join(parts)


def _row(method: Method, recipes: list[tuple[str, str]]) -> list[str]:
    """Cells of a source; `recipes` are name and source of every text recipe."""
    part = f"{method.part} *{method.note}*" if method.note else method.part
    where = [f"`{name}`" for name in (*method.symbols, *method.tests)]
    if method.benchmark:
        where.append(f"benchmark `{method.benchmark}`")
    where += recipes_measured([name for name, source in recipes if source == method.reference])
    return [method.id, cite(method.reference), method.title, part, method.status, "<br>".join(where)]


def main() -> int:
    """Write the page, or with `--check` only compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if docs/methods.md is out of date")
    check = parser.parse_args().check
    page = render(load())
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write("docs/methods.md is out of date; run `python -m docs.generate_methods`.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
