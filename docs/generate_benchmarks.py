"""Generate `docs/benchmarks.md` and its charts from `benchmarks/results`.

Run `python -m docs.generate_benchmarks` after a benchmark, and `--check` to see whether the page is up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import as_text
from benchmarks.studies import STUDIES, load_study
from docs import table_charts
from docs.markdown import table
from docs.measured import record
from docs.study_curves import draw_curves, has_curves
from docs.study_pages import caption, draw, is_study, summary

PAGE = Path(__file__).parent / "benchmarks.md"
CHARTS = Path(__file__).parent / "charts"

HEADER = """\
<!-- Generated from benchmarks/results by `python -m docs.generate_benchmarks`; edit neither the tables nor this page.
-->
# Benchmarks

Every table is the output of one command and is generated from `benchmarks/results`. In studies the unit is the training
seed: intervals (95 %) and verdicts count seeds, a verdict needs five per side and is corrected for the number of
comparisons in its table, and "level" means that no difference was found. Methods whose mechanism could not act have no
verdict. The null arm is the share of tables with a difference where none exists. Other tables compare speeds or show
single systems. Times depend on the machine, and so do their ratios.
"""

SECTIONS = {
    "Fine-tuning and imitation": (
        *("demo", "finetune", "update_time", "few_step", "takeover", "ogbench", "offline", "pixels"),
        *("mjlab_finetune", "parts", "first_step"),
    ),
    "Learning from scratch": (
        *("control", "control_million", "her", "ppo_vs_sb3", "sac_vs_sb3", "rsl_rl", "pendulum", "walking"),
    ),
    "Composition, world models and text": (
        *("composition", "worldmodel", "world_throughput", "text", "trl", "asynchronous"),
    ),
    "Speed and deployment": (
        *("sim_throughput", "replay", "overlap", "latency", "safety_filter", "compiling", "bridge", "experts"),
    ),
}
QUESTIONS = {  # of benchmarks that are no studies
    "demo": "Does the demo hold for every seed?",
    "update_time": "How long does an update take compared with DPPO's?",
    "ppo_vs_sb3": "How fast is PPO compared with Stable-Baselines3's?",
    "sac_vs_sb3": "How fast is SAC compared with Stable-Baselines3's?",
    "rsl_rl": "How fast is PPO compared with rsl_rl's on mjlab?",
    "walking": "How well does one trained quadruped follow velocity commands?",
    "world_throughput": "How fast are the world models?",
    "trl": "How does GRPO compare with TRL's trainer?",
    "asynchronous": "What does asynchronous generation gain?",
    "sim_throughput": "How fast is the native simulator?",
    "replay": "How fast is the replay buffer compared with Stable-Baselines3's?",
    "overlap": "How much time does simulation during learning save on the CPU?",
    "latency": "How fast are exported bundles?",
    "safety_filter": "How long does a tick of the safety filter take?",
    "compiling": "What do `torch.compile` and bfloat16 change?",
    "bridge": "Does a policy behave the same over the bridge?",
    "experts": "How often do the scripted experts succeed?",
}
LONG = 40  # rows; of a longer table the page shows the rows of its chart
CURVE = "_curves"  # in the name of a chart
CURVES = "Means over training seeds by {unit}, with 95 % bands; a panel names its five best methods and the baselines."


def render() -> str:
    """The whole page as Markdown."""
    parts = [HEADER]
    for heading, names in SECTIONS.items():
        parts.append(f"## {heading}\n")
        parts += [_section(name) for name in names]
    return "\n".join(parts)


def _section(name: str) -> str:
    study = load_study(name) if name in STUDIES else None
    question = study.question if study else QUESTIONS[name]
    found = record(name)
    lines = [f"### {question}\n", f"`python -m benchmarks.{name}` ([full table](../benchmarks/results/{name}.md))\n"]
    if not found:
        return f"### {question}\n\nNot measured with the settings of today: `python -m benchmarks.{name}`.\n"
    chart = f"![{question}](charts/{name}.png)\n"
    notes = "".join(f"- {note}\n" for note in found["notes"])
    if study:
        lines += [f"{study.description}\n", f"{caption(found)}\n", chart, summary(found), notes]
        if has_curves(found):
            lines.append(f"{CURVES.format(unit=found['curve_unit'])}\n\n![{question}](charts/{name}{CURVE}.png)\n")
        return "\n".join(filter(None, lines))
    drawn = table_charts.CHARTS.get(name)
    lines += [chart] if drawn else []
    rows = found["rows"]
    if len(rows) > LONG and drawn:
        rows = table_charts.shown(drawn, rows)
        chosen = " and ".join(f"{value} {column}" for column, value in drawn.where.items())
        lines.append(f"Rows with {chosen}, of {len(found['rows'])}:\n")
    lines.append(table(list(rows[0]), [[as_text(value) for value in row.values()] for row in rows]))
    return "\n".join(filter(None, [*lines, notes]))


def measured() -> dict[str, dict[str, Any]]:
    """Committed results on the page."""
    records = {name: record(name) for names in SECTIONS.values() for name in names}
    return {name: found for name, found in records.items() if found}


def draw_charts() -> None:
    """Write all charts, and delete others."""
    CHARTS.mkdir(exist_ok=True)
    for file in CHARTS.glob("*.png"):
        if file.stem not in charts():
            file.unlink()
    for name, found in measured().items():
        if is_study(found):
            draw(found, CHARTS / f"{name}.png")
        elif name in table_charts.CHARTS:
            table_charts.draw(table_charts.CHARTS[name], found["rows"], CHARTS / f"{name}.png")
        if has_curves(found):
            draw_curves(found, CHARTS / f"{name}{CURVE}.png")


def charts() -> set[str]:
    """Names of all charts."""
    found = measured()
    drawn = {name for name, each in found.items() if is_study(each) or name in table_charts.CHARTS}
    return drawn | {f"{name}{CURVE}" for name, each in found.items() if has_curves(each)}


def main() -> int:
    """Write page and charts, or with `--check` only compare the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if docs/benchmarks.md is out of date")
    check = parser.parse_args().check
    page = render()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        draw_charts()
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write("docs/benchmarks.md is out of date; run `python -m docs.generate_benchmarks`.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
