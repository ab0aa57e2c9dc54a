"""Success over network calls: generative heads with few and with many sampler steps, imitating the same expert."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.few_step.learners import LEARNERS, TASK, Settings
from benchmarks.study import Cell, Contrast, Key, Score, Study
from robopolicy.evaluation.comparison import binary_outcomes

SEEDS = range(5)
NULL_SEEDS = range(5, 10)  # further runs of the baseline, for the null arm
BASELINE = "flow-10"
HELD_OUT = 50_000  # first held-out seed; training uses none of them
FULL = Settings()
METHODS = {f"{name}-{label}": name for name, learner in LEARNERS.items() for label in learner.samplers}


@dataclass(frozen=True)
class FewStep(Study):
    """Success in 200 held-out episodes of lift after cloning 10 demonstrations in 4,000 updates.

    Rows are heads with a number of sampler steps: all samplers of a head use the same weights, and students train for
    as many updates as their teacher. The expert is deterministic, so its data have nearly one mode: the table shows
    what few steps cost and save, not how well heads separate modes.
    """

    name = "few_step"
    question = "How much success do few network calls cost?"
    priority = 20
    settings: Settings = FULL
    seeds: tuple[int, ...] = tuple(SEEDS)
    null_seeds: tuple[int, ...] = tuple(NULL_SEEDS)

    @property
    def tasks(self) -> list[str]:
        """Lift."""
        return ["lift"]

    @property
    def methods(self) -> list[str]:
        """Heads with their samplers."""
        return list(METHODS)

    def cell_keys(self) -> list[Key]:
        """Every head with five seeds, then the null arm."""
        every: list[Key] = [(name, "lift", seed) for seed in self.seeds for name in LEARNERS]
        return every + [(METHODS[BASELINE], "lift", seed) for seed in self.null_seeds]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """The head with each of its samplers."""
        return [(f"{key[0]}-{label}", str(key[1])) for label in LEARNERS[str(key[0])].samplers]

    def run(self, key: Key, folder: Path) -> Cell:
        """Train one head, and evaluate it with all of its samplers."""
        from benchmarks.few_step.training import train, with_sampler
        from robopolicy.evaluation.harness import evaluate
        from robopolicy.sim.registry import SimOptions, make_sim

        name, seed = str(key[0]), int(key[2])
        policy, seconds = train(name, seed, self.settings)
        results: Cell = {}
        with closing(make_sim(TASK, SimOptions(num_envs=32))) as sim:
            for label, sampler in LEARNERS[name].samplers.items():
                judged = with_sampler(policy, sampler)
                summary = evaluate(judged, sim, episodes=self.settings.episodes, seed=HELD_OUT).summary()
                kept = ("success", "n", "network_calls_per_action", "latency_ms", "ms_per_action")
                results[label] = {"network_calls": judged.nfe, **{each: summary[each] for each in kept}}
        facts = {"learner": name, "task": "lift", "seed": seed, "train_seconds": round(seconds, 1)}
        return {**facts, "settings": asdict(self.settings), "samplers": results}

    def scores(self, cell: Cell) -> list[Score]:
        """Success with every sampler."""
        return [
            Score(
                method=f"{cell['learner']}-{label}",
                task=cell["task"],
                seed=cell["seed"],
                measures={"success": binary_outcomes(result["success"], result["n"])},
                cell={**result, "train_seconds": cell["train_seconds"]},
            )
            for label, result in cell["samplers"].items()
        ]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Every row with a flow of ten steps."""
        return (Contrast(BASELINE, "success"),) if method != BASELINE else ()

    def is_current(self, cell: Cell) -> bool:
        """Cells with other settings run again."""
        return cell["settings"] == asdict(self.settings)

    def describe(self, cell: Cell) -> str:
        """Success with every sampler."""
        return ", ".join(f"{label}: {result['success']:.0%}" for label, result in cell["samplers"].items())

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Network calls, time of an action of one robot, and time of training, a student's with its teacher's."""
        calls, latency, training = (
            median(score.cell[name] for score in scores) for name in ("network_calls", "ms_per_action", "train_seconds")
        )
        return {"calls per chunk": calls, "ms per action": f"{latency:.3f}", "training s": f"{training:.0f}"}

    def quick(self) -> FewStep:
        """One seed with little training."""
        return FewStep(Settings(updates=600, episodes=40), (0,), ())


STUDY = FewStep()
