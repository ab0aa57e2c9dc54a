"""Offline learners on one dataset of mixed quality, without interaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.common import outcomes
from benchmarks.study import Cell, Contrast, Key, Score, Study, keys_named, read_report, train_to_end
from benchmarks.themes import contributed

SEEDS = range(1, 6)  # reward and data were chosen with seed 0, so that the learners differ
NULL_SEEDS = range(6, 11)  # further runs of the baselines, for the null arm
IMITATED = "bc"  # cannot solve the task, because most of the data leads away from the goal
DATA = Path("runs/offline/mixed")
OFFLINE = ("replay.offline_updates={updates}", "algorithm.critic.hidden=[128,128]")
IMITATION = "policy.imitation=mse"  # many actions are on their bounds, where the tanh density ends


@dataclass(frozen=True)
class Learner:
    """One row."""

    settings: Sequence[str]  # in addition to the shared ones; `{updates}` is the budget
    against: str = IMITATED  # row


METHODS: dict[str, Learner] = {
    IMITATED: Learner((IMITATION,), ""),
    "iql": Learner((*OFFLINE, IMITATION, "algorithm.beta=10", "algorithm.implicit.expectile=0.9")),
    "cal_ql": Learner(
        (
            *(*OFFLINE, "algorithm.lr=3e-4", "algorithm.candidates=4"),
            *("algorithm.conservative.weight=1", "algorithm.conservative.samples=4"),
        )
    ),
    "td3_bc": Learner((*OFFLINE, "algorithm.critic.layer_norm=true")),
    **{name: Learner(**row) for name, row in contributed("offline", "methods").items()},
}
"""Algorithm -> row; contrib themes add rows by `[offline.methods]`, with the fields of `Learner` as keys."""
BASELINES = tuple(name for name in METHODS if any(name == row.against for row in METHODS.values()))


@dataclass(frozen=True)
class Offline(Study):
    """Success in 200 held-out episodes after 4,000 updates on 600 episodes of a point mass.

    One fifth of the episodes steers to the goal, two fifths to the opposite point, two fifths act at random; the
    reward is minus a tenth of the distance, plus 1 at the goal. Every learner trains a squashed Gaussian of the same
    size with chunks of two actions; seeds differ in weights and minibatches.
    """

    name = "offline"
    question = "Which offline learner copes with data of mixed quality on a point mass?"
    priority = 20
    paired = False
    updates: int = 4000
    only: tuple[str, ...] = ()  # cells `METHOD-point_mass-SEED` of the smoke test; empty: all

    @property
    def tasks(self) -> list[str]:
        """The point mass."""
        return ["point_mass"]

    @property
    def methods(self) -> list[str]:
        """Imitation, and the offline learners."""
        return list(METHODS)

    def cell_keys(self) -> list[Key]:
        """Every learner with five seeds, and more seeds of the baselines for the null arm."""
        every: list[Key] = [(method, "point_mass", seed) for seed in SEEDS for method in METHODS]
        every += [(method, "point_mass", seed) for seed in NULL_SEEDS for method in BASELINES]
        return keys_named(every, self.only)

    def facts(self, key: Key, folder: Path) -> Cell:
        """Learner, seed and budget."""
        return {"method": key[0], "seed": key[2], "updates": self.updates}

    def trainings(self, key: Key) -> Mapping[str, Sequence[str]]:
        """Shared settings, and the learner's own."""
        from benchmarks.offline.data import TASK

        settings = (
            *(f"task={TASK}", "task.reward=shaped", f"dataset={DATA}", f"algorithm={key[0]}"),
            *("policy=squashed_gaussian", "policy.hidden=[128,128]", "algorithm.batch_size=128"),
            *("chunk.horizon=2", "chunk.action_horizon=2", "evaluation.episodes=0"),
            *(f"budget.updates={self.updates}", f"checkpoint_every={self.updates}", f"seed={key[2]}"),
            *(setting.format(updates=self.updates) for setting in METHODS[str(key[0])].settings),
        )
        return {"run": settings}

    def run(self, key: Key, folder: Path) -> Cell:
        """Train and evaluate one learner."""
        from benchmarks.finetune.bases import held_out
        from benchmarks.offline.data import TASK, dataset

        run = folder / "run"
        dataset(DATA)
        last = train_to_end(run, *self.trainings(key)["run"])
        report = read_report(run)
        found = held_out(last, TASK)
        return {
            "success": outcomes(found),
            "steps": found.lengths.astype(int).tolist(),
            "seconds": round(report["seconds"], 1),
        }

    def scores(self, cell: Cell) -> list[Score]:
        """Success of the learner."""
        return [Score(cell["method"], "point_mass", cell["seed"], {"success": cell["success"]}, cell=cell)]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """Every learner with its baseline; imitation is a reference."""
        against = METHODS[method].against
        return (Contrast(against, "success"),) if against else ()

    def is_current(self, cell: Cell) -> bool:
        """Cells with another number of updates run again."""
        return cell["updates"] == self.updates

    def describe(self, cell: Cell) -> str:
        """Success."""
        return f"success {fmean(cell['success']):.0%}"

    def details(self, scores: Sequence[Score]) -> dict[str, object]:
        """Length of the episodes and time of an update."""
        cells = [score.cell for score in scores]
        return {
            "steps per episode": f"{fmean(fmean(cell['steps']) for cell in cells):.1f}",
            "ms per update": f"{1000 * fmean(cell['seconds'] / cell['updates'] for cell in cells):.1f}",
        }

    def notes(self, scores: Sequence[Score]) -> list[str]:
        """Settings that differ from the defaults."""
        return [
            "Networks and batches are small. Imitation minimises the squared error, because many actions are on "
            "their bounds; `iql` has its published settings for stitching; `cal_ql` has its weight for dense rewards, "
            "fewer samples and the actor learning rate of the others; the critics of the TD3 variants have LayerNorm.",
            "`bc` cannot solve the task, because most of the data leads away from the goal. `prdc` and `a2pr` extend "
            "`td3_bc`, and `odice` extends `iql`, so they are compared with these.",
        ]

    def quick(self) -> Offline:
        """Three learners with few updates."""
        return Offline(200, ("bc-point_mass-1", "iql-point_mass-1", "td3_bc-point_mass-1"))


STUDY = Offline()
