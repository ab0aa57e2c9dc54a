"""GRPO by our core and by TRL's `GRPOTrainer`, from the same tiny model on the same prompts: rewards, speed and memory.

    python -m benchmarks.trl --quick      # one seed, 4 updates, nothing written; about a minute
    python -m benchmarks.trl              # 5 seeds, 60 updates each; about 20 minutes on 2 cores
    python -m benchmarks.trl --updates 20 --seeds 1

Every run is a separate process with one thread; our runs and TRL's alternate. Tokens per second count every answer
token twice, once generated and once trained, over the time between the ends of the first and the last update; memory is
the largest resident set of the process. The same code measures held-out accuracy of both results. Its intervals count
seeds; the trainers agree if the interval of the difference lies within five points of 0. The benchmark needs TRL (extra
`trl`) and exits with a message without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import print_result, write_result
from benchmarks.trl.sides import IMITATION, Setting, make_base
from robopolicy.evaluation.comparison import seed_interval
from robopolicy.evaluation.intervals import Interval, student_mean

Run = dict[str, Any]
SIDES = ("robopolicy", "trl")
TARGET_SPEED, TARGET_MEMORY = 1.5, 0.8  # ours divided by TRL's
MARGIN = 0.05  # of accuracy, within which trainers agree


def main() -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 4 updates, no results written")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    arguments = parser.parse_args()
    if find_spec("trl") is None:
        sys.exit("This benchmark compares with TRL, which is not installed; run: pip install 'robopolicy[trl]'.")
    updates, seeds = (4, [1]) if arguments.quick else (arguments.updates, arguments.seeds)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        make_base(base, 20 if arguments.quick else IMITATION)
        runs = [run_side(side, base, Setting(seed, updates), Path(place)) for seed in seeds for side in SIDES]
    print_result("trl", rows(runs), figures(runs))
    if not arguments.quick:
        write_result("trl", rows(runs), figures(runs), command=f"python -m benchmarks.trl --updates {updates}")


def run_side(side: str, base: Path, setting: Setting, place: Path) -> Run:
    """One run in a separate process."""
    out = place / f"{side}-{setting.seed}.json"
    words = [sys.executable, "-m", "benchmarks.trl.sides", side, str(base), str(out)]
    words += [str(setting.seed), str(setting.updates)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(words, check=True, stdout=sys.stderr, env=environment)
    run = json.loads(out.read_text(encoding="utf-8"))
    print(f"{side} seed {setting.seed}: {run['tokens_per_s']:,.0f} tokens/s, {run['memory_mib']:,.0f} MiB", flush=True)
    return run


def rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    """One row per side."""
    return [
        {
            "trainer": side,
            "seeds": len(own),
            "accuracy": f"{_accuracy(own):.1%}",
            "reward, last third": round(fmean(run["reward"] for run in own), 3),
            "tokens/s": round(fmean(run["tokens_per_s"] for run in own)),
            "peak MiB": round(fmean(run["memory_mib"] for run in own)),
        }
        for side in SIDES
        for own in [[run for run in runs if run["side"] == side]]
    ]


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Ratios of ours to TRL's, per seed and on average, and whether rewards agree."""
    ours, theirs = ([run for run in runs if run["side"] == side] for side in SIDES)
    speed = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)]
    memory = [a["memory_mib"] / b["memory_mib"] for a, b in zip(ours, theirs, strict=True)]
    difference = student_mean([fmean(a["correct"]) - fmean(b["correct"]) for a, b in zip(ours, theirs, strict=True)])
    return {
        "seeds": [run["seed"] for run in ours],
        "updates": ours[0]["updates"],
        "speed": {"value": fmean(speed), "low": min(speed), "high": max(speed)},
        "memory": {"value": fmean(memory), "low": min(memory), "high": max(memory)},
        "accuracy_difference": {"value": difference.estimate, "low": difference.low, "high": difference.high},
        "reached": {
            "speed": fmean(speed) >= TARGET_SPEED,
            "memory": fmean(memory) <= TARGET_MEMORY,
            "agree": difference.low > -MARGIN and difference.high < MARGIN,
        },
        "runs": [{key: value for key, value in run.items() if key != "correct"} for run in runs],
    }


def _accuracy(runs: Sequence[Run]) -> Interval:
    """Accuracy of the most likely answers to held-out prompts, mean over the seeds."""
    return seed_interval({run["seed"]: run["correct"] for run in runs}).within(0.0, 1.0)


if __name__ == "__main__":
    main()
