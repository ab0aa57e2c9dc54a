"""Turn `docs/references.bib` into the page `docs/references.md` and into the citations that the package shows.

Run `python -m docs.references` after an edit of the bibliography, and `--check` to see whether both are up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import bibtexparser
from bibtexparser.middlewares import SeparateCoAuthors, SplitNameParts
from pylatexenc.latex2text import LatexNodes2Text

from robopolicy.citations import TABLE

SOURCE = Path(__file__).parent / "references.bib"
PAGE = Path(__file__).parent / "references.md"
SHOWN = 6  # authors of an entry on the page; of more the first is shown

HEADER = """\
<!-- Generated from docs/references.bib by `python -m docs.references`; edit the bibliography, not this page. -->
# References

Code cites by authors and year, pages link to the entry here. The year is the year of the first public version; where a
method was published later at a conference or in a journal, the entry names it.

"""

LINKS = {"eprint": "https://arxiv.org/abs/", "doi": "https://doi.org/", "url": ""}


@dataclass(frozen=True)
class Reference:
    """One entry of the bibliography, without LaTeX."""

    key: str
    authors: list[str]  # "Given Family", or the name of a group
    families: list[str]  # of the authors, by which they are cited
    title: str
    year: str
    published: str  # where, as far as it is known and not a preprint
    link: str  # to the preprint, the publisher or a page; empty if there is none

    @property
    def citation(self) -> str:
        """The short form, `Zhang et al. 2025`."""
        first, *others = self.families
        names = first if not others else f"{first} and {others[0]}" if len(others) == 1 else f"{first} et al."
        return f"{names} {self.year}"


@cache
def references(path: Path = SOURCE) -> dict[str, Reference]:
    """All entries by key, in the order of the file.

    Raises:
        ValueError: Part of the file is no entry, or a key stands there twice.
    """
    library = bibtexparser.parse_file(str(path), append_middleware=[SeparateCoAuthors(), SplitNameParts()])
    if library.failed_blocks:
        raise ValueError(f"{path.name}: {library.failed_blocks[0].error}")
    return {entry.key: _reference(entry.key, {f.key: f.value for f in entry.fields}) for entry in library.entries}


def render(entries: Sequence[Reference]) -> str:
    """The page as Markdown, an entry per line with the key as its anchor."""
    return HEADER + "".join(f"- {_line(entry)}\n" for entry in entries)


def _line(entry: Reference) -> str:
    *others, last = entry.authors
    if len(entry.authors) > SHOWN or last == "others":
        names = f"{entry.authors[0]} et al."
    else:
        names = f"{', '.join(others)} and {last}" if others else last
    title = f"[{entry.title}]({entry.link})" if entry.link else entry.title
    published = f" {entry.published}." if entry.published else ""
    return f'<a id="{entry.key}"></a>{names} ({entry.year}). {title}.{published} `{entry.key}`'


def _reference(key: str, fields: dict[str, object]) -> Reference:
    found = {name: _plain(value) for name, value in fields.items() if isinstance(value, str)}
    authors = fields["author"]
    assert isinstance(authors, list)
    place = next((found[name] for name in ("note", "journal", "booktitle", "institution") if name in found), "")
    address = next((prefix + str(fields[name]) for name, prefix in LINKS.items() if name in fields), "")
    return Reference(
        key=key,
        authors=[_joined([*name.first, *name.von, *name.last, *name.jr]) for name in authors],
        families=[_joined([*name.von, *name.last]) for name in authors],
        title=found["title"].rstrip("."),
        year=found["year"],
        published=place.rstrip("."),
        link=address.replace("<", "%3C").replace(">", "%3E").replace("(", "%28").replace(")", "%29"),
    )


def _joined(parts: Sequence[str]) -> str:
    return _plain(" ".join(parts))


def _plain(text: str) -> str:
    return LatexNodes2Text().latex_to_text(text).strip()


def pages() -> dict[Path, str]:
    """What the bibliography becomes: each generated file and its text."""
    entries = references()
    table = {key: entry.citation for key, entry in entries.items()}
    return {
        PAGE: render([*entries.values()]),
        TABLE: json.dumps(table, indent=0, ensure_ascii=False) + "\n",
    }


def main() -> int:
    """Write the files, or with `--check` only compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a generated file is out of date")
    check = parser.parse_args().check
    stale = [(file, text) for file, text in pages().items() if not file.is_file() or file.read_text("utf-8") != text]
    if check and stale:
        names = ", ".join(file.name for file, _ in stale)
        sys.stderr.write(f"Out of date: {names}; run `python -m docs.references`.\n")
        return 1
    for file, text in stale:
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
