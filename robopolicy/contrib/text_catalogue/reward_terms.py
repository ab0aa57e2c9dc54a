"""Rewards of single trajectories: sums, gates, minima, chosen criteria, debates, refinements.

The metric name "reward" is the previous reward of the chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative
from robopolicy.text.rollouts.protocols import Outcomes, Reward


@dataclass(frozen=True)
class Sum(Reward):
    """Weighted sum of metrics; negative weights are costs, e.g. of a mode, a call or a second."""

    terms: Mapping[str, float]

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        return sum((weight * outcomes.require(name) for name, weight in self.terms.items()), 0.0 * outcomes.reward)


@dataclass(frozen=True)
class Gated(Reward):
    """Levels that count only if all previous levels pass: `sum_l w_l s_l prod_{k<l} [s_k passes]`.

    Source: ChatShopBuddy, Cheng et al. 2026.

    Example: safety, then success, then style.
    """

    levels: Sequence[str]
    weights: Sequence[float]
    threshold: float = 0.5  # a level passes at this score

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.weights):
            raise ValueError(f"Gated needs one weight per level, got {len(self.weights)} for {len(self.levels)}.")

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        total, opened = torch.zeros_like(outcomes.reward), torch.ones_like(outcomes.reward)
        for name, weight in zip(self.levels, self.weights, strict=True):
            score = outcomes.require(name)
            total = total + weight * score * opened
            opened = opened * (score >= self.threshold)
        return total


@dataclass(frozen=True)
class Minimum(Reward):
    """Minimum of some criteria: the choice of a perfect adversary (RLAC, Wu et al. 2025)."""

    criteria: Sequence[str]

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        return torch.stack([outcomes.require(name) for name in self.criteria]).amin(0)


@dataclass(frozen=True)
class ChosenCriterion(Reward):
    """Score by the criterion that a critic chose for each trajectory; use `ZeroSum` for the critic.

    Source: RLAC, Wu et al. 2025.
    """

    criteria: Sequence[str]
    choice: str = "criterion"  # metric: index of the chosen criterion

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        scores = torch.stack([outcomes.require(name) for name in self.criteria], 1)  # (M, C)
        return scores.gather(1, outcomes.require(self.choice).long().unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class ZeroSum(Reward):
    """Reward of two roles: the reward for one, `total` minus the reward for the other.

    Source: RLAC (total 1); SPC, Chen et al. 2025 (total 0).
    """

    role: str = "role"  # metric: 0 for the first role, 1 for its adversary
    total: float = 1.0

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        return torch.where(outcomes.require(self.role) > 0.5, self.total - outcomes.reward, outcomes.reward)


@dataclass(frozen=True)
class Debate(Reward):
    """`(1 - share)` of the reward plus `share` of the verdict on a debate about the action.

    Source: Sukovic and Radanovic 2024.
    """

    share: Fraction = 0.5
    verdict: str = "verdict"

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        return (1.0 - self.share) * outcomes.reward + self.share * outcomes.require(self.verdict)


class Refinement(Reward):
    """Critique-RL: +-1 for the verdict of a critique, after `first` batches the reward of the refinement.

    Source: Xi et al. 2025.

    In the second stage, a correct verdict receives the success of the refinement plus `bonus`, a wrong verdict -1.
    """

    def __init__(
        self, first: NonNegative = 200, bonus: float = 0.2, right: str = "verdict", refined: str = "refined"
    ) -> None:
        """Validate and store the options.

        Args:
            first: Batches of the first stage; .inf: only the first stage.
            bonus: For a correct verdict in the second stage.
            right: Metric: 1 for a correct verdict.
            refined: Metric: reward of the refinement.
        """
        self.first, self.bonus, self.right, self.refined = first, bonus, right, refined
        self.batches = 0

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        right = outcomes.require(self.right) > 0.5
        earned = 1.0 if self.batches < self.first else outcomes.require(self.refined) + self.bonus
        self.batches += 1
        return torch.where(right, earned, -torch.ones_like(outcomes.reward))

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore `state_dict`."""
        self.batches = int(state["batches"])


def cosine_calls(calls: Tensor, fewest: Tensor, scale: Tensor | float) -> Tensor:
    """Compute efficiency in [0, 1] of successes with `calls` tool calls if `fewest` suffice (OTC, Wang et al. 2025).

    It is 1 without calls if none is needed, `cos(m pi / (2 m + c))` for m calls if none is needed, and otherwise
    `sin(f pi / (2 n))` with `f = 2 m n / (m + n)`.

    Args:
        calls: m (M,).
        fewest: n (M,), of the same tasks.
        scale: c, number of calls that determines the decay of the cosine.
    """
    unneeded = torch.cos(calls * math.pi / (2.0 * calls + scale))
    middle = 2.0 * calls * fewest / (calls + fewest).clamp(min=1.0)
    needed = torch.sin(middle * math.pi / (2.0 * fewest.clamp(min=1.0)))
    return torch.where(fewest > 0, needed, torch.where(calls > 0, unneeded, torch.ones_like(unneeded)))
