"""Generate `docs/benchmarks.md` and its charts from `benchmarks/results`.

Run `python -m docs.generate_benchmarks` after a benchmark, and `--check` to see whether the page is up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from docs.markdown import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAGE = Path(__file__).parent / "benchmarks.md"
CHARTS = Path(__file__).parent / "charts"

HEADER = """\
<!-- Generated from benchmarks/results by `python -m docs.generate_benchmarks`; edit neither the tables nor this page.
-->
# Benchmarks

Every table is the output of one command and is generated from `benchmarks/results`. What is compared runs in one
process on one machine. Intervals are 95 %: Wilson intervals for shares, bootstrap or Student intervals over seeds for
means. Absolute times depend on the machine; ratios within a table do not.
"""

SECTIONS: dict[str, dict[str, str]] = {
    "Fine-tuning and imitation": {
        "demo": "Does the demo hold for every seed?",
        "finetune": "Which fine-tuner improves a cloned policy, and by how much?",
        "update_time": "How long does an update take compared with DPPO's?",
        "few_step": "How much success do few network calls cost?",
        "offline": "Which offline learner copes with data of mixed quality?",
        "pixels": "Can ReinFlow fine-tune from camera images?",
        "parts": "Do parts of text methods help on a robot?",
    },
    "Learning from scratch": {
        "control": "How do the learners compare with Stable-Baselines3?",
        "ppo_vs_sb3": "Is PPO as good as Stable-Baselines3's, and faster?",
        "sac_vs_sb3": "Is SAC as good as Stable-Baselines3's, and faster?",
        "rsl_rl": "Is PPO as good as rsl_rl's on mjlab?",
        "pendulum": "What do slow decisions cost?",
        "walking": "How well does a trained quadruped follow velocity commands?",
    },
    "Composition, world models and text": {
        "composition": "Is a composition better than its parents?",
        "worldmodel": "Does a learned world model order policies correctly?",
        "world_throughput": "How fast are the world models?",
        "text": "Which text recipes learn more than GRPO?",
        "trl": "How does GRPO compare with TRL's trainer?",
        "asynchronous": "What does asynchronous generation gain?",
    },
    "Speed and deployment": {
        "sim_throughput": "How fast is the native simulator?",
        "replay": "How fast is the replay buffer compared with Stable-Baselines3's?",
        "latency": "How fast are exported bundles?",
        "safety_filter": "How long does a tick of the safety filter take?",
        "compiling": "What do `torch.compile` and bfloat16 change?",
        "bridge": "Does a policy behave the same over the bridge?",
    },
}
LONG = 40  # rows of a table that is linked instead of shown
PICTURES = {"text": ("text.png",)}
RANGE = re.compile(r"(-?[\d.]+) ?%? \[(-?[\d.]+) ?%?, (-?[\d.]+) ?%?\]")


def render() -> str:
    """The whole page as Markdown."""
    parts = [HEADER]
    for heading, benchmarks in SECTIONS.items():
        parts.append(f"## {heading}\n")
        parts += [_section(name, question) for name, question in benchmarks.items() if _file(name).is_file()]
    return "\n".join(parts)


def _section(name: str, question: str) -> str:
    rows = _rows(name)
    lines = [f"### {question}\n", f"`python -m benchmarks.{name}` ([full table](../benchmarks/results/{name}.md))\n"]
    lines += [f"![{question}](../benchmarks/results/{file})\n" for file in PICTURES.get(name, ())]
    if name == "finetune":
        lines += [
            f"![Success before and after fine-tuning on {task}](charts/{_chart(task).name})\n" for task in tasks()
        ]
    elif len(rows) <= LONG:
        lines.append(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    return "\n".join(lines)


def _rows(name: str) -> list[dict[str, Any]]:
    return json.loads(_file(name).read_text(encoding="utf-8"))["rows"]


def _file(name: str) -> Path:
    """The committed result of a benchmark, which may not have run."""
    return RESULTS / f"{name}.json"


def tasks() -> list[str]:
    """Tasks of the table of fine-tuners, in its order."""
    return list(dict.fromkeys(row["task"] for row in _rows("finetune")))


def _chart(task: str) -> Path:
    return CHARTS / f"finetune_{task.replace('-', '_')}{'_metaworld' if task == 'pick-place' else ''}.png"


def draw() -> None:
    """Write one chart per task: success or return before (open) and after (filled) fine-tuning, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    CHARTS.mkdir(exist_ok=True)
    for task in tasks():
        rows = [row for row in _rows("finetune") if row["task"] == task and RANGE.search(row["after"])]
        rows.sort(key=lambda row: float(RANGE.search(row["after"])[1]))  # type: ignore[index]
        figure, axes = plt.subplots(figsize=(7.0, 0.24 * len(rows) + 1.0))
        for place, row in enumerate(rows):
            for key, colour, face, shift in (
                ("before", "#8a8a8a", "white", 0.12),
                ("after", "#1f5fa8", "#1f5fa8", -0.12),
            ):
                found = RANGE.search(row[key])
                if found:
                    value, low, high = (float(number) for number in found.groups())
                    axes.plot([low, high], [place + shift] * 2, color=colour, linewidth=1.4, solid_capstyle="butt")
                    axes.plot(value, place + shift, "o", color=colour, markerfacecolor=face, markersize=4.5)
        axes.set_yticks(range(len(rows)), [row["method"] for row in rows], fontsize=8)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_xlabel(
            "success [%], 95 % interval" if "%" in rows[0]["after"] else "return, 95 % interval", fontsize=9
        )
        axes.set_title(f"{task}: before (open) and after (filled) fine-tuning", fontsize=10, loc="left")
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.tight_layout()
        figure.savefig(_chart(task), dpi=110, metadata={"Software": None})
        plt.close(figure)


def main() -> int:
    """Write page and charts, or with `--check` only compare the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if docs/benchmarks.md is out of date")
    check = parser.parse_args().check
    page = render()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
        draw()
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write("docs/benchmarks.md is out of date; run `python -m docs.generate_benchmarks`.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
