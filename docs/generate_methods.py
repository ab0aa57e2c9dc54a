"""Generate the pages of `docs/methods` from `docs/methods.toml` and the classes of the algorithms.

Run `python -m docs.generate_methods` after an edit of the table, and `--check` to see whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from docs.algorithm_sections import (
    AlgorithmRow,
    Choice,
    render_algorithm,
    render_chooser,
    render_matrix,
    render_preparations,
)
from docs.evidence import EVIDENCE, TEXT, evidence, pointers
from docs.markdown import cite, table
from docs.measured import recipes_measured
from robopolicy import plugins
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.recipe_files import read_recipe, recipe_names

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "methods.toml"
PAGES = FOLDER / "methods"
THEME = re.compile(r"(?:robopolicy\.|tests/)contrib[./](\w+)[./]")  # in a symbol or a test id

IMPLEMENTATIONS = {
    "complete": "runs, tested against what the source derives",
    "partial": "runs and is tested; the note names parts of the source that are left out",
    "reconstructed": "runs and is tested; the source leaves details open, which we filled in",
    "none": "contains nothing that could be trained, tested or measured here",
}

GENERATED = (
    "<!-- Generated from docs/methods.toml by `python -m docs.generate_methods`; edit the table, not this page. -->\n"
)

INDEX = """\
# Methods

Start with the table of what to use. Each family has one page with its algorithms and its published sources.
[Which policy goes with which algorithm](compatibility.md) is a table of its own, and so are all
[references](../references.md).
"""

FAMILIES = """\
## Families
"""

SECTIONS = """\
The section of an algorithm names its data, when to use it, deviations from the paper, our results and a command.
"Deviations" gives the paper's default in brackets where ours differs. Papers that are not in the table of sources are
the basis of other sources or compared with them.
"""

STATUS = """\
## Implementation and evidence of a source

The implementation is described by hand. The evidence is computed from committed results: verdicts over training seeds,
corrected for the number of comparisons in a table ([benchmarks](../benchmarks.md)). Symbols are written `module:Name`.
The test suite resolves every symbol, every test and every row of a benchmark that a page names.
"""

VERBS = """\
## Which verb a method needs

