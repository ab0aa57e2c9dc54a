"""Rewards of every recipe that composes them, compared with hand-computed sums.

One batch has five trajectories: three of task 0, two of task 1. Every weight, metric and part of a recipe changes at
least one number, so a negated, doubled or missing term is found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from theme_names import recipes_of
from torch.testing import assert_close

from robopolicy.core.registry import build
from robopolicy.recipe_files import read_recipe
from robopolicy.text.rollouts.collector import RewardChain
from robopolicy.text.rollouts.protocols import Outcomes

KEY = (0, 0, 0, 1, 1)
REWARD = (1.0, 0.0, 0.4, 1.0, 0.6)  # rewards of the task


@dataclass(frozen=True)
class Case:
    """Expected rewards of a recipe on the five trajectories."""

    expected: Sequence[float]
    metrics: dict[str, Sequence[float]]
    state: dict[str, Any] = field(default_factory=dict[str, Any])  # state of the parts before the first batch, by index
    influence: Sequence[float] = ()  # influence of the objectives, set after the first batch
    again: Sequence[float] = ()  # expected rewards of the same five in the next batch; empty: not tested


CASES = {
    # reward, and 0.1 brevity where reward >= 0.5
    "a2fm": Case(
        [1.0 + 0.05, 0.0, 0.4, 1.0 + 0.02, 0.6 + 0.08],
        {"brevity": [0.5, 1.0, 0.9, 0.2, 0.8]},
    ),
    # reward + 0.5 judge
    "craft_gui": Case(
        [1.0 + 0.2, 0.0 + 0.4, 0.4 + 0.1, 1.0 + 0.0, 0.6 + 0.5],
        {"judge": [0.4, 0.8, 0.2, 0.0, 1.0]},
    ),
    # batch 199 is the last of stage one: +1 for a right verdict, -1 for a wrong one; then refined + 0.2, or -1
    "critique_rl": Case(
        [1.0, -1.0, 1.0, -1.0, 1.0],
        {"verdict": [1, 0, 1, 0, 1], "refined": [1.0, 1.0, 0.0, 0.5, 0.3]},
        state={"0": {"batches": 199}},
        again=[1.0 + 0.2, -1.0, 0.0 + 0.2, -1.0, 0.3 + 0.2],
    ),
    # reward + 0.5 consistency
    "daslam": Case(
        [1.0 + 0.5, 0.0 + 0.25, 0.4 + 0.0, 1.0 + 0.1, 0.6 + 0.5],
        {"consistency": [1.0, 0.5, 0.0, 0.2, 1.0]},
    ),
    # 0.5 reward + 0.5 verdict
    "debate": Case(
        [0.5 + 0.0, 0.0 + 0.5, 0.2 + 0.5, 0.5 + 0.25, 0.3 + 0.1],
        {"verdict": [0.0, 1.0, 1.0, 0.5, 0.2]},
    ),
    # reward + 0.5 format + 0.5 grounding
    "docthinker": Case(
        [1.0 + 0.5 + 0.1, 0.0 + 0.5 + 0.0, 0.4 + 0.0 + 0.2, 1.0 + 0.5 + 0.5, 0.6 + 0.0 + 0.3],
        {"format": [1, 1, 0, 1, 0], "grounding": [0.2, 0.0, 0.4, 1.0, 0.6]},
    ),
    # share of the others that do not dominate (reward, safe): (1, 0) dominates (0.4, 0), and (1, 1) dominates (0.6, 0)
    "fate": Case([1.0, 1.0, 1.0 - 1 / 2, 1.0, 1.0 - 1 / 1], {"safe": [0, 1, 0, 1, 0]}),
    # a third of each; then log(1/3) + influence gives the weights (2, 1, 1) / 4
    "gradient_weights": Case(
        [(1.0 + 0.6 + 0.2) / 3, (0.0 + 0.3 + 0.9) / 3, (0.4 + 0.0 + 0.2) / 3, (1.0 + 0.9 + 0.5) / 3, (0.6 + 0.3) / 3],
        {"concise": [0.6, 0.3, 0.0, 0.9, 0.3], "format": [0.2, 0.9, 0.2, 0.5, 0.0]},
        influence=[math.log(2.0), 0.0, 0.0],
        again=[0.5 + 0.15 + 0.05, 0.0 + 0.075 + 0.225, 0.2 + 0.0 + 0.05, 0.5 + 0.225 + 0.125, 0.3 + 0.075 + 0.0],
    ),
    # verdict + 0.5 format + 0.5 refined
    "gui_critic_r1": Case(
        [1.0 + 0.5 + 0.5, 0.0 + 0.5 + 0.3, 1.0 + 0.0 + 0.0, 0.0 + 0.2 + 0.0, 1.0 + 0.0 + 0.1],
        {"verdict": [1, 0, 1, 0, 1], "format": [1.0, 1.0, 0.0, 0.4, 0.0], "refined": [1.0, 0.6, 0.0, 0.0, 0.2]},
    ),
    # reward - 0.2 calls
    "hila": Case(
        [1.0 - 0.0, 0.0 - 0.2, 0.4 - 0.4, 1.0 - 0.6, 0.6 - 0.2],
        {"calls": [0, 1, 2, 3, 1]},
    ),
    # (reward + 0.5 concise + 0.5 format) (0.5 + 1.5 tanh(gain)): the means (0.5, 0.5, 0.8) span a volume of 0.2 above
    # (0, 0, 0); the same batch adds nothing to it
    "hypervolume": Case(
        [(0.5 + 1.5 * math.tanh(0.2)) * total for total in (1.7, 0.9, 1.0, 1.55, 1.1)],
        {
            "success": [1.0, 0.0, 0.0, 1.0, 0.5],
            "concise": [0.4, 0.8, 0.2, 0.6, 0.5],
            "format": [1.0, 1.0, 1.0, 0.5, 0.5],
        },
        again=[0.5 * total for total in (1.7, 0.9, 1.0, 1.55, 1.1)],
    ),
    # 0.9 reward + 0.1 format
    "llava_critic_r1": Case(
        [0.9 + 0.1, 0.0 + 0.0, 0.36 + 0.1, 0.9 + 0.05, 0.54 + 0.0],
        {"format": [1.0, 0.0, 1.0, 0.5, 0.0]},
    ),
    # reward + 0.2 efficiency
    "mashost": Case(
        [1.0 + 0.1, 0.0 + 0.2, 0.4 + 0.0, 1.0 + 0.04, 0.6 + 0.06],
        {"efficiency": [0.5, 1.0, 0.0, 0.2, 0.3]},
    ),
    # reward x efficiency; fewest calls of a success: 2 in task 0, 0 in task 1. With m calls and minimum n = 2 it is
    # sin(f pi / 4), f = 4 m / (m + 2): f = 2 at m = 2, f = 3 at m = 6. Where n = 0: 1 at m = 0, cos(m pi / (2 m + 4))
    "otc": Case(
        [math.sin(math.pi / 2), 0.0, 0.4 * math.sin(3 * math.pi / 4), 1.0, 0.6 * math.cos(3 * math.pi / 10)],
        {"calls": [2, 4, 6, 0, 3]},
    ),
    # reward + 0.5 format
    "patho_r1": Case(
        [1.0 + 0.5, 0.0 + 0.5, 0.4 + 0.0, 1.0 + 0.2, 0.6 + 0.3],
        {"format": [1.0, 1.0, 0.0, 0.4, 0.6]},
    ),
    # reward, and 0.1 rank of progress among the failures (reward <= 0.5) of the task
    "r3": Case(
        [1.0, 0.0 + 0.0, 0.4 + 0.1, 1.0, 0.6],
        {"progress": [0.1, 0.2, 0.9, 0.0, 0.5]},
    ),
    # refined - first
    "retroformer": Case(
        [1.0 - 0.0, 0.5 - 0.5, 0.0 - 0.4, 1.0 - 0.7, 0.2 - 0.6],
        {"refined": [1.0, 0.5, 0.0, 1.0, 0.2], "first": [0.0, 0.5, 0.4, 0.7, 0.6]},
    ),
    # the chosen criterion (correct, grounded or brief); 1 minus its value for the adversary (role 1)
    "rlac": Case(
        [0.9, 1.0 - 0.3, 0.2, 1.0 - 0.8, 0.6],
        {
            "criterion": [0, 1, 2, 0, 1],
            "role": [0, 1, 0, 1, 0],
            "correct": [0.9, 1.0, 1.0, 0.8, 1.0],
            "grounded": [1.0, 0.3, 1.0, 1.0, 0.6],
            "brief": [1.0, 1.0, 0.2, 1.0, 1.0],
        },
    ),
    # reward + 0.2 grounding
    "search_r2": Case(
        [1.0 + 0.2, 0.0 + 0.1, 0.4 + 0.0, 1.0 + 0.06, 0.6 + 0.04],
        {"grounding": [1.0, 0.5, 0.0, 0.3, 0.2]},
    ),
    # rank of the judge's score among (5, 4, 4) in open task 0: 4 ties with one of the two others; task 1 has a verifier
    "urpo": Case(
        [1.0, (0.0 + 0.5) / 2, (0.0 + 0.5) / 2, 1.0, 0.6],
        {"judge": [5, 4, 4, 2, 9], "open": [1, 1, 1, 0, 0]},
    ),
    # reward + 0.5 format + 0.5 judge
    "videochat_m1": Case(
        [1.0 + 0.5 + 0.3, 0.0 + 0.5 + 0.0, 0.4 + 0.0 + 0.5, 1.0 + 0.0 + 0.1, 0.6 + 0.5 + 0.4],
        {"format": [1, 1, 0, 0, 1], "judge": [0.6, 0.0, 1.0, 0.2, 0.8]},
    ),
    # reward + 0.5 legal + 0.5 analysis
    "xiangqi_r1": Case(
        [1.0 + 0.5 + 0.2, 0.0 + 0.0 + 0.5, 0.4 + 0.5 + 0.0, 1.0 + 0.5 + 0.3, 0.6 + 0.0 + 0.1],
        {"legal": [1, 0, 1, 1, 0], "analysis": [0.4, 1.0, 0.0, 0.6, 0.2]},
    ),
}


def column(values: Sequence[float]) -> torch.Tensor:
    """One value per trajectory."""
    return torch.tensor(values, dtype=torch.float64)


def test_every_recipe_with_composed_rewards_has_a_case() -> None:
    composing = [name for name in recipes_of("text_catalogue") if read_recipe(name).get("rollout", {}).get("reward")]
    assert composing == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_rewards_equal_the_hand_computed_sums(name: str) -> None:
    for found, expected in zip(rewards(read_recipe(name)["rollout"]["reward"], CASES[name]), sums(name), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_negated_or_missing_term_changes_the_rewards(name: str) -> None:
    entries = read_recipe(name)["rollout"]["reward"]
    for part, entry in enumerate(entries):
        for changed in variants(entry):
            found = rewards([*entries[:part], changed, *entries[part + 1 :]], CASES[name])
            assert not all(map(torch.allclose, found, sums(name))), changed


def sums(name: str) -> list[torch.Tensor]:
    """Expected rewards of the first batch, and of the next if the case has it."""
    case = CASES[name]
    return [column(values) for values in (case.expected, case.again) if values]


def rewards(entries: Sequence[dict[str, Any]], case: Case) -> list[torch.Tensor]:
    """Rewards of the batch, and again of the next if the case has it."""
    reward = RewardChain([build("reward", entry) for entry in entries])
    batch = Outcomes(
        torch.tensor(KEY), column(REWARD), {metric: column(values) for metric, values in case.metrics.items()}
    )
    reward.load_state_dict(reward.state_dict() | case.state)
    found = [reward(batch)]
    if case.influence:
        reward.set_influence(column(case.influence))
    return [*found, reward(batch)] if case.again else found


def variants(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry with one weight negated, and with one term removed."""
    found: list[dict[str, Any]] = []
    for term, weight in entry.get("terms", {}).items():
        others = {name: other for name, other in entry["terms"].items() if name != term}
        found += [{**entry, "terms": {**others, term: -weight}}, *([{**entry, "terms": others}] if others else [])]
    return found
