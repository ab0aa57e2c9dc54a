"""Rewards with state: fewest tool calls so far, weights of objectives from gradients or the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative
from robopolicy.contrib.text_catalogue.reward_terms import cosine_calls
from robopolicy.text.rollouts.protocols import Outcomes, Reward


class ToolCalls(Reward):
    """The reward times the efficiency of its tool calls, relative to the fewest calls of a success.

    Source: OTC, Wang et al. 2025.

    The fewest calls of a success are kept per task as a running minimum. Failures get no reward for few calls.
    """

    def __init__(self, calls: str = "calls", scale: float = 4.0, weight: float = 1.0) -> None:
        """Validate and store the options.

        Args:
            calls: Metric with the number of calls (or of steps, contacts, interventions).
            scale: c of `cosine_calls`.
            weight: Factor of the reward.
        """
        self.calls, self.scale, self.weight = calls, scale, weight
        self._fewest: dict[int, float] = {}

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        calls = outcomes.require(self.calls)
        for key, count, reward in zip(outcomes.key.tolist(), calls.tolist(), outcomes.reward.tolist(), strict=True):
            if reward > 0.5:
                self._fewest[key] = min(count, self._fewest.get(key, math.inf))
        own = [self._fewest.get(key, count) for key, count in zip(outcomes.key.tolist(), calls.tolist(), strict=True)]
        fewest = torch.tensor(own, dtype=calls.dtype)
        return self.weight * outcomes.reward * cosine_calls(calls, fewest, self.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the fewest calls per task."""
        return {"fewest": dict(self._fewest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._fewest = {int(key): float(count) for key, count in state["fewest"].items()}


class HypervolumeFactor(Reward):
    """The reward times `0.5 + 1.5 tanh(gain)`: more if the batch extends the Pareto front (Lu et al. 2025).

    The gain is the hypervolume that the mean metrics of the batch add to the metrics of earlier batches, above a
    reference point. It is equal for all trajectories, so standardised advantages do not change.
    """

    def __init__(self, metrics: Sequence[str], reference: Sequence[float]) -> None:
        """Validate and store the options.

        Args:
            metrics: Objectives, higher is better.
            reference: Lower bounds of the metrics, e.g. their values for the initial policy.

        Raises:
            ValueError: The numbers of metrics and reference values differ.
        """
        if len(metrics) != len(reference) or not metrics:
            raise ValueError(f"Hypervolume needs one reference per metric, got {len(reference)} for {len(metrics)}.")
        self.metrics, self.reference = tuple(metrics), tuple(reference)
        self.front: list[tuple[float, ...]] = []
        self.gain = 0.0

    def update_front(self, point: Sequence[float]) -> None:
        """Compute the gain of the objectives of a batch, and add them to the front if they are not dominated."""
        added = tuple(point)
        whole = hypervolume([*self.front, added], self.reference)
        self.gain = max(0.0, whole - hypervolume(self.front, self.reference))
        if self.gain:
            self.front = [old for old in self.front if any(a > b for a, b in zip(old, added, strict=True))] + [added]

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        self.update_front([float(outcomes.require(name).mean()) for name in self.metrics])
        return outcomes.reward * (0.5 + 1.5 * math.tanh(self.gain))

    def state_dict(self) -> dict[str, Any]:
        """Return the front and the last gain."""
        return {"front": [list(point) for point in self.front], "gain": self.gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.front = [tuple(point) for point in state["front"]]
        self.gain = float(state["gain"])


class GradientWeights(Reward):
    """Weighted sum of objectives, with weights that follow their influence on all objectives (Lu et al. 2025).

    `w <- softmax(log w + rate <g_i, sum_j g_j> / mu)`; a rate of 0 keeps the weights.
    """

    def __init__(self, objectives: Sequence[str], rate: NonNegative = 1.0, regularization: NonNegative = 1.0) -> None:
        """Validate and store the options.

        Args:
            objectives: Metrics.
            rate: Step size of the mirror ascent.
            regularization: mu, divisor of the step.
        """
        self.weighted_objectives, self.rate, self.regularization = tuple(objectives), rate, regularization
        self.weight = torch.full(
            (len(self.weighted_objectives),), 1.0 / len(self.weighted_objectives), dtype=torch.float64
        )

    def set_influence(self, influence: Tensor) -> None:
        """Update the weights with the influence `(O,)` of every objective."""
        step = self.rate * influence.to(self.weight) / self.regularization
        self.weight = torch.softmax(self.weight.log() + step, 0)

    def __call__(self, outcomes: Outcomes) -> Tensor:
        """Compute rewards `(M,)`."""
        return torch.stack([outcomes.require(name) for name in self.weighted_objectives], 1).double() @ self.weight

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        return {"weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.weight = state["weight"].clone()


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Compute the volume between `reference` and points above it in all objectives, by slices of the first."""
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
