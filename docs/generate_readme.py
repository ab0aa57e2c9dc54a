"""Write measured numbers into README.md, between `<!-- measured NAME -->` and `<!-- end of NAME -->`.

Run `python -m docs.generate_readme` after a benchmark, and `--check` to see whether the page is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.markdown import table
from docs.measured import RESULTS

PAGE = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- measured (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def demo() -> str:
    """Success before and after fine-tuning, one row per seed of the demo."""
    return table(
        ["seed", "base", "fine-tuned"], [[str(value) for value in row.values()] for row in _record("demo")["rows"]]
    )


def comparisons() -> str:
    """One row per comparison, with the command that measures it."""
    rows = [*_speed(), *(_fine_tuning(method, task) for method, task in FINE_TUNING), _exports()]
    return table(["comparison", "result", "command"], [row for row in rows if row])


FINE_TUNING = (("reinflow-flow-10", "lift"), ("expo", "lift"), ("dsrl_na-diffusion", "drawer"))
BLOCKS: dict[str, Callable[[], str]] = {"demo": demo, "comparisons": comparisons}


def _speed() -> list[list[str]]:
    ppo, simulator = _record("ppo_vs_sb3"), _record("sim_throughput")
    found = ppo["HalfCheetah-v5"]
    ours, theirs = (
        "{iqm:.0f} [{low:.0f}, {high:.0f}]".format(**found[name]) for name in ("robopolicy", "stable-baselines3")
    )
    ratio = "{value:.2f}x [{low:.2f}, {high:.2f}]".format(**found["wall_ratio"])
    steps = simulator["vs_async"], simulator["vs_async_low"], simulator["vs_async_high"]
    task = f"PPO against Stable-Baselines3, HalfCheetah-v5, 1M steps, {found['seeds']} seeds"
    envs = f"HalfCheetah steps/s against gymnasium's `AsyncVectorEnv`, {simulator['num_envs']} environments"
    return [
        [task, f"{ratio} its time; return {ours} against {theirs}", _command("ppo_vs_sb3")],
        [envs, "{:.2f}x [{:.2f}, {:.2f}]".format(*steps), _command("sim_throughput")],
    ]


def _fine_tuning(method: str, task: str) -> list[str]:
    """Success of a fine-tuner and of its base, with the interval and the verdict over seeds."""
    entries = {(entry["method"], entry["task"]): entry for entry in _record("finetune")["entries"]}
    found = entries.get((method, task))
    if found is None:
        return []
    base = entries[found["baseline"], task]
    low, high = (f"{100 * found[bound]:.1f}" for bound in ("low", "high"))
    score = f"{100 * base['estimate']:.1f} % -> {100 * found['estimate']:.1f} % [{low}, {high}]; {found['verdict']}"
    return [f"`{method}` on {task}, base `{found['baseline']}`, {found['n']} seeds", score, _command("finetune")]


def _exports() -> list[str]:
    record = _record("latency")
    speedups = [float(row["faster by"].partition("x")[0]) for row in record["rows"]]
    what = f"Exported bundles against torch, {len(speedups)} policies, CPU time per chunk"
    result = f"{min(speedups)}x to {max(speedups)}x faster; largest difference {record['largest_parity']:.0e}"
    return [what, result, _command("latency")]


def render(text: str) -> str:
    """The page with the numbers of today."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


def _record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _command(name: str) -> str:
    return f"`python -m benchmarks.{name}`"


def main() -> int:
    """Write the page, or with `--check` only compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if README.md is out of date")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = render(before)
    if not check:
        PAGE.write_text(after, encoding="utf-8")
    elif before != after:
        sys.stderr.write("README.md is out of date; run `python -m docs.generate_readme`.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
