"""One configuration with several seeds: the runs, and what they say together.

Scores are those of the runs' own evaluations. The best of a run was chosen by these very episodes, so its score is a
little too good; the final one is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import stratified_iqm
from robopolicy.evaluation.plots import learning_curves
from robopolicy.provenance import versions
from robopolicy.training.build import complete
from robopolicy.training.compose import read_config
from robopolicy.training.config import TrainConfig
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.loop import resume_run, start_run
from robopolicy.training.processes import in_processes

STAGES = ("base", "best", "final")
MEASURES = ("success", "return_mean")
ENOUGH = 5  # seeds, below which an interval over seeds is rough


def run_to_end(config: TrainConfig) -> Path:
    """Train a run, or what is missing of it; returns its folder.

    Raises:
        UserError: The configuration cannot be built, or its folder holds a run with other settings.
    """
    config = complete(config)
    folder = Path(config.out) / config.name
    if not (folder / "config.yaml").exists():
        start_run(config).train()
    elif read_config(folder / "config.yaml") != config:
        raise UserError(f"Run {folder} has other settings; choose another folder, or delete it.")
    elif not (folder / "report.json").exists():
        resume_run(folder).train()
    return folder


def run_seeds(config: TrainConfig, folder: Path, *, seeds: int, jobs: int) -> list[Path]:
    """Train `config` with consecutive seeds, those that are not there yet; returns their folders.

    Args:
        config: With the first of the seeds.
        folder: Where the runs lie.
        seeds: How many.
        jobs: Runs at a time, in processes of their own where there are several.
    """
    wanted = range(config.seed, config.seed + seeds)
    configs = [replace(config, seed=seed, out=str(folder), name=f"seed{seed}") for seed in wanted]
    if jobs == 1:
        return [run_to_end(each) for each in configs]
    complete(configs[0])  # what is wrong with it is said once, and here
    ended = dict.fromkeys(wanted, Path())
    for each, future in in_processes(run_to_end, configs, jobs=jobs):
        ended[each.seed] = future.result()
    return list(ended.values())


def summarise(folders: Sequence[Path]) -> dict[str, Any]:
    """What finished runs say together: every score by seed, its interquartile mean and the interval over seeds."""
    reports = [json.loads((folder / "report.json").read_text(encoding="utf-8")) for folder in folders]
    first = reports[0]
    return {
        **{key: first[key] for key in ("task", "policy", "algorithm", "total_updates")},
        "seeds": [report["seed"] for report in reports],
        **{stage: _scores([report[stage] for report in reports]) for stage in STAGES},
        "env_steps": [report["env_steps"] for report in reports],
        "seconds": [report["seconds"] for report in reports],
        "versions": versions(),
    }


def draw_curves(folders: Sequence[Path], path: Path, *, label: str) -> Path | None:
    """Draw the evaluations of the runs over their updates; None where nothing was evaluated."""
    runs = [read_jsonl(folder / "metrics.jsonl") for folder in folders]
    keys = {key for rows in runs for row in rows for key in row}
    for measure in MEASURES:
        if f"eval/{measure}" in keys:
            ends = ("eval/low", "eval/high") if measure == "success" else ("eval/return_low", "eval/return_high")
            return learning_curves(
                {label: runs},
                path,
                y=f"eval/{measure}",
                low=ends[0],
                high=ends[1],
                title=label,
                ylabel=measure.removesuffix("_mean"),
                percent=measure == "success",
            )
    return None


def _scores(summaries: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Scores at one stage of all runs, where they were evaluated."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        values = [summary[measure] for summary in summaries if summary is not None and summary[measure] is not None]
        if len(values) == len(summaries):
            score = stratified_iqm([values])
            found[measure] = {"value": score.estimate, "low": score.low, "high": score.high, "by_seed": values}
    return found or None
