"""The papers in `docs/references.bib`, and how pages cite them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "references.bib"
ACCENTS = {"'": "\u0301", "`": "\u0300", '"': "\u0308", "~": "\u0303", "^": "\u0302", "u": "\u0306"}

COMMANDS = {r"\pi": "π", r"\&": "&", r"\texttt": "", r"\textsuperscript": "", "$": ""}


@dataclass(frozen=True)
class Reference:
    """One entry of the bibliography."""

    key: str
    fields: dict[str, str]  # as written, e.g. `author`, `title`, `year`, `eprint`, `doi`

    @property
    def title(self) -> str:
        """Title as plain text."""
        return plain(self.fields["title"])

    @property
    def authors(self) -> str:
        """Family names: of one author, of two, or of the first of several."""
        names = [plain(name).split(",")[0] for name in self.fields["author"].split(" and ")]
        return " and ".join(names) if len(names) <= 2 and names[-1] != "others" else f"{names[0]} et al."

    @property
    def link(self) -> str:
        """Markdown link to the paper; empty where there is none."""
        if arxiv := self.fields.get("eprint"):
            return f"[arXiv:{arxiv}](https://arxiv.org/abs/{arxiv})"
        if doi := self.fields.get("doi"):
            return f"[doi:{doi}](https://doi.org/{doi})"
        url = self.fields.get("url")
        return f"<{url}>" if url else ""

    def cite(self) -> str:
        """Authors, year, title and link as Markdown."""
        parts = [f"{self.authors} {self.fields['year']}", f"*{self.title}*", self.link]
        return ", ".join(filter(None, parts))


def parse(text: str) -> list[Reference]:
    """Read entries that have one field per line, in the order of the file.

    Raises:
        ValueError: A line is neither blank nor part of such an entry.
    """
    found: list[Reference] = []
    fields: dict[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if fields is None:
            start = re.fullmatch(r"@\w+\{([\w-]+),", line)
            if start:
                fields = {}
                found.append(Reference(start[1], fields))
                continue
            wrong = bool(line)
        elif line == "}":
            fields, wrong = None, False
        else:
            field = re.fullmatch(r"  (\w+) = \{(.*)\},", line)
            wrong = field is None or field[1] in fields
            fields |= {field[1]: field[2]} if field else {}
        if wrong:
            raise ValueError(f"Line {number} is no part of an entry with one field per line: {line}")
    return found


@cache
def references() -> dict[str, Reference]:
    """Every paper of the bibliography by its key."""
    return {entry.key: entry for entry in parse(FILE.read_text(encoding="utf-8"))}


def plain(text: str) -> str:
    """`text` without braces, accent commands and mathematics of LaTeX."""
    for command, character in COMMANDS.items():
        text = text.replace(command, character)
    text = re.sub(r"""\\(['"`~^]|u )\{?\\?(\w)\}?""", lambda found: found[2] + ACCENTS[found[1].strip()], text)
    return unicodedata.normalize("NFC", re.sub(r"[{}]", "", text))
