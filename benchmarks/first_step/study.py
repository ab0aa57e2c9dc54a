"""Size of the first step of on-policy fine-tuners, with and without an increasing learning rate."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import ArrayLike

from benchmarks.study import Cell, Contrast, Key, Score, Study, train_to_end

SEEDS = range(1, 6)
NULL_SEEDS = range(6, 11)  # further runs of the baselines, for the null arm
ABRUPT = "-abrupt"  # rows whose learning rate is whole from the first update
METHODS = ("dppo", f"dppo{ABRUPT}", "reinflow", f"reinflow{ABRUPT}")
KL = "KL"
WHOLE_ROLLOUT = 1_000_000  # decisions of a minibatch, at most
FIGURE = "actor/approx_kl"  # the KL before the last step of an update


@dataclass(frozen=True)
class FirstStep(Study):
    """KL [nats per decision] between the policies before and after the first step on the first rollout of lift.

    Adam's first step moves every weight by the whole learning rate, whatever its gradient. `algorithm.lr_warmup`
    increases the rate over the first five updates; rows `-abrupt` have `algorithm.lr_warmup=0`. Minibatches are whole
    rollouts, and the critic needs no warm-up here. `update` is the KL before the last step of the first update.
    """

    name = "first_step"
    question = "How far does the first step move a cloned policy?"
    priority = 20
    seeds: tuple[int, ...] = tuple(SEEDS)
    null_seeds: tuple[int, ...] = tuple(NULL_SEEDS)

    @property
    def tasks(self) -> list[str]:
        """Lift."""
        return ["lift"]

    @property
    def methods(self) -> list[str]:
        """Fine-tuners with their default, and without an increasing rate."""
        return list(METHODS)

    def cell_keys(self) -> list[Key]:
        """All rows of a seed, then the next seed; the null arm last."""
        every: list[Key] = [(method, "lift", seed) for seed in self.seeds for method in METHODS]
        return every + [(m, "lift", seed) for seed in self.null_seeds for m in METHODS if m.endswith(ABRUPT)]

    def facts(self, key: Key, folder: Path) -> Cell:
        """Row and seed."""
        return {"method": key[0], "seed": key[2]}

    def run(self, key: Key, folder: Path) -> Cell:
        """Take one update of one step, and one of all epochs, from the same clone."""
        from benchmarks.finetune.bases import clone
        from benchmarks.finetune.methods import DIFFUSION, FLOW
        from benchmarks.finetune.tasks import TASKS

        name, seed, task = str(key[0]), int(key[2]), TASKS["lift"]
        algorithm = name.removesuffix(ABRUPT)
        kind = DIFFUSION if algorithm == "dppo" else FLOW
        base = clone(kind, task, seed, task.demonstrations[kind.kind])
        settings = (
            *("experiment=fine_tune", f"algorithm={algorithm}", f"task={task.task}", f"sim.num_envs={task.num_envs}"),
            *(f"init_from={base}", f"seed={seed}", "budget.updates=1", "evaluation.episodes=0"),
            *("algorithm.critic_warmup=0", f"algorithm.batch_size={WHOLE_ROLLOUT}"),
            *(("algorithm.lr_warmup=0",) if name.endswith(ABRUPT) else ()),
        )
        step = kl_of(train_to_end(folder / "step", *settings, "algorithm.epochs=2"))
        update = kl_of(train_to_end(folder / "update", *settings))
        return {"step": step, "update": update}

    def scores(self, cell: Cell) -> list[Score]:
        """The KL of the first step."""
        return [Score(cell["method"], "lift", cell["seed"], {KL: cell["step"]}, cell=cell)]

    def failure(self, task: str) -> dict[str, ArrayLike]:
        """A first step to a policy that is not finite has no KL."""
        return {KL: math.nan}

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """The default with the abrupt row; a smaller step is better."""
        return () if method.endswith(ABRUPT) else (Contrast(f"{method}{ABRUPT}", KL, larger=False),)

    def bounds(self, measure: str) -> tuple[float, float]:
        """A KL is not negative."""
        return 0.0, math.inf

    def describe(self, cell: Cell) -> str:
        """KL of the first step, and before the last one of the update."""
        return f"KL {cell['step']:.2g}, before the last step of the update {cell['update']:.2g}"

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """KL before the last step of the first update."""
        update = {score.seed: score.cell["update"] for score in scores}
        return {"update [95 %]": f"{self.interval(KL, update):.2g}"}

    def quick(self) -> FirstStep:
        """One seed."""
        return FirstStep((1,), ())


STUDY = FirstStep()


def kl_of(checkpoint: Path) -> float:
    """The last KL of the run of a checkpoint."""
    lines = (checkpoint.parents[1] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return next(row[FIGURE] for row in map(json.loads, reversed(lines)) if FIGURE in row)
