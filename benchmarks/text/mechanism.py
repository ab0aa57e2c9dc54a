"""Whether the mechanism of a recipe acts in a run: a verdict on a recipe needs a run in which it differs.

    advantage   the advantage is not proportional to the baseline's on the same rows
    surrogate   the gradient differs from the clipped surrogate with the same advantage, for every aggregation
    loss        the gradient of the loss is not proportional to the baseline's on the same rows
    calls       messages call a tool
    branches    rollouts continue others

Gradients are with respect to the log-probabilities of the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.recipe import Recipe
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.text_env import score

ADVANTAGE, SURROGATE, LOSS, CALLS, BRANCHES = "advantage", "surrogate", "loss", "calls", "branches"
METRICS = {CALLS: "rollout/calls", BRANCHES: "rollout/continued"}  # metric that is positive if the mechanism acts
REASONS = {
    ADVANTAGE: "its advantage is proportional to the advantage of {baseline}",
    SURROGATE: "its loss has the gradient of a clipped surrogate",
    LOSS: "its loss has the gradient of {baseline}",
    CALLS: "no tool is called",
    BRANCHES: "no rollout branches",
}
KINDS = tuple(REASONS)
TOLERANCE = 1e-3  # largest difference of proportional values
ACTS = 0.1  # least share of the observed updates in which a mechanism acts
EVERY = 5  # updates between two observations of gradients and advantages


@dataclass
class Mechanism:
    """Record of a run: the difference that the mechanism makes, one entry per observed update."""

    kind: str
    baseline: str
    differences: list[float] = field(default_factory=list[float])

    def observe_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record the metric of the mechanism after an update, if it has one."""
        if self.kind in METRICS:
            self.differences.append(metrics.get(METRICS[self.kind], 0.0))

    @property
    def share(self) -> float:
        """Share of the observed updates in which the mechanism acted."""
        limit = 0.0 if self.kind in METRICS else TOLERANCE
        return fmean(difference > limit for difference in self.differences) if self.differences else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return kind, share of updates, mean difference, and the reason why it did not act; empty if it did."""
        reason = "" if self.share >= ACTS else REASONS[self.kind].format(baseline=self.baseline)
        size = fmean(self.differences) if self.differences else 0.0
        return {"kind": self.kind, "share": self.share, "difference": size, "reason": reason}


class ObservedRecipe(TextRecipe):
    """A recipe whose minibatches are compared with a baseline."""

    def watch(self, mechanism: Mechanism, baseline: Recipe) -> None:
        """Observe every `EVERY`th update."""
        self._mechanism, self._baseline = mechanism, baseline
        self._observed = -1  # last observed update

    def _loss(self, part: Decisions, advantage: Tensor, fitted: Any) -> Any:
        if self._mechanism.kind not in METRICS and self.updates % EVERY == 0:
            with torch.no_grad():
                out = score(self.policy, part, **self.score_settings)
            found = difference(
                self._mechanism.kind, self.recipe, self._baseline, part, advantage, out.logp, out.entropy
            )
            if self._observed != self.updates:
                self._mechanism.differences.append(found)
            self._mechanism.differences[-1] = max(self._mechanism.differences[-1], found)
            self._observed = self.updates
        return super()._loss(part, advantage, fitted)


def difference(
    kind: str, recipe: Recipe, baseline: Recipe, part: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor
) -> float:
    """Compute how far a minibatch of a recipe is from a multiple of the baseline's: 0 proportional, 1 unrelated.

    Args:
        kind: advantage | surrogate | loss.
        recipe: The recipe.
        baseline: The recipe to compare with.
        part: (N, T) whole groups.
        advantage: (N, 1) or (N, T) of the recipe.
        logp: (N, T) under the current policy.
        entropy: (N, T) under the current policy [nats].
    """
    valid = part.valid()
    if kind == ADVANTAGE:
        own, other = (value.expand(valid.shape)[valid] for value in (advantage, baseline.advantage(part)))
        return disproportion(own, other)
    own = _gradient(recipe, part, advantage, logp, entropy)[valid]
    if kind == LOSS:
        return disproportion(own, _gradient(baseline, part, baseline.advantage(part), logp, entropy)[valid])
    plain = [Estimator(EstimatorConfig(aggregate=name)) for name in AGGREGATES]
    return min(disproportion(own, _gradient(loss, part, advantage, logp, entropy)[valid]) for loss in plain)


def disproportion(own: Tensor, other: Tensor) -> float:
    """Compute the share of the squares of `own` that no positive multiple of `other` explains; 0 if `own` is zero."""
    own, other = own.double(), other.double()
    squares = own.square().sum() * other.square().sum()
    if not bool(own.any()):
        return 0.0
    return float(1.0 - (own * other).sum().clamp(min=0.0).square() / squares) if bool(squares > 0) else 1.0


def _gradient(loss: Recipe | Estimator, part: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
    """Gradient `(N, T)` with respect to the log-probabilities."""
    leaf = logp.detach().requires_grad_()
    function = loss.loss if isinstance(loss, Recipe) else loss
    value, _ = function(part, advantage, leaf, entropy)
    (found,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return torch.zeros_like(logp) if found is None else found
