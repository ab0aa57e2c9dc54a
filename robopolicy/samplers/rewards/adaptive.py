"""Rewards with memory: fewest tool calls so far, weights of objectives that follow gradients or the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.samplers.protocols import Outcomes, Reward
from robopolicy.samplers.rewards.terms import cosine_calls


class ToolCalls(Reward):
    """The reward times the efficiency of its tool calls (OTC, S024): calls are compared with the fewest that did.

    The fewest calls of a success are kept per task as a running minimum. Failures earn nothing for being short.
    """

    def __init__(self, calls: str = "calls", scale: float = 4.0, weight: float = 1.0) -> None:
        """Get ready.

        Args:
            calls: Metric that counts them (steps, contacts and interventions are counted alike).
            scale: c of the cosine where none was needed.
            weight: Factor on the whole.
        """
        self.calls, self.scale, self.weight = calls, scale, weight
        self._fewest: dict[int, float] = {}

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Rewards `(M,)`."""
        calls = outcomes.need(self.calls)
        for key, count, reward in zip(outcomes.key.tolist(), calls.tolist(), outcomes.reward.tolist(), strict=True):
            if reward > 0.5:
                self._fewest[key] = min(count, self._fewest.get(key, math.inf))
        own = [self._fewest.get(key, count) for key, count in zip(outcomes.key.tolist(), calls.tolist(), strict=True)]
        fewest = torch.tensor(own, dtype=calls.dtype)
        return self.weight * outcomes.reward * cosine_calls(calls, fewest, self.scale)

    def state_dict(self) -> dict[str, Any]:
        """Fewest calls per task."""
        return {"fewest": dict(self._fewest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._fewest = {int(key): float(count) for key, count in state["fewest"].items()}


class HypervolumeFactor(Reward):
    """The reward times `0.5 + 1.5 tanh(gain)`: more where validation has moved the Pareto front (S114).

    The gain is the hypervolume that the last validated point added to the archive, above a reference point.
    """

    def __init__(self, reference: Sequence[float]) -> None:
        """Get ready.

        Args:
            reference: Objectives of the initial policy, higher is better.
        """
        self.reference = tuple(reference)
        self.archive: list[tuple[float, ...]] = []
        self.gain = 0.0

    def validated(self, objectives: Sequence[float]) -> None:
        """Add the objectives of a validation to the archive."""
        before = hypervolume(self.archive, self.reference)
        self.archive.append(tuple(objectives))
        self.gain = max(0.0, hypervolume(self.archive, self.reference) - before)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Rewards `(M,)`."""
        return outcomes.reward * (0.5 + 1.5 * math.tanh(self.gain))

    def state_dict(self) -> dict[str, Any]:
        """Archive and last gain."""
        return {"archive": [list(point) for point in self.archive], "gain": self.gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.archive = [tuple(point) for point in state["archive"]]
        self.gain = float(state["gain"])


class GradientWeights(Reward):
    """Weighted objectives whose weights follow their influence on all (S114).

    `w <- softmax(log w + rate <g_i, sum_j g_j> / mu)` stays on the simplex; a rate of 0 keeps it.
    """

    def __init__(self, objectives: Sequence[str], rate: float = 1.0, regularization: float = 1.0) -> None:
        """Get ready.

        Args:
            objectives: Metrics.
            rate: Step size of the mirror ascent.
            regularization: mu, its divisor.
        """
        self.objectives, self.rate, self.regularization = tuple(objectives), rate, regularization
        self.weight = torch.full((len(self.objectives),), 1.0 / len(self.objectives), dtype=torch.float64)

    def follow(self, gradients: Tensor) -> None:
        """Move the weights.

        Args:
            gradients: (O, D) of the loss of every objective alone.
        """
        influence = (gradients @ gradients.sum(0)).to(self.weight)
        self.weight = torch.softmax(self.weight.log() + self.rate * influence / self.regularization, 0)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Rewards `(M,)`."""
        return torch.stack([outcomes.need(name) for name in self.objectives], 1).double() @ self.weight

    def state_dict(self) -> dict[str, Any]:
        """The weights."""
        return {"weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.weight = state["weight"].clone()


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Volume between `reference` and the points above it in all objectives, by slices along the first one."""
    inside = [point for point in points if all(value > low for value, low in zip(point, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return max(point[0] for point in inside) - reference[0]
    volume, floor = 0.0, reference[0]
    for height in sorted({point[0] for point in inside}):
        above = [point[1:] for point in inside if point[0] >= height]
        volume += (height - floor) * hypervolume(above, reference[1:])
        floor = height
    return volume