A policy implements the verbs that make sense for it (`robopolicy/policies/base.py`). A method needs few of them.
"""

COLUMNS = ("paper", "title", "part", "implementation", "evidence", "where")


@dataclass(frozen=True)
class Page:
    """One page of `docs/methods`."""

    file: str  # name without suffix
    title: str
    summary: str  # one sentence
    families: list[str]  # of algorithms and sources on the page, in this order


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    id: str  # S000 .. S183
    reference: str  # key in `docs/references.bib`
    title: str  # of the source, exactly
    family: str  # which page the row is on
    part: str  # one sentence: what it becomes in this project
    symbols: list[str]  # "module:Name"
    tests: list[str]  # pytest ids
    benchmarks: list[str]  # its rows `BENCHMARK/ROW`; its recipes are rows of the study of texts without being named
    implementation: str  # key of `IMPLEMENTATIONS`
    note: str  # doubts, deviations, or why there is nothing to run

    def pointers(self, recipes: list[tuple[str, str]]) -> list[str]:
        """All rows of benchmarks that measure it; `recipes` are name and source of every text recipe."""
        own = [name for name, source in recipes if source == self.reference]
        return pointers(self.benchmarks, own, _text_rows())


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

    pages: list[Page]
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
        pages=[Page(**row) for row in found["page"]],
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
    """Symbols or test ids, except in themes that are not here."""
    found = [(place, THEME.match(place)) for place in places]
    return [place for place, theme in found if theme is None or theme[1] in plugins.themes()]


def render(tables: Tables) -> dict[Path, str]:
    """All pages as Markdown, by file."""
    owner = {family: f"{page.file}.md" for page in tables.pages for family in page.families}
    algorithm_pages = {row.name: owner[row.family] for row in tables.algorithms}
    recipes = [(name, str(read_recipe(name).get("source", ""))) for name in recipe_names()]
    pages = {f"{page.file}.md": _page(page, tables, recipes) for page in tables.pages}
    pages["README.md"] = _index(tables, algorithm_pages, recipes)
    pages["compatibility.md"] = render_matrix(algorithm_pages)
    return {PAGES / name: f"{GENERATED}{text}" for name, text in pages.items()}


def _index(tables: Tables, algorithm_pages: dict[str, str], recipes: list[tuple[str, str]]) -> str:
    rows = []
    for page in tables.pages:
        counts = [sum(row.family in page.families for row in group) for group in (tables.algorithms, tables.methods)]
        rows.append([f"[{page.title}]({page.file}.md)", page.summary, *map(str, counts)])
    implementations = Counter(method.implementation for method in tables.methods)
    found = Counter(evidence(method.pointers(recipes)) for method in tables.methods)
    summaries = [
        [[f"`{name}`", str(counts[name]), meaning] for name, meaning in meanings.items()]
        for counts, meanings in ((implementations, IMPLEMENTATIONS), (found, EVIDENCE))
    ]
    needs = [[f"`{verb.name}`", verb.shape, verb.use, verb.methods] for verb in tables.verbs]
    parts = [INDEX, render_chooser(tables.choices, algorithm_pages)]
    parts += [FAMILIES, table(["family", "content", "algorithms", "sources"], rows), SECTIONS, render_preparations()]
    parts += [VERBS, table(["verb", "result", "for", "methods"], needs)]
    parts += [
        STATUS,
        *(table([name, "rows", "meaning"], rows) for name, rows in zip(COLUMNS[3:5], summaries, strict=True)),
    ]
    return "\n".join(parts)


def _page(page: Page, tables: Tables, recipes: list[tuple[str, str]]) -> str:
    parts = [
        f"# {page.title}\n",
        f"{page.summary} The [index](README.md) explains sections, commands, implementation and evidence.\n",
    ]
    parts += [render_algorithm(row) for row in tables.algorithms if row.family in page.families]
    sources = [row for row in tables.methods if row.family in page.families]
    if sources:
        parts.append("## Sources\n")
    for family in page.families:
        rows = [_row(row, recipes) for row in sources if row.family == family]
        if len(page.families) > 1:
            parts.append(f"### {family}\n")
        if rows:
            parts.append(table(COLUMNS, rows))
    return "\n".join(parts)


def _row(method: Method, recipes: list[tuple[str, str]]) -> list[str]:
    """Cells of a source; `recipes` are name and source of every text recipe."""
    part = f"{method.part} *{method.note}*" if method.note else method.part
    where = [f"`{name}`" for name in (*method.symbols, *method.tests)]
    own = [name for name, source in recipes if source == method.reference]
    places = method.pointers(recipes)
    where += [f"benchmark `{place}`" for place in places] + recipes_measured(own)
    state = [method.implementation, evidence(places)]
    return [cite(method.reference, "../"), method.title, part, *state, "<br>".join(where)]


@cache
def _text_rows() -> list[str]:
    """Rows of the study of text recipes."""
    from benchmarks.studies import load_study

    return load_study(TEXT).methods


def outdated(pages: dict[Path, str]) -> list[Path]:
    """Files in `docs/methods` that are missing, differ from `pages`, or are not among them."""
    stale = [file for file, text in pages.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    return stale + sorted(set(PAGES.glob("*.md")) - pages.keys())


def main() -> int:
    """Write the pages, or with `--check` only compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page in docs/methods is out of date")
    check = parser.parse_args().check
    pages = render(load())
    stale = outdated(pages)
    if check and stale:
        names = ", ".join(file.name for file in stale)
        sys.stderr.write(f"Out of date in docs/methods: {names}; run `python -m docs.generate_methods`.\n")
        return 1
    PAGES.mkdir(exist_ok=True)
    for file in stale:
        if file in pages:
            file.write_text(pages[file], encoding="utf-8")
        else:
            file.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
