"""Write measured numbers into the pages, between `<!-- measured NAME -->` and `<!-- end of NAME -->`.

Run `python -m docs.generate_numbers` after a benchmark, and `--check` to see whether the pages are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs import table_charts
from docs.markdown import table
from docs.measured import record

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/deployment/deploy.md",
    "docs/guide/fine_tune.md",
    "docs/guide/gpu_simulation.md",
    "docs/text/recipes.md",
    "docs/world_models/results.md",
    "robopolicy/contrib/drone_volleyball/README.md",
    "tasks/robopolicy_tasks/manipulation/README.md",
)
BLOCK = re.compile(r"(<!-- measured (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def comparisons() -> str:
    """One row per comparison, with the command that measures it."""
    rows = [*_speed(), *(_fine_tuning(method, task) for method, task in FINE_TUNING), _exports()]
    return table(["comparison", "result", "command"], [row for row in rows if row])


FINE_TUNING = (("reinflow", "lift"), ("dppo", "drawer"), ("expo", "lift"), ("dsrl_na", "pick_place"))


def experts(family: str) -> str:
    """Success of the scripted experts of a family of tasks."""
    rows = [[str(value) for value in row.values()] for row in record("experts")["rows"] if family in row["task"]]
    return table(["task", "episodes", "success of the expert [95 %]", "mean steps"], rows)


def shown_rows(name: str, columns: Mapping[str, str] | None = None) -> str:
    """A table: some of its columns under other names, or all of them."""
    rows = record(name).get("rows", [])
    if not rows:
        return f"Not measured yet: {_command(name)}.\n"
    columns = columns or {column: column for column in rows[0]}
    return table(list(columns.values()), [[str(row[column]) for column in columns] for row in rows])


def world_throughput() -> str:
    """Predicted frames per second of 64 environments, and the cost of a frame in units of the simulator."""
    rows = table_charts.shown(table_charts.CHARTS["world_throughput"], record("world_throughput")["rows"])
    columns = ("task", "source", "frames/s", "cost", "cost, drawn")
    cells = [[str(row[column]) for column in columns] for row in rows]
    return table(
        ["task", "source of frames", "frames/s [smallest, largest]", "cost", "cost against a drawn simulator"], cells
    )


COMPARED = {"difference [95 %]": "difference [95 %]", "verdict": "verdict"}
PARTS = {"method": "part", "part of": "of", "seeds": "seeds", "score [95 %]": "success [95 %]", **COMPARED}
STEPS = {"method": "learner", "seeds": "seeds", "score [95 %]": "KL of the first step [95 %]"}
STEPS |= {"update [95 %]": "KL of the first update [95 %]", "verdict": "verdict"}
RETURNS = {"method": "policy", "seeds": "seeds", "score [95 %]": "return [95 %]", **COMPARED}
WORLDS = {"task": "model", "policies": "policies", "seeds": "seeds", "score [95 %]": "Pearson [95 %]"}
WORLDS |= {"bias": "predicted - true success", "best policy": "the same of the best policy"}
"""Columns of the table of a study -> headings."""

BLOCKS: dict[str, Callable[[], str]] = {
    "demo": partial(shown_rows, "demo"),
    "comparisons": comparisons,
    "bridge": partial(shown_rows, "bridge"),
    "experts": partial(experts, "manipulation/"),
    "drills": partial(experts, "volley/"),
    "parts": partial(shown_rows, "parts", PARTS),
    "first_step": partial(shown_rows, "first_step", STEPS),
    "mjlab_finetune": partial(shown_rows, "mjlab_finetune", RETURNS),
    "world_throughput": world_throughput,
    "worldmodel": partial(shown_rows, "worldmodel", WORLDS),
    "worldmodel_policies": partial(shown_rows, "worldmodel_policies"),
}


PPO_THREADS = "ours with physics on one thread per core and the critic on a second thread, theirs on one thread"
SIMULATORS = (
    ("vs_envpool", "EnvPool", "one thread per core"),
    ("vs_sync", "gymnasium's `SyncVectorEnv`", "one thread"),
    ("vs_async", "`AsyncVectorEnv`", "one process per environment"),
)
"""Key of the ratio, name of the simulator and its threads."""


def _speed() -> list[list[str]]:
    """Speed of PPO and of the simulator, with the threads of both sides."""
    ppo, simulator = record("ppo_vs_sb3"), record("sim_throughput")
    robots = [name for name, found in ppo.items() if isinstance(found, dict) and "seeds" in found]
    what = f"Time of PPO against Stable-Baselines3, 1M steps, {ppo[robots[0]]['seeds']} seeds; {PPO_THREADS}"
    envs = f"HalfCheetah steps/s, {simulator['num_envs']} environments; ours on one thread per core"
    return [
        [what, "; ".join(_ppo(name, ppo[name]) for name in robots), _command("ppo_vs_sb3")],
        [envs, "; ".join(_simulator(simulator, *each) for each in SIMULATORS), _command("sim_throughput")],
    ]


def _ppo(name: str, found: Mapping[str, Any]) -> str:
    """Time and return on one robot, against Stable-Baselines3."""
    ours, theirs = (
        "{iqm:.0f} [{low:.0f}, {high:.0f}]".format(**found[learner]) for learner in ("robopolicy", "stable-baselines3")
    )
    ratio = "{value:.2f}x ({low:.2f} to {high:.2f} over the seeds)".format(**found["wall_ratio"])
    return f"{name} {ratio}, return {ours} against {theirs}"


def _simulator(found: Mapping[str, Any], key: str, name: str, threads: str) -> str:
    """Speed against another simulator."""
    value, low, high = found[key], found[f"{key}_low"], found[f"{key}_high"]
    return f"{value:.2f}x {name} ({low:.2f} to {high:.2f} over the turns; {threads})"


def _fine_tuning(method: str, task: str) -> list[str]:
    """Success of a fine-tuner and of its base, with the interval and the verdict over seeds, if there are enough."""
    entries = {(entry["method"], entry["task"]): entry for entry in record("finetune").get("entries", [])}
    found = entries.get((method, task))
    if found is None or found["p_adjusted"] is None:
        return []
    base = found["estimate"] - found["comparison"]["difference"]["estimate"]  # of the same seeds
    low, high = (f"{100 * found[bound]:.1f}" for bound in ("low", "high"))
    score = f"{100 * base:.1f} % -> {100 * found['estimate']:.1f} % [{low}, {high}]; {found['verdict']}"
    return [f"`{method}` on {task}, base `{found['baseline']}`, {found['n']} seeds", score, _command("finetune")]


def _exports() -> list[str]:
    found = record("latency")
    speedups = [float(row["faster by"].partition("x")[0]) for row in found["rows"]]
    what = f"Exported bundles against torch, {len(speedups)} policies, CPU time per chunk"
    result = f"{min(speedups)}x to {max(speedups)}x faster; largest difference {found['largest_parity']:.0e}"
    return [what, result, _command("latency")]


def render(text: str) -> str:
    """The page with the numbers of today."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


def _command(name: str) -> str:
    return f"`python -m benchmarks.{name}`"


def main() -> int:
    """Write the pages, or with `--check` only compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is out of date")
    check = parser.parse_args().check
    old: list[str] = []
    for name in PAGES:
        before = (ROOT / name).read_text(encoding="utf-8")
        after = render(before)
        if not check:
            (ROOT / name).write_text(after, encoding="utf-8")
        elif before != after:
            old.append(name)
    if old:
        sys.stderr.write(f"Out of date: {', '.join(old)}; run `python -m docs.generate_numbers`.\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
