"""Fine-tuning from the pixels of one camera with ReinFlow, whose critic sees the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from benchmarks.before_after import BeforeAfter
from robopolicy.evaluation.comparison import binary_outcomes


@dataclass(frozen=True)
class Pixels(BeforeAfter):
    """Success in 200 held-out episodes of lift, seen by one camera of 64 x 64 pixels.

    40 demonstrations, `experiment=lift_image_flow_bc`, then 120,000 environment steps of
    `experiment=lift_image_reinflow`.
    """

    name = "pixels"
    question = "Can ReinFlow fine-tune from camera images?"
    task, label, measure = "manipulation/lift", "lift", "success"
    collecting = ("--cameras", "front", "--images", "png")
    cloning, tuning = "lift_image_flow_bc", "lift_image_reinflow"
    settings = ("evaluation.episodes=50", "evaluation.every=0")

    def evaluate(self, checkpoint: Path) -> dict[str, Any]:
        """Success in 200 episodes."""
        from benchmarks.finetune.bases import held_out

        return held_out(checkpoint, self.task).summary()

    def outcomes(self, result: Mapping[str, Any]) -> ArrayLike:
        """Success of every episode."""
        return binary_outcomes(result["success"], result["n"])

    def short(self, result: Mapping[str, Any]) -> str:
        """Share of successes."""
        return f"{result['success']:.0%}"

    def quick(self) -> Pixels:
        """One seed with little training."""
        return Pixels(demonstrations=2, cloning_updates=5, tuning_updates=1, seeds=(0,), null_seeds=())


STUDY = Pixels()
