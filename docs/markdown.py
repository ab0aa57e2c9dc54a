"""Pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

from collections.abc import Sequence

from robopolicy.citations import citation


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def section_link(name: str, page: str) -> str:
    """A link to the section of a page whose heading is the code `name`."""
    return f"[`{name}`]({page}#{name})"


def cite(key: str, folder: str = "") -> str:
    """A link from a page to an entry of the bibliography; `folder` is the path from the page to `docs`."""
    return f"[{citation(key)}]({folder}references.md#{key})"
