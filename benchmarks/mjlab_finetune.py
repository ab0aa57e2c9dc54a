"""Fine-tuning in mjlab: a flow cloned from demonstrations of the cart-pole's swing-up, before and after ReinFlow.

    python -m benchmarks.mjlab_finetune --quick     # one seed, small budgets, nothing written
    python -m benchmarks.mjlab_finetune             # 3 seeds, about 6 CPU minutes each

40 demonstrations with noise on the executed actions, `experiment=mjlab_swingup_flow_bc`, then
`experiment=mjlab_swingup_reinflow` on the sparse reward, which counts the steps (of 200) in which the pole is upright.
Base and last checkpoint are evaluated on the same 256 episodes. The presets were chosen on seed 0, which is not among
the default seeds. Finished cells are skipped, and interrupted ones resume.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import print_result, write_result
from benchmarks.finetune.bases import HELD_OUT
from benchmarks.parallel import run_cells
from benchmarks.study import run_command, train_once
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.intervals import bootstrap_mean, student_mean
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy

TASK = "mjlab/cartpole_swingup_sparse"
WORK = Path("runs/mjlab_finetune")
QUICK = {"demonstrations": 4, "cloning": 5, "updates": 1, "episodes": 8}
FULL = {"demonstrations": 40, "cloning": 4000, "updates": 60, "episodes": 256}


def run(seed: int, size: dict[str, int], folder: Path) -> dict[str, Any]:
    """One cell: demonstrations, cloned base, fine-tuning, and the evaluation of both."""
    data, tuned = folder / f"data-{seed}", folder / f"finetuned-{seed}"
    if not data.exists():
        count = str(size["demonstrations"])
        words = ("--episodes", count, "--num-envs", count, "--seed", str(100_000 + 1_000 * seed))
        run_command("collect", TASK, *words, "--noise", "0.2", "--keep-failures", "--out", str(data))
    common = (f"seed={seed}", "threads=1", "evaluation.episodes=0")
    words = ("experiment=mjlab_swingup_flow_bc", f"dataset={data}", f"budget.updates={size['cloning']}")
    start = train_once(folder / f"base-{seed}", *words, *common)
    words = ("experiment=mjlab_swingup_reinflow", f"init_from={start}", f"budget.updates={size['updates']}")
    last = train_once(tuned, *words, *common)
    report = json.loads((tuned / "report.json").read_text(encoding="utf-8"))
    return {
        "method": "reinflow-mjlab",
        "seed": seed,
        "base": judge(start, size["episodes"]),
        "finetuned": judge(last, size["episodes"]),
        "env_steps": report["env_steps"],
        "seconds": round(report["seconds"], 1),
    }


def judge(checkpoint: Path, episodes: int) -> dict[str, float]:
    """Mean return of a checkpoint on held-out episodes, with its interval."""
    policy, _ = load_policy(checkpoint)
    with closing(make_sim(TASK, SimOptions(num_envs=episodes))) as sim:
        interval = bootstrap_mean(evaluate(policy, sim, episodes=episodes, seed=HELD_OUT).returns)
    return {"mean": interval.estimate, "low": interval.low, "high": interval.high}


def _progress(cell: dict[str, Any]) -> str:
    return f"{cell['base']['mean']:.0f} -> {cell['finetuned']['mean']:.0f} of 200 in {cell['seconds']:.0f} s"


def _text(found: dict[str, float]) -> str:
    return f"{found['mean']:.1f} [{found['low']:.1f}, {found['high']:.1f}]"


def main() -> None:
    """Run every missing seed, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, small budgets, no results written")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="parallel seeds, one thread each")
    arguments = parser.parse_args()
    size, folder = (QUICK, WORK / "quick") if arguments.quick else (FULL, WORK)
    cells = run_cells(
        [0] if arguments.quick else arguments.seeds,
        partial(run, size=size, folder=folder),
        name=lambda seed: f"mjlab_finetune/reinflow-swingup-{seed}",
        progress=_progress,
        jobs=arguments.jobs,
        keep=not arguments.quick,
    )
    rows: list[dict[str, object]] = [
        {
            "method": cell["method"],
            "seed": cell["seed"],
            "before": _text(cell["base"]),
            "after": _text(cell["finetuned"]),
            "environment steps": cell["env_steps"],
            "seconds": cell["seconds"],
        }
        for cell in cells
    ]
    gain = student_mean([cell["finetuned"]["mean"] - cell["base"]["mean"] for cell in cells])
    found = {"mean": gain.estimate, "low": gain.low, "high": gain.high}
    figures = {"task": TASK, "gain": found, "cells": cells}
    print_result("mjlab_finetune", rows, figures)
    if not arguments.quick:
        note = f"The mean return rises by {_text(found)} steps (95 % interval over seeds)."
        command = "python -m benchmarks.mjlab_finetune"
        write_result("mjlab_finetune", rows, figures, command=command, notes=[note])


if __name__ == "__main__":
    main()
