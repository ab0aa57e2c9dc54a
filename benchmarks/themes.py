"""Rows that contrib themes add to benchmark tables, by name: `contrib/<theme>/benchmarks.toml`.

    [control.methods]
    symphony = {family = "off-policy", policy = "swaddled", settings = ["algorithm.utd=1"]}

The modules that read the tables document them and the fields of their rows.
"""

from __future__ import annotations

import tomllib
from typing import Any

from robopolicy import plugins


def contributed(benchmark: str, table: str) -> dict[str, Any]:
    """Name -> row of all entries of themes for a table of a benchmark; imports nothing.

    Raises:
        ValueError: Two themes use one name.
    """
    found: dict[str, Any] = {}
    for theme, tables in _files().items():
        for name, row in tables.get(benchmark, {}).get(table, {}).items():
            if name in found:
                raise ValueError(f"{theme} adds '{name}' to {benchmark}.{table} as another theme does.")
            found[name] = row
    return found


def _files() -> dict[str, dict[str, Any]]:
    files = {name: theme.folder / "benchmarks.toml" for name, theme in plugins.themes().items()}
    return {name: tomllib.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
