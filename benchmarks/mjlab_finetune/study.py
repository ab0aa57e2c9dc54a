"""Fine-tuning in mjlab: swinging up a pole with a sparse reward, before and after ReinFlow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study import Cell, Contrast, Key, Score, Study, run_command, train_to_end

TASK = "mjlab/cartpole_swingup_sparse"
SEEDS = range(1, 6)
HELD_OUT = 50_000  # first held-out seed
BASE, TUNED = "flow", "reinflow"


@dataclass(frozen=True)
class MjlabFinetune(Study):
    """Mean return in 256 held-out episodes of mjlab's swing-up, at most 200 steps with the pole upright.

    40 noisy demonstrations of the scripted expert, `experiment=mjlab_swingup_flow_bc`, then 768,000 environment steps
    of `experiment=mjlab_swingup_reinflow`.
    """

    name = "mjlab_finetune"
    question = "Can ReinFlow fine-tune in mjlab?"
    priority = 20
    demonstrations: int = 40
    cloning: int = 4000  # updates
    updates: int = 60  # of fine-tuning
    episodes: int = 256
    seeds: tuple[int, ...] = tuple(SEEDS)

    @property
    def tasks(self) -> list[str]:
        """The swing-up."""
        return ["swingup"]

    @property
    def methods(self) -> list[str]:
        """The cloned policy, and the fine-tuned one."""
        return [BASE, TUNED]

    def cell_keys(self) -> list[Key]:
        """One cell per seed."""
        return [(TUNED, "swingup", seed) for seed in self.seeds]

    def run(self, key: Key, folder: Path) -> Cell:
        """Collect demonstrations, clone, fine-tune, and evaluate both policies."""
        seed, data, tuned = int(key[2]), folder / "data", folder / "finetuned"
        if not data.exists():
            count = str(self.demonstrations)
            words = ("--episodes", count, "--num-envs", count, "--seed", str(100_000 + 1_000 * seed))
            run_command("collect", TASK, *words, "--noise", "0.2", "--keep-failures", "--out", str(data))
        common = (f"seed={seed}", "threads=1", "evaluation.episodes=0")
        words = ("experiment=mjlab_swingup_flow_bc", f"dataset={data}", f"budget.updates={self.cloning}")
        start = train_to_end(folder / "base", *words, *common)
        words = ("experiment=mjlab_swingup_reinflow", f"init_from={start}", f"budget.updates={self.updates}")
        last = train_to_end(tuned, *words, *common)
        report = json.loads((tuned / "report.json").read_text(encoding="utf-8"))
        return {
            "seed": seed,
            "base": {"mean": self._mean_return(start)},
            "finetuned": {"mean": self._mean_return(last)},
            "env_steps": report["env_steps"],
            "seconds": round(report["seconds"], 1),
        }

    def scores(self, cell: Cell) -> list[Score]:
        """Mean return before and after."""
        means = {BASE: cell["base"]["mean"], TUNED: cell["finetuned"]["mean"]}
        return [Score(method, "swingup", cell["seed"], {"return": mean}, cell=cell) for method, mean in means.items()]

    def contrasts(self, method: str, task: str) -> Sequence[Contrast]:
        """The fine-tuned policy with the cloned one."""
        return (Contrast(BASE, "return"),) if method == TUNED else ()

    def describe(self, cell: Cell) -> str:
        """Mean return before and after."""
        return f"{cell['base']['mean']:.0f} -> {cell['finetuned']['mean']:.0f} of 200"

    def quick(self) -> MjlabFinetune:
        """One seed with little training."""
        return MjlabFinetune(4, 5, 1, 8, (0,))

    def _mean_return(self, checkpoint: Path) -> float:
        from robopolicy.evaluation.harness import evaluate
        from robopolicy.sim.registry import SimOptions, make_sim
        from robopolicy.training.checkpoint import load_policy

        policy, _ = load_policy(checkpoint)
        with closing(make_sim(TASK, SimOptions(num_envs=self.episodes))) as sim:
            return float(evaluate(policy, sim, episodes=self.episodes, seed=HELD_OUT).returns.mean())


STUDY = MjlabFinetune()
