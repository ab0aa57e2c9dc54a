"""Fine-tuning in mjlab: swinging up a pole with a sparse reward, before and after ReinFlow."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from benchmarks.before_after import BeforeAfter

HELD_OUT = 50_000  # first held-out seed


@dataclass(frozen=True)
class MjlabFinetune(BeforeAfter):
    """Mean return in 256 held-out episodes of mjlab's swing-up, at most 200 steps with the pole upright.

    40 noisy demonstrations of the scripted expert, `experiment=mjlab_swingup_flow_bc`, then 768,000 environment steps
    of `experiment=mjlab_swingup_reinflow`.
    """

    name = "mjlab_finetune"
    question = "Can ReinFlow fine-tune in mjlab?"
    task, label, measure = "mjlab/cartpole_swingup_sparse", "swingup", "return"
    collecting = ("--num-envs", "40", "--noise", "0.2", "--keep-failures")
    cloning, tuning = "mjlab_swingup_flow_bc", "mjlab_swingup_reinflow"
    settings = ("evaluation.episodes=0",)
    cloning_updates: int = 4000
    tuning_updates: int = 60
    episodes: int = 256

    def evaluate(self, checkpoint: Path) -> dict[str, Any]:
        """Mean return of all episodes."""
        from robopolicy.evaluation.harness import evaluate
        from robopolicy.sim.registry import SimOptions, make_sim
        from robopolicy.training.checkpoint import load_policy

        policy, _ = load_policy(checkpoint)
        with closing(make_sim(self.task, SimOptions(num_envs=self.episodes))) as sim:
            return {"mean": float(evaluate(policy, sim, episodes=self.episodes, seed=HELD_OUT).returns.mean())}

    def outcomes(self, result: Mapping[str, Any]) -> ArrayLike:
        """The mean return."""
        return result["mean"]

    def short(self, result: Mapping[str, Any]) -> str:
        """Mean return."""
        return f"{result['mean']:.0f}"

    def quick(self) -> MjlabFinetune:
        """One seed with little training."""
        return MjlabFinetune(
            demonstrations=4, cloning_updates=5, tuning_updates=1, seeds=(0,), null_seeds=(), episodes=8
        )


STUDY = MjlabFinetune()
