"""The demo with several seeds: base and fine-tuned success on 200 held-out episodes each.

    python -m benchmarks.demo --quick      # one seed, nothing written
    python -m benchmarks.demo              # 5 seeds, about 2 minutes each on 2 cores

Every seed has its own demonstrations, weights and exploration; the held-out episodes are the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common import load_cell, made_on, print_result, save_cell, write_result
from examples import demo

NOTES = ["Brackets are Wilson's 95 % intervals over the held-out episodes of one seed."]


def run(seed: int) -> dict[str, Any]:
    """Run one demo and return its report."""
    out = Path("runs") / f"demo_seed{seed}"
    demo.main(["--out", str(out), "--seed", str(seed), "--video", "0"])
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def main() -> None:
    """Run every missing seed, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, no results written")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    for seed in range(1 if arguments.quick else arguments.seeds):
        name = f"demo/reinflow-lift-{seed}"
        report = None if arguments.quick else load_cell(name)
        if report is None:
            report = {**run(seed), "made_on": made_on()}
            if not arguments.quick:
                save_cell(name, report)
        reports.append(report)
    rows = [
        {"seed": report["seed"], "base": _rate(report["base"]), "fine-tuned": _rate(report["finetuned"])}
        for report in reports
    ]
    separated = [report["finetuned"]["low"] > report["base"]["high"] for report in reports]
    figures = {
        "task": demo.TASK,
        "seeds": [report["seed"] for report in reports],
        "base": [report["base"] for report in reports],
        "finetuned": [report["finetuned"] for report in reports],
        "separated": sum(separated),
        "seconds": [report["seconds"] for report in reports],
    }
    print_result("demo", rows, figures, cells=reports)
    if not arguments.quick:
        write_result("demo", rows, figures, command="python -m benchmarks.demo", notes=NOTES, cells=reports)


def _rate(rate: dict[str, Any]) -> str:
    return f"{rate['success']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]"


if __name__ == "__main__":
    main()
