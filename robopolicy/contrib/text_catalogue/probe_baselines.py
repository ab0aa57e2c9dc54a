"""Baselines predicted from features, e.g. hidden states of the actor, without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions, counted_rows
from robopolicy.core.group_statistics import ROLLOUTS

linalg: Any = torch.linalg  # untyped in torch


class RidgeProbe:
    """Ridge regression on the leading principal components of features, over the last `size` examples."""

    def __init__(self, components: int = 32, ridge: float = 1.0, size: int = 4096) -> None:
        self.components, self.ridge, self.size = components, ridge, size
        self.features: Tensor | None = None  # (M, D)
        self.targets: Tensor | None = None  # (M,)
        self._fitted: tuple[Tensor, Tensor, Tensor] | None = None  # mean (D,), directions (D, k), weights (k + 1,)

    def observe(self, features: Tensor, targets: Tensor) -> None:
        """Add examples (B, D) and (B,); the next prediction fits again."""
        features, targets = features.detach().double().cpu(), targets.detach().double().cpu()
        if self.features is not None and self.targets is not None:
            features, targets = torch.cat([self.features, features]), torch.cat([self.targets, targets])
        self.features, self.targets, self._fitted = features[-self.size :], targets[-self.size :], None

    def predict(self, features: Tensor) -> Tensor:
        """Predict (B,) for features (B, D); 0 before the first example."""
        if self.features is None or self.targets is None:
            return torch.zeros(len(features), dtype=features.dtype, device=features.device)
        if self._fitted is None:
            self._fitted = self._fit(self.features, self.targets)
        mean, directions, weights = self._fitted
        known = (features.double().cpu() - mean) @ directions
        return (known @ weights[:-1] + weights[-1]).to(features)

    def _fit(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = features.mean(0)
        centred = features - mean
        vectors: Tensor = linalg.eigh(centred.mT @ centred)[1]  # by ascending variance
        directions = vectors[:, -min(self.components, vectors.shape[1]) :]
        known = centred @ directions
        gram = known.mT @ known
        weights: Tensor = linalg.solve(gram + self.ridge * torch.eye(len(gram)).to(gram), known.mT @ targets)
        return mean, directions, torch.cat([weights, targets.mean().unsqueeze(0)])

    def state_dict(self) -> dict[str, Any]:
        """Return the examples."""
        return {"features": self.features, "targets": self.targets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.features, self.targets, self._fitted = state["features"], state["targets"], None


class ProbeBaseline:
    """Subtract the prediction of a ridge probe for the other rollouts of the group (POISE, Choi et al. 2026).

    Features are `extra["features"]` (N, D), e.g. hidden states and entropies of the actor. The baseline of a row does
    not depend on the row itself. After the update, the probe is fitted to the mean reward of the other rollouts.
    """

    centres: ClassVar[bool] = True

    def __init__(self, components: PositiveInt = 32, ridge: NonNegative = 1.0, size: PositiveInt = 4096) -> None:
        self.probe = RidgeProbe(components, ridge, size)

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        predicted = self.probe.predict(decisions.require_extra("features")).to(advantage).unsqueeze(1)
        return advantage - siblings(predicted, decisions)

    def observe(self, decisions: Decisions) -> None:
        """Fit the mean reward of the other rollouts, or the own reward of a single rollout, to its features."""
        first = counted_rows(decisions)
        reward = outcome(decisions)
        segments = ROLLOUTS.segments(reward, decisions)
        single = segments.broadcast(segments.count) < 1.5
        targets = torch.where(single, reward, siblings(reward, decisions))[first, 0]
        self.probe.observe(decisions.require_extra("features")[first], targets)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the probe."""
        return self.probe.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.probe.load_state_dict(state)


class ContextBaseline:
    """Subtract a success rate estimated from outcomes of recent similar prompts, without training.

    Source: Zhang et al. 2026.

    Prompts or start states are `extra["prompt_features"]` (N, D); the prediction weights the last `size` outcomes by
    `exp(-distance^2 / (2 width^2))`. It replaces the pretrained in-context predictor of the source.
    """

    centres: ClassVar[bool] = True

    def __init__(self, width: Positive = 1.0, size: PositiveInt = 4096, prior: NonNegative = 0.5) -> None:
        self.width, self.size, self.prior = width, size, prior
        self.features: Tensor | None = None  # (M, D)
        self.outcomes: Tensor | None = None  # (M,)

    def predict(self, features: Tensor) -> Tensor:
        """Predict success rates (B,) for prompts (B, D); the prior counts as one outcome at distance 0."""
        if self.features is None or self.outcomes is None:
            return torch.full_like(features[:, 0], self.prior)
        near = torch.cdist(features.double().cpu(), self.features).square()
        weight = torch.exp(-near / (2.0 * self.width**2))
        return ((weight @ self.outcomes + self.prior) / (weight.sum(1) + 1.0)).to(features)

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Centre the advantage."""
        return advantage - self.predict(decisions.require_extra("prompt_features")).to(advantage).unsqueeze(1)

    def observe(self, decisions: Decisions) -> None:
        """Store prompts and outcomes."""
        first = counted_rows(decisions)
        features = decisions.require_extra("prompt_features")[first].double().cpu()
        outcomes = outcome(decisions)[first, 0].double().cpu()
        if self.features is not None and self.outcomes is not None:
            features, outcomes = torch.cat([self.features, features]), torch.cat([self.outcomes, outcomes])
        self.features, self.outcomes = features[-self.size :], outcomes[-self.size :]

    def state_dict(self) -> dict[str, Any]:
        """Return the stored pairs."""
        return {"features": self.features, "outcomes": self.outcomes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.features, self.outcomes = state["features"], state["outcomes"]


def siblings(values: Tensor, decisions: Decisions) -> Tensor:
    """Average `values` (N, 1) over the other rollouts of the group; 0 if there is none."""
    segments = ROLLOUTS.segments(values, decisions)
    count = segments.broadcast(segments.count)
    total = segments.broadcast(segments.sum(values))
    return torch.where(count > 1.5, (total - values) / (count - 1.0).clamp(min=1.0), 0.0)
