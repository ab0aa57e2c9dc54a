"""Pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

from collections.abc import Sequence

from robopolicy.citations import citation


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def anchor(name: str) -> str:
    """A link to the section whose heading is the code `name`."""
    return f"[`{name}`](#{name})"


def cite(key: str) -> str:
    """A citation that leads from a page of `docs` to the entry of the bibliography."""
    return f"[{citation(key)}](references.md#{key})"
