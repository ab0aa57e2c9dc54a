"""Records of steps: rows in `STEP.json`, written after every row, and the page `gpu.md` of all steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import PACKAGES, Row, as_text, machine, plain
from robopolicy.atomic import write_text
from robopolicy.versions import versions

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Options:
    """Device and sizes of all steps."""

    device: str
    quick: bool  # tiny sizes, which run all code and measure nothing
    results: Path  # folder of the records; the page lies next to it
    work: Path  # runs and demonstrations


@dataclass(frozen=True)
class Step:
    """One measurement."""

    question: str  # heading on the page
    run: Callable[[Options], Iterator[Row]]
    seconds: int  # time limit


def load_record(name: str, options: Options) -> dict[str, Any] | None:
    """The record of a step; None if it has not run."""
    path = options.results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def save_record(name: str, record: Mapping[str, Any], options: Options) -> None:
    """Write the record of a step."""
    options.results.mkdir(parents=True, exist_ok=True)
    write_text(options.results / f"{name}.json", json.dumps(plain(record), indent=2) + "\n")


def run_step(name: str, step: Step, options: Options) -> None:
    """Run a step in this process and write its record after every row; `error` is None after the last one."""
    packages = (*PACKAGES, "warp-lang", "mujoco-warp")
    record: dict[str, Any] = {"step": name, "error": UNFINISHED, "quick": options.quick, "seconds": 0.0, "rows": []}
    record |= {"versions": versions(packages), "machine": {**machine(), **describe_gpu(options.device)}}
    save_record(name, record, options)
    start = time.monotonic()
    try:
        for row in step.run(options):
            record["rows"].append(dict(row))
            record["seconds"] = round(time.monotonic() - start, 1)
            save_record(name, record, options)
        record["error"] = None
    except Exception as error:  # whatever fails, the next step runs
        record["error"] = one_line(error)
    record["seconds"] = round(time.monotonic() - start, 1)
    save_record(name, record, options)


def one_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else '-'}"


def describe_gpu(device: str) -> dict[str, object]:
    """Name, memory, driver and CUDA version of the GPU; only the device where it is none."""
    if torch.device(device).type != "cuda":
        return {"device": device}
    properties = torch.cuda.get_device_properties(torch.device(device))
    found: dict[str, object] = {
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return found


def write_page(steps: Mapping[str, Step], options: Options) -> Path:
    """Write `gpu.md` from the records that exist."""
    lines = ["# gpu", "", "`make gpu`; every section is one step in a process of its own.", ""]
    described: dict[str, Any] = {}
    for name, step in steps.items():
        lines += [f"## {step.question}", ""]
        record = load_record(name, options)
        if record is None:
            lines += [f"`{name}` has not run.", ""]
            continue
        if (now := {"machine": record["machine"], "versions": record["versions"]}) != described:
            described = now
            lines += [", ".join(f"{key} {value}" for part in now.values() for key, value in part.items()) + ".", ""]
        status = f"failed: {record['error']}" if record["error"] else "finished"
        sizes = ", tiny sizes" if record["quick"] else ""
        lines += [f"`{name}`{sizes}: {status} after {record['seconds']:.0f} s.", "", *table(record["rows"])]
    path = options.results.parent / "gpu.md"
    write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def table(rows: list[Row]) -> list[str]:
    """Lines of a Markdown table with the columns of all rows; none without rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    body = [" | ".join(as_text(row.get(key, "-")).replace("|", "/") for key in columns) for row in rows]
    if not rows:
        return []
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {line} |" for line in body), ""]
