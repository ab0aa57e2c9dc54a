"""Shared parts of the benchmarks: table, JSON last line, committed results and cells that survive interruptions.

Rows are dictionaries with the same keys, one per line of the table. Figures are the numbers to quote: plain numbers,
`low` and `high`, seeds. Results state the processors and versions of their runs: of the cells of the table, or of this
process if it measured the whole table.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from robopolicy.atomic import write_text
from robopolicy.evaluation.comparison import cluster_bootstrap
from robopolicy.evaluation.intervals import Interval, iqm
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.vector_env import core_count
from robopolicy.versions import versions

if TYPE_CHECKING:
    from robopolicy.evaluation.result import EvalResult

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "robopolicy",
    "torch",
    "numpy",
    "mujoco",
    "gymnasium",
    "envpool",
    "onnxruntime",
    "stable-baselines3",
    "mjlab",
    "rsl-rl-lib",
    "transformers",
    "trl",
)

Row = Mapping[str, object]
Cell = Mapping[str, Any]  # result of one run
Act = Callable[[Observation], Tensor]  # observations of N environments -> actions (N, A)


def brackets(of: str = "turns") -> str:
    """Note below a table whose brackets are no confidence intervals."""
    return f"Brackets are the smallest and the largest of the {of}, no confidence intervals."


def runs_iqm(scores: Sequence[float]) -> Interval:
    """Interquartile mean of one score per run, with an interval from resampled runs; see `cluster_bootstrap`."""
    return cluster_bootstrap({run: [score] for run, score in enumerate(scores)}, iqm)


@torch.no_grad()
def mean_return(act: Act, sim: VectorSim) -> float:
    """Mean return of the first episode in each environment of the simulator.

    For learners of other libraries, which are no actors of `evaluate`.
    """
    obs = sim.reset(10_000)
    total = torch.zeros(sim.num_envs, device=sim.device)
    alive = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
    while bool(alive.any()):
        step = sim.step(act(obs))
        total += step.reward * alive
        alive &= ~step.done
        obs = step.obs
    return float(total.mean())


def outcomes(result: EvalResult) -> list[int]:
    """Success of every episode, 0 or 1."""
    assert result.success is not None
    return result.success.astype(int).tolist()


def machine() -> dict[str, object]:
    """Processor model, usable cores and memory; rates depend on them."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    described: dict[str, object] = {"cpu": model, "cores": core_count(), "system": platform.system()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        described["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    return described


def made_on() -> dict[str, object]:
    """Processor and versions with which a cell ran; a table may be written elsewhere."""
    return {"cpu": machine()["cpu"], **versions(("robopolicy", "torch", "mujoco"))}


def made_by(cells: Iterable[Cell]) -> list[dict[str, object]]:
    """Number of cells per processor and versions, the most frequent first; only the number if they are not recorded."""
    found = Counter(tuple(cell.get("made_on", {}).items()) for cell in cells)
    return [{"cells": count, **dict(made)} for made, count in found.most_common()]


def made_by_text(cells: Iterable[Cell]) -> str:
    """The same as a sentence."""
    parts: list[str] = []
    for group in made_by(cells):
        count, cpu = group.pop("cells"), group.pop("cpu", None)
        used = ", ".join(f"{key} {value}" for key, value in group.items())
        parts.append(f"{count} not recorded" if cpu is None else f"{count} on {cpu} with {used}")
    return f"Cells by processor and versions: {'; '.join(parts)}."


def print_result(
    name: str, rows: Sequence[Row], figures: Mapping[str, Any], *, cells: Sequence[Cell] | None = None
) -> None:
    """Print the table and, as the last line, one JSON object; `cells` as in `write_result`."""
    table = Table(title=name)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(as_text(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(json.dumps(plain(_record(name, figures, cells))), flush=True)


def write_result(
    name: str,
    rows: Sequence[Row],
    figures: Mapping[str, Any],
    *,
    command: str,
    protocol: Sequence[str] = (),
    notes: Sequence[str] = (),
    cells: Sequence[Cell] | None = None,
) -> None:
    """Write `results/NAME.json` and the Markdown table `results/NAME.md`, with its protocol and notes below.

    The page of all benchmarks shows the notes as well; it states the protocol once. `cells` are the runs of the table,
    whose processors and versions it states. Without them, this process has measured the table.
    """
    record = _record(name, figures, cells)
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = json.dumps(plain({**record, "command": command, "rows": list(rows), "notes": list(notes)}), indent=2)
    write_text(RESULTS / f"{name}.json", content + "\n")
    columns = list(rows[0]) if rows else []
    if cells is None:
        used = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
        made = f"`{command}` on {record['machine']['cpu']}, {record['machine']['cores']} cores. Versions: {used}."
    else:
        made = f"`{command}`. {made_by_text(cells)}"
    lines = [
        f"# {name}",
        "",
        made,
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(as_text(value) for value in row.values())} |" for row in rows),
        *(["", *(f"- {line}" for line in (*protocol, *notes))] if protocol or notes else []),
    ]
    write_text(RESULTS / f"{name}.md", "\n".join(lines) + "\n")


def load_cell(name: str) -> dict[str, Any] | None:
    """A finished cell `BENCHMARK/method-task-seed`, or None if it still has to run."""
    path = RESULTS / "cells" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def finished_cells(names: Iterable[str]) -> list[dict[str, Any]]:
    """The cells of `names` that have run."""
    return [cell for cell in map(load_cell, names) if cell is not None]


def cells_named(beginning: str) -> list[dict[str, Any]]:
    """The finished cells whose names start with `beginning`, sorted by name."""
    folder = RESULTS / "cells"
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{beginning}*.json"))]


def save_cell(name: str, cell: Mapping[str, Any]) -> None:
    """Store a finished cell, so that an interrupted benchmark can continue."""
    save_json(RESULTS / "cells" / f"{name}.json", cell)


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write plain numbers atomically."""
    write_text(path, json.dumps(plain(content), indent=2) + "\n")


def _record(name: str, figures: Mapping[str, Any], cells: Sequence[Cell] | None) -> dict[str, Any]:
    here = {"versions": versions(PACKAGES), "machine": machine()} if cells is None else {"made_on": made_by(cells)}
    return {"benchmark": name, **figures, **here}


def plain(value: Any) -> Any:
    """JSON has no infinities and no numpy: non-finite numbers become null, numpy scalars and arrays become plain."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(value: object) -> str:
    """Cell of a table: three digits of a number, thousands in full."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
