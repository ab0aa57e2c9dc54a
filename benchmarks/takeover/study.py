"""Demonstrations and corrections by a person at a gamepad: success of cloning before and after DAgger."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study import Cell, Contrast, Key, Score, Study
from robopolicy.evaluation.comparison import binary_outcomes

SEEDS = range(10)  # twice five, for the null arm
HELD_OUT = 50_000  # first seed of the evaluation
BEFORE, CONTROL, AFTER = METHODS = ("cloned", "control", "dagger")


@dataclass(frozen=True)
class Takeover(Study):
    """The commands of a new user, with a script at a virtual gamepad in place of a person.

    The script demonstrates 10 episodes of lift, and a flow policy is cloned from them. Then it watches 10 of
    its episodes and takes over where the cube is not lifted after 25 steps, and DAgger trains on both. The control
    trains as many further updates without corrections. Success counts 200 held-out episodes.
    """

    name = "takeover"
    question = "How much do corrections at a gamepad improve a cloned policy?"
    priority = 4
    updates: int = 1000  # of each of the three trainings
    episodes: int = 200  # held-out
    seeds: tuple[int, ...] = tuple(SEEDS)

    @property
    def tasks(self) -> list[str]:
        """Lifting a cube."""
        return ["lift"]

    @property
    def methods(self) -> list[str]:
        """The clone, and its continuation without and with corrections."""
        return list(METHODS)

    def cell_keys(self) -> list[Key]:
        """One cell per training seed, which also draws the start states."""
        return [("lift", seed) for seed in self.seeds]

    def rows(self, key: Key) -> Sequence[tuple[str, str]]:
        """A cell has all three policies."""
        return [(method, str(key[0])) for method in METHODS]

    def run(self, key: Key, folder: Path) -> Cell:
        """Demonstrate, clone, correct and evaluate, in real time."""
        from benchmarks.takeover.person import TASK, register_person

        register_person()
        shutil.rmtree(folder / "work", ignore_errors=True)  # of an interrupted session
        seed, data, runs = int(key[1]), folder / "work/demonstrations", folder / "work/runs"
        common = [
            *(f"out={runs}", f"task.name={TASK}", f"dataset={data}", f"seed={seed}"),
            *("evaluation.episodes=0", f"budget.updates={self.updates}"),
        ]
        start = f"init_from={runs}/{BEFORE}/checkpoints/last"
        person = ["algorithm.demonstrator=person:correct", "algorithm.rounds=1", "algorithm.episodes_per_round=10"]
        trainings: dict[str, list[str]] = {
            BEFORE: ["experiment=few_demonstrations"],
            CONTROL: ["experiment=few_demonstrations", start],
            AFTER: ["algorithm=dagger", start, *person, "sim.num_envs=1"],
        }
        began = time.perf_counter()
        sizes = ["--episodes", "10", "--seed", str(100_000 + 1_000 * seed), "--out", str(data)]
        report = _run_command("teleop", TASK, "--device", "person", *sizes, "--json")
        cell: Cell = {"task": "lift", "seed": seed, "updates": self.updates, "demonstrated_frames": report["frames"]}
        for name, settings in trainings.items():
            _run_command("train", *settings, *common, f"name={name}")
            options = ["--episodes", str(self.episodes), "--seed", str(HELD_OUT), "--json"]
            found = _run_command("eval", f"{runs}/{name}/checkpoints/last", "--task", TASK, *options)
            (result,) = found["results"].values()
            cell[name] = {each: result[each] for each in ("success", "n")}
        metrics = (runs / AFTER / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        cell["corrected"] = json.loads(metrics[-1])["dagger/corrected"]
        return {**cell, "seconds": round(time.perf_counter() - began, 1)}

    def scores(self, cell: Cell) -> list[Score]:
        """Success of the three policies."""
        success = {name: binary_outcomes(cell[name]["success"], cell[name]["n"]) for name in METHODS}
        return [Score(name, "lift", cell["seed"], {"success": success[name]}, cell=cell) for name in METHODS]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """More updates against the clone, and corrections against as many updates without."""
        baseline = {CONTROL: BEFORE, AFTER: CONTROL}.get(method)
        return (Contrast(baseline, "success"),) if baseline else ()

    def is_current(self, cell: Cell) -> bool:
        """Cells of other trainings run again."""
        return cell["updates"] == self.updates

    def describe(self, cell: Cell) -> str:
        """Success before and after, and with the control."""
        return " -> ".join(f"{cell[name]['success']:.0%}" for name in (BEFORE, AFTER)) + (
            f" (without corrections {cell[CONTROL]['success']:.0%})"
        )

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Share of corrected frames, and the time of all commands."""
        cells = [score.cell for score in scores if score.method == AFTER]
        corrected, seconds = (fmean(cell[key] for cell in cells) for key in ("corrected", "seconds"))
        idle = sum(cell["corrected"] == 0 for cell in cells)
        return [
            f"The script acted on {corrected:.0%} of the frames of the 10 corrected episodes. Where none of the ten "
            f"failed, there was nothing to correct: {idle} of {len(cells)} runs.",
            f"All commands of a seed took {seconds:.0f} s with one thread: demonstrations in real time, three "
            "trainings and 600 episodes.",
        ]

    def quick(self) -> Takeover:
        """One seed with little training."""
        return Takeover(50, 10, (0,))


STUDY = Takeover()


def _run_command(*words: str) -> dict[str, Any]:
    """Run a command of a user; return the JSON object that it prints, if any.

    Raises:
        RuntimeError: The command failed.
    """
    from robopolicy.cli.main import main as robopolicy

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = robopolicy(words)
    if code:
        raise RuntimeError(f"robopolicy {' '.join(words)} failed.")
    lines = output.getvalue().strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
