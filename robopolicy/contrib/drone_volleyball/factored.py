"""Optimisation of a few bounded settings with one agent per group and a shared score, by `ask` and `tell`.

Controller gains or hardware parameters of different parts of a machine hardly interact, so each part gets a separate
agent. The agents split the shared score into a sum of individual values (value decomposition, Sunehag et al. 2017),
here by Bayesian linear regression on the options that they took. Each agent then takes the best option in one draw from
the posterior (Thompson sampling). If the score is such a sum, about as many trials as options determine it, while the
number of combinations grows exponentially with the agents. Settings that interact belong to one agent, whose options
are all combinations of their levels. Source: Krishnan et al. 2022.

Do not use it for more than some hundred options. With a few hundred trials of a smooth score, Bayesian optimisation of
another package is often better.

Deviations: the source's multi-agent training is not public. Its reward `target / |x - target|` is infinite at the
target and negative for negative targets, and its code maximises the inverse, which moves away from the target;
`nearness` orders trials as the source intends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import AskTellOptimizer

_MOST_OPTIONS = 1000  # of all agents


@dataclass(frozen=True)
class Parameter:
    """A setting and its levels."""

    name: str
    low: float
    high: float
    levels: int = 9  # evenly spaced from low to high, both included
    log: bool = False  # evenly spaced in the logarithm

    def __post_init__(self) -> None:
        if not self.low < self.high or self.levels < 2 or (self.log and self.low <= 0):
            raise UserError(
                f"Parameter '{self.name}' needs low < high, at least 2 levels, and low > 0 with log=True; got "
                f"[{self.low}, {self.high}], {self.levels} levels."
            )

    def grid(self) -> Tensor:
        """The levels, (levels,) float64."""
        if self.log:
            return torch.logspace(math.log10(self.low), math.log10(self.high), self.levels, dtype=torch.float64)
        return torch.linspace(self.low, self.high, self.levels, dtype=torch.float64)

    def about(self, value: float) -> Parameter:
        """A finer parameter between the neighbours of the level nearest to `value`."""
        grid = self.grid()
        place = int((grid - value).abs().argmin())
        low, high = (float(grid[min(max(place + step, 0), self.levels - 1)]) for step in (-1, 1))
        return Parameter(self.name, low, high, self.levels, self.log)


def nearness(value: float, target: float) -> float:
    """Closeness of a metric to its target, in (0, 1], 1 at the target: `|target| / (|target| + |value - target|)`.

    It orders values like `target / |value - target|` (Krishnan et al. 2022), but is finite at the target and never
    negative. For several metrics use the product, or the sum.
    """
    if target == 0:
        raise UserError("Nearness is relative to the target, which must not be 0; shift the metric.")
    return abs(target) / (abs(target) + abs(value - target))


class FactoredAgents(AskTellOptimizer):
    """Optimiser with one agent per group of parameters; vectors are their values, in the order of the groups."""

    def __init__(
        self, groups: Sequence[Sequence[Parameter]], population: int = 8, noise: float = 0.2, seed: int = 0
    ) -> None:
        """Create the agents.

        Args:
            groups: Parameters of each agent; parameters that interact belong to one group.
            population: P, trials per round.
            noise: Standard deviation of the residual of the sum of values, relative to the scores'.
            seed: Of the draws.

        Raises:
            UserError: A group is empty, or there are too many options.
        """
        self.groups = [list(group) for group in groups]
        if not self.groups or not all(self.groups) or population < 1 or noise <= 0:
            raise UserError("Factored agents need one or more nonempty groups, population >= 1 and noise > 0.")
        self.population, self.noise = population, noise
        self.sizes = [math.prod(parameter.levels for parameter in group) for group in self.groups]  # options K
        if sum(self.sizes) > _MOST_OPTIONS:
            raise UserError(
                f"The agents have {self.sizes} options, more than {_MOST_OPTIONS}; use fewer levels or smaller groups."
            )
        self.options = [_combinations(group) for group in self.groups]  # (K, size of the group) each
        count = sum(self.sizes)
        self._together = torch.zeros(count, count, dtype=torch.float64)  # number of trials with both of two options
        self._earned = torch.zeros(count, dtype=torch.float64)  # sum of the scores of the trials with an option
        self._scores = torch.zeros(0, dtype=torch.float64)  # (n,) of all trials
        self._asked = torch.zeros(0, len(self.sizes), dtype=torch.long)  # (P, agents) options
        self._generator = torch.Generator().manual_seed(seed)

    def ask(self) -> Tensor:
        """Trials `(P, D)`, in which every agent takes the best option of one draw from the posterior."""
        mean, factor = self._posterior()
        drawn = torch.randn(len(mean), self.population, generator=self._generator, dtype=torch.float64)
        values = mean + torch.linalg.solve_triangular(factor.mT, drawn, upper=True).T  # (P, options)
        self._asked = torch.stack([part.argmax(1) for part in values.split(self.sizes, 1)], 1)
        return self._vectors(self._asked)

    def tell(self, fitness: Tensor) -> None:
        """Update the posterior with the shared score `(P,)` of the trials; NaN counts as the worst so far."""
        scores = fitness.double()
        known = torch.cat([self._scores, scores])
        known = known[~known.isnan()]
        scores = torch.where(scores.isnan(), known.min() if len(known) else 0.0, scores)
        taken = self._taken()
        self._together += taken.T @ taken
        self._earned += taken.T @ scores
        self._scores = torch.cat([self._scores, scores])

    def best(self) -> Tensor:
        """The options (D,) with the highest mean values."""
        chosen = torch.stack([part.argmax() for part in self.values()])
        return self._vectors(chosen[None])[0]

    def values(self) -> list[Tensor]:
        """Posterior mean (K,) of each agent's option values, in units of the score; 0 is average."""
        _, spread = self._scale()
        return [spread * part for part in self._posterior()[0].split(self.sizes)]

    def about_best(self, seed: int = 0) -> FactoredAgents:
        """New agents with parameters between the neighbours of the best levels."""
        values = iter(self.best().tolist())
        groups = [[parameter.about(next(values)) for parameter in group] for group in self.groups]
        return FactoredAgents(groups, self.population, self.noise, seed)

    def _posterior(self) -> tuple[Tensor, Tensor]:
        """Mean (options,) of the standardised values, and Cholesky factor of their precision."""
        centre, spread = self._scale()
        precision = torch.eye(len(self._earned), dtype=torch.float64) + self._together / self.noise**2
        factor = torch.linalg.cholesky(precision)
        projected = (self._earned - centre * self._together.diagonal()) / (spread * self.noise**2)
        return torch.cholesky_solve(projected[:, None], factor)[:, 0], factor

    def _scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the scores; 1 instead of an undefined standard deviation."""
        if len(self._scores) < 2 or float(self._scores.std()) == 0:
            return float(self._scores.mean()) if len(self._scores) else 0.0, 1.0
        return float(self._scores.mean()), float(self._scores.std())

    def _taken(self) -> Tensor:
        """(P, options) 1 for the options taken."""
        return torch.cat(
            [torch.nn.functional.one_hot(self._asked[:, i], size) for i, size in enumerate(self.sizes)], 1
        ).double()

    def _vectors(self, chosen: Tensor) -> Tensor:
        """(P, D) parameters of options (P, agents)."""
        return torch.cat([options[chosen[:, i]] for i, options in enumerate(self.options)], 1)

    def state_dict(self) -> dict[str, Any]:
        """Trials, scores and the generator."""
        kept = {name: getattr(self, name).clone() for name in ("_together", "_earned", "_scores", "_asked")}
        return {**kept, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name in ("_together", "_earned", "_scores", "_asked"):
            setattr(self, name, state[name].clone())
        self._generator.set_state(state["generator"])


def _combinations(group: Sequence[Parameter]) -> Tensor:
    """All combinations of levels (K, size of the group)."""
    grids = torch.meshgrid(*(parameter.grid() for parameter in group), indexing="ij")
    return torch.stack([grid.flatten() for grid in grids], 1)
