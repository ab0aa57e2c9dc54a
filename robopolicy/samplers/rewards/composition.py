"""Rewards composed left to right, and the reward parts by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.samplers.protocols import Attempt, Outcomes, Reward


class Composition(Reward):
    """Rewards from left to right, starting with the verdict of the world."""

    def __init__(self, parts: Sequence[Reward]) -> None:
        self.parts = list(parts)
        self.followed = tuple(name for part in self.parts for name in part.followed)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Rewards `(M,)`."""
        for part in self.parts:
            outcomes = replace(outcomes, reward=part(outcomes))
        return outcomes.reward

    def follow(self, influence: Tensor) -> None:
        """Tell every part about its objectives."""
        counts = [len(part.followed) for part in self.parts]
        for part, own in zip(self.parts, influence.split(counts), strict=True):
            part.follow(own)

    def state_dict(self) -> dict[str, Any]:
        """States of the parts, by position."""
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def outcomes_of(attempts: Sequence[Attempt]) -> Outcomes:
    """Keys, verdicts and metrics of attempts; only metrics that all of them have."""
    names = set.intersection(*(set(attempt.metrics) for attempt in attempts)) if attempts else set()

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Outcomes(
        key=torch.tensor([attempt.task.key for attempt in attempts], dtype=torch.int64),
        reward=column([attempt.reward for attempt in attempts]),
        metrics={name: column([attempt.metrics[name] for attempt in attempts]) for name in sorted(names)},
    )
