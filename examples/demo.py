"""`make demo`: demonstrations -> flow policy -> RL fine-tuning -> evaluation -> verified checkpoint, in one command.

Every step is a `robopolicy` command, printed before it runs, so that the demo also lists the commands to type:

1. collect demonstrations of the scripted expert (few, so that imitation alone is not enough),
2. clone them into a flow policy (the base),
3. fine-tune it with ReinFlow on the sparse success reward,
4. evaluate both on the same held-out seeds, record videos, write plots and a report,
5. verify the fine-tuned checkpoint: its outputs are the same as at the time of saving.

    python -m examples.demo --out runs/demo --seed 0

It ends with `OUT/report.json`: `base` and `finetuned`, each `{success, low, high, n}` (Wilson, 95 %), and `seconds`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from robopolicy.atomic import write_text
from robopolicy.cli.main import main as robopolicy

TASK = "manipulation/lift"
DEMONSTRATIONS = 7
EPISODES = 200  # held-out seeds
HELD_OUT = 50_000  # first held-out seed; training evaluates from seed 10000 and collects from seed 1000000


def run(*words: str) -> None:
    """Print a command and run it; if it fails, the demo ends with its exit code."""
    print(f"\n$ robopolicy {shlex.join(words)}", flush=True)
    code = robopolicy(list(words))
    if code != 0:
        sys.exit(code)


def improve(out: Path, seed: int, settings: Sequence[str], video: int) -> None:
    """Run steps 1 to 5."""
    base, finetuned = out / "base", out / "finetuned"
    best = [str(folder / "checkpoints" / "best") for folder in (base, finetuned)]
    common = [f"out={out}", f"seed={seed}", *settings]
    count, first = str(DEMONSTRATIONS), str(100_000 + 1_000 * seed)
    run("collect", TASK, "--episodes", count, "--seed", first, "--out", str(out / "demonstrations"))
    start = ("experiment=few_demonstrations", f"task={TASK}", f"dataset={out / 'demonstrations'}")
    run("train", *start, "name=base", *common)
    run("train", "experiment=fine_tune", f"init_from={best[0]}", "name=finetuned", *common)
    run(
        *("eval", *best, "--episodes", str(EPISODES), "--seed", str(HELD_OUT)),
        *("--num-envs", "32", "--video", str(video), "--out", str(out / "evaluation")),
    )
    run("verify", best[1])


def summarise(out: Path, seed: int, seconds: float) -> dict[str, Any]:
    """Write `OUT/report.json` and the learning curve; returns the report."""
    from robopolicy.evaluation.plots import learning_curves

    evaluation = json.loads((out / "evaluation" / "report.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (out / "finetuned" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    learning_curves({"ReinFlow": [rows]}, out / "learning.png", title=f"Fine-tuning {TASK}")
    report = {
        "task": TASK,
        "seed": seed,
        **{
            name: {key: result["summary"][key] for key in ("success", "low", "high", "n")}
            for name, result in zip(("base", "finetuned"), evaluation["results"].values(), strict=True)
        },
        "seconds": round(seconds, 1),
        "comparison": evaluation["comparison"],
    }
    write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when the report is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the demo (replaced)")
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations, weights and exploration")
    parser.add_argument("--video", type=int, default=4, help="episodes to record as video; 0 for none")
    parser.add_argument("settings", nargs="*", help="further key=value settings of both training runs")
    args = parser.parse_args(argv)
    if args.out.exists() and not (args.out / "demonstrations").exists() and any(args.out.iterdir()):
        print(f"{args.out} exists and is not a demo; choose another --out.", file=sys.stderr)
        return 2
    shutil.rmtree(args.out, ignore_errors=True)
    start = time.monotonic()
    improve(args.out, args.seed, args.settings, args.video)
    report = summarise(args.out, args.seed, time.monotonic() - start)
    print()
    for name in ("base", "finetuned"):
        rate = report[name]
        print(
            f"{name:>10}: {rate['success']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}] of {rate['n']} held-out seeds"
        )
    print(f"   seconds: {report['seconds']}")
    print(f"    report: {args.out}/report.json, {args.out}/evaluation/report.html, {args.out}/learning.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
