"""One cell: offline training of a method on one single task with one seed, and its success along the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.ogbench.methods import Domain, Method
from robopolicy.training.compose import compose_config
from robopolicy.training.loop import resume_run, start_run

WORK = Path("runs/ogbench")
EVERY = 50_000  # updates between evaluations, as published
EPISODES = 50  # of every evaluation, as published
RESUME_EVERY = 2_000  # updates between resume points


def run_cell(
    method: Method, domain: Domain, task: int, seed: int, *, updates: int, data: Path, precision: str
) -> dict[str, Any]:
    """All table data of a run; an interrupted run continues from its last resume point."""
    folder = WORK / f"{method.name}-{domain.name}-task{task}-{updates}-{seed}"
    if not (folder / "report.json").exists():
        if (folder / "config.yaml").exists():
            trainer = resume_run(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # killed before the run began
            trainer = start_run(compose_config(settings(method, domain, task, seed, folder, updates, data, precision)))
        trainer.train()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {
        "method": method.name,
        "domain": domain.name,
        "task": task,
        "seed": seed,
        "updates": updates,
        "precision": precision,
        "success": curve(folder),
        "seconds": round(report["seconds"], 1),
    }


def settings(
    method: Method, domain: Domain, task: int, seed: int, folder: Path, updates: int, data: Path, precision: str
) -> list[str]:
    """Arguments of `robopolicy train`."""
    return [
        f"experiment=ogbench_{domain.preset}_{method.preset}",
        f"task.name={domain.task(task)}",
        f"dataset={data / f'{domain.name}-play-v0.npz'}",
        *method.settings,
        f"algorithm.precision={precision}",
        *(f"budget.updates={updates}", f"replay.offline_updates={updates}", f"seed={seed}"),
        *(f"evaluation.every={min(EVERY, updates)}", f"evaluation.episodes={EPISODES}", "guards.restore_best=false"),
        *(f"checkpoint_every={RESUME_EVERY}", "device=cpu", f"out={folder.parent}", f"name={folder.name}"),
    ]


def curve(folder: Path) -> dict[str, float]:
    """Success rate by the number of updates."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {str(row["update"]): row["eval/success"] for row in rows if row.get("update") and "eval/success" in row}
