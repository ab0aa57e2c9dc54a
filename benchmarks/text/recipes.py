"""The recipes of the text benchmark: where each is measured, against what, and the mechanism that must act there.

These are the recipes that people know by name, on one-turn sums, and recipes for turns and tools on tasks that have
them. Others are verified by their formulas in `tests`, without a claim about learning.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.text.mechanism import ADVANTAGE, BRANCHES, LOSS, SURROGATE
from benchmarks.themes import contributed

BASELINE = "grpo"


@dataclass(frozen=True)
class BenchRecipe:
    """A row of the table."""

    task: str  # key of `tasks.TASKS`
    mechanism: str  # a kind of `mechanism.KINDS`
    against: str = BASELINE  # recipe on the same task


ARITHMETIC = {
    "reinforce": ADVANTAGE,  # no baseline
    "remax": ADVANTAGE,  # greedy answer as baseline
    "rloo": ADVANTAGE,  # mean of the others as baseline
    "opo": ADVANTAGE,  # length-weighted baseline
    "reinforce_pp": ADVANTAGE,  # whitened over the batch
    "reinforce_pp_baseline": ADVANTAGE,
    "optimal_token_baseline": ADVANTAGE,
    "single_stream": ADVANTAGE,  # running success rate of the prompt as baseline
    "gpg": ADVANTAGE,
    "pass_at_k": ADVANTAGE,
    "ppo": ADVANTAGE,  # critic
    "rft": ADVANTAGE,  # imitation of successes
    "nft": SURROGATE,
    "dr_grpo": LOSS,  # no standard deviation, fixed length
    "dapo": SURROGATE,  # higher upper bound
    "gspo": SURROGATE,  # ratio of the sequence
    "gmpo": SURROGATE,
    "cispo": SURROGATE,
    "sapo": SURROGATE,
    "mdpo": SURROGATE,
    "clip_cov": SURROGATE,
    "kl_cov": SURROGATE,
}
RECIPES: dict[str, BenchRecipe] = {
    **{name: BenchRecipe("arithmetic", mechanism) for name, mechanism in ARITHMETIC.items()},
    "gigpo": BenchRecipe("pits", ADVANTAGE),  # compares steps with equal observations
    "arpo_agentic": BenchRecipe("calculator", BRANCHES),  # branches after tool replies
    **{name: BenchRecipe(**row) for name, row in contributed("text", "recipes").items()},
}
"""Recipe -> its row; contrib themes add rows by `[text.recipes]`, with the fields of `BenchRecipe` as keys."""


def arms(task: str) -> list[str]:
    """Arms of a task: the baseline, other baselines of its recipes, and the recipes."""
    own = {name: row for name, row in RECIPES.items() if row.task == task}
    return list(dict.fromkeys([BASELINE, *(row.against for row in own.values()), *own]))
