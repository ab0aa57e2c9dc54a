"""Fine-tuning from the pixels of one camera with ReinFlow, whose critic sees the state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study import Cell, Contrast, Key, Score, Study, run_command, train_to_end
from robopolicy.evaluation.comparison import binary_outcomes

TASK = "manipulation/lift"
SEEDS = range(1, 6)  # the presets were chosen with seed 0
BASE, TUNED = "flow", "reinflow"


@dataclass(frozen=True)
class Pixels(Study):
    """Success in 200 held-out episodes of lift, seen by one camera of 64 x 64 pixels.

    40 demonstrations, `experiment=lift_image_flow_bc`, then 120,000 environment steps of
    `experiment=lift_image_reinflow`.
    """

    name = "pixels"
    question = "Can ReinFlow fine-tune from camera images?"
    priority = 20
    demonstrations: int = 40
    cloning: int = 2500  # updates
    updates: int = 30  # of fine-tuning
    seeds: tuple[int, ...] = tuple(SEEDS)

    @property
    def tasks(self) -> list[str]:
        """Lift."""
        return ["lift"]

    @property
    def methods(self) -> list[str]:
        """The cloned policy, and the fine-tuned one."""
        return [BASE, TUNED]

    def cell_keys(self) -> list[Key]:
        """One cell per seed."""
        return [(TUNED, "lift", seed) for seed in self.seeds]

    def run(self, key: Key, folder: Path) -> Cell:
        """Collect demonstrations, clone, fine-tune, and evaluate both policies."""
        from benchmarks.finetune.bases import judge

        seed, data, tuned = int(key[2]), folder / "data", folder / "finetuned"
        if not data.exists():
            episodes = ("--episodes", str(self.demonstrations), "--seed", str(100_000 + 1_000 * seed))
            run_command("collect", TASK, *episodes, "--cameras", "front", "--images", "png", "--out", str(data))
        common = (f"seed={seed}", "threads=1", "evaluation.episodes=50", "evaluation.every=0")
        words = ("experiment=lift_image_flow_bc", f"dataset={data}", f"budget.updates={self.cloning}")
        start = train_to_end(folder / "base", *words, *common)
        words = ("experiment=lift_image_reinflow", f"init_from={start}", f"budget.updates={self.updates}")
        last = train_to_end(tuned, *words, *common)
        report = json.loads((tuned / "report.json").read_text(encoding="utf-8"))
        return {
            "seed": seed,
            "base": judge(start, TASK),
            "finetuned": judge(last, TASK),
            "env_steps": report["env_steps"],
            "seconds": round(report["seconds"], 1),
        }

    def scores(self, cell: Cell) -> list[Score]:
        """Success before and after."""
        found = ((BASE, cell["base"]), (TUNED, cell["finetuned"]))
        success = {method: binary_outcomes(each["success"], each["n"]) for method, each in found}
        return [Score(method, "lift", cell["seed"], {"success": each}, cell=cell) for method, each in success.items()]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """The fine-tuned policy with the cloned one."""
        return (Contrast(BASE, "success"),) if method == TUNED else ()

    def describe(self, cell: Cell) -> str:
        """Success before and after."""
        return f"{cell['base']['success']:.0%} -> {cell['finetuned']['success']:.0%}"

    def quick(self) -> Pixels:
        """One seed with little training."""
        return Pixels(2, 5, 1, (0,))


STUDY = Pixels()
