"""A recipe: a published method as plain data, built from the components of the core.

Order of a batch: `select` rows -> `advantage` -> per epoch and minibatch `loss` and a gradient step -> `observe`. The
key `rollout` (rewards, samplers, rollout strategies, interventions) is not read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from robopolicy.constraints import PositiveInt
from robopolicy.core.advantage import Pipeline, Stateful
from robopolicy.core.advantage_sources import Critic, ValueTargets
from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import Decisions, first_rows
from robopolicy.core.estimator import Estimator, EstimatorConfig, options_of
from robopolicy.core.objectives import Objective
from robopolicy.core.options import validate_option
from robopolicy.core.recipe_keys import CHOICES, DEFAULTS
from robopolicy.core.registry import build
from robopolicy.core.regularizers import CoefficientController, Constant, Regularizer
from robopolicy.core.selection import Selector

ESTIMATOR_TERMS = ("kl", "entropy", "ratio_variance")


class Recipe:
    """The components of a method. `load_state_dict` restores their state."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        """Build the components; `from_dict` validates `plain` first."""
        self.plain = {**DEFAULTS, **plain}
        self.title, self.source = str(self.plain["title"]), str(self.plain["source"])
        self.implementation, self.data = str(self.plain["implementation"]), str(self.plain["data"])
        self.epochs, self.minibatches = int(self.plain["epochs"]), int(self.plain["minibatches"])
        self.group_size = int(self.plain["group_size"])
        self.rollout: Mapping[str, Any] = self.plain["rollout"]
        self.selectors: list[Selector] = [build("selector", entry) for entry in self.plain["select"]]
        self.advantage_source: Callable[[Decisions], Tensor] = build("advantage_source", self.plain["advantage_source"])
        self.critic: Critic | None = None if self.plain["critic"] is None else build("critic", self.plain["critic"])
        if self.critic is not None and not isinstance(self.advantage_source, ValueTargets):
            source = self.plain["advantage_source"]
            raise ValueError(f"A critic needs an advantage source with values, e.g. gae, got {source!r}.")
        self.pipeline: Pipeline = build("pipeline", self.plain["advantage"])
        controllers: dict[str, CoefficientController] = {
            name: build("controller", entry) for name, entry in self.plain["controllers"].items()
        }
        config = None if self.plain["estimator"] is None else build("estimator", self.plain["estimator"])
        terms = () if config is None else (*ESTIMATOR_TERMS, *options_of(config.surrogate))
        own = {name: controllers.pop(name) for name in terms if name in controllers}
        self.estimator = None if config is None else Estimator(config, own)
        self.objective, self.objective_coef = _objective(self.plain["objective"])
        self.regularizers: dict[str, Regularizer] = {}
        self.controllers: dict[str, CoefficientController] = {}
        for entry in self.plain["regularizers"]:
            name, coef, part = _weighted("regularizer", entry)
            if name in self.regularizers:
                raise ValueError(f"Regularizer '{name}' is listed twice.")
            self.regularizers[name] = part
            self.controllers[name] = controllers.pop(name, Constant(coef))
        if controllers:
            known = ", ".join([*terms, *self.regularizers])
            raise ValueError(f"No term for controller '{next(iter(controllers))}'; terms: {known}.")

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Recipe:
        """Build a recipe from plain values with the keys of `DEFAULTS`.

        Raises:
            ValueError: A key, name, option or value is unknown or invalid.
        """
        for key in plain:
            if key not in DEFAULTS:
                raise ValueError(f"Unknown key '{key}' of a recipe; known: {', '.join(DEFAULTS)}.")
        for key, options in CHOICES.items():
            if plain.get(key, DEFAULTS[key]) not in options:
                raise ValueError(f"'{key}' of a recipe must be one of {', '.join(options)}, got {plain[key]!r}.")
        for key in ("source", "title", "deviations"):
            validate_option(f"'{key}' of a recipe", str, plain.get(key, DEFAULTS[key]))
        for key in ("epochs", "minibatches", "group_size"):
            validate_option(f"'{key}' of a recipe", PositiveInt, plain.get(key, DEFAULTS[key]))
        for key, default in DEFAULTS.items():
            expected = "a list" if isinstance(default, list) else "a mapping" if isinstance(default, dict) else ""
            fits = isinstance(plain.get(key, default), list if expected == "a list" else Mapping)
            if expected and not fits and not (key == "estimator" and plain[key] is None):
                raise ValueError(f"'{key}' of a recipe must be {expected}, got {plain[key]!r}.")
        if plain.get("rollout") and plain.get("data", "rollout") != "rollout":
            raise ValueError(f"A recipe with data: {plain['data']} samples no rollouts; leave out 'rollout'.")
        if plain.get("estimator", {}) is None and plain.get("objective") is None:
            raise ValueError("A recipe needs an estimator or an objective.")
        return cls(plain)

    def select(self, decisions: Decisions, generator: torch.Generator | None = None) -> Tensor:
        """Indices (M,) of the rows to train on, possibly empty; all rows if there is no selector."""
        rows = torch.arange(len(decisions), device=decisions.logp_old.device)
        for selector in self.selectors:
            if len(rows):
                rows = rows[selector(decisions.select(rows), generator)]
        return rows

    @torch.no_grad()
    def advantage(self, decisions: Decisions) -> Tensor:
        """Advantage (N, 1) per row or (N, T) per decision of all selected rows, possibly empty."""
        if len(decisions) == 0:
            return decisions.logp_old.new_zeros(0, 1)
        return self.pipeline(self.advantage_source(decisions), decisions)

    @torch.no_grad()
    def value_targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Targets (N, T) of the critic, and the bool mask (N, T) of the entries that are fitted."""
        assert isinstance(self.advantage_source, ValueTargets)
        return self.advantage_source.targets(decisions)

    def loss(
        self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a minibatch (estimator, objective and regularisers) and detached scalars of these terms.

        `decisions` has whole groups if there is an objective; `advantage` has rows of the advantage (N, 1) or (N, T);
        `logp` and, if a term needs it, `entropy` (N, T) are under the current parameters.
        """
        advantage = advantage.detach()
        terms: list[Tensor] = []
        info: dict[str, Tensor] = {}
        if self.estimator is not None:
            term, info = self.estimator(decisions, advantage, logp, entropy)
            terms.append(term)
        if self.objective is not None:
            term, scalars = self.objective(decisions, advantage, logp)
            terms.append(self.objective_coef * term)
            info |= scalars
        for name, regularizer in self.regularizers.items():
            penalty = regularizer(decisions, advantage, logp, entropy)
            if penalty.dim():
                penalty = self._aggregate(penalty, decisions)
            info[name] = penalty.detach()
            terms.append(self.controllers[name].value * penalty)
        return torch.stack(terms).sum(), info

    def observe(self, decisions: Decisions, info: Mapping[str, Tensor]) -> None:
        """Update trackers with the batch and controllers with the scalars of `loss`, once after each update."""
        self.pipeline.observe(decisions)
        count = len(first_rows(decisions))
        if self.estimator is not None:
            self.estimator.observe(info, count)
        for name, controller in self.controllers.items():
            if name in info:
                controller.update(float(info[name]), count)

    def state_dict(self) -> dict[str, Any]:
        """State of all stateful components."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Stateful]:
        named: dict[str, object] = {
            "advantage_source": self.advantage_source,
            "pipeline": self.pipeline,
            "objective": self.objective,
        }
        named |= {f"select.{i}": selector for i, selector in enumerate(self.selectors)}
        named |= {f"regularizer.{name}": part for name, part in self.regularizers.items()}
        named |= {f"controller.{name}": part for name, part in self.controllers.items()}
        named |= {} if self.estimator is None else {"estimator": self.estimator}
        return {name: part for name, part in named.items() if isinstance(part, Stateful)}

    def _aggregate(self, penalty: Tensor, decisions: Decisions) -> Tensor:
        """Aggregate a penalty (N, T) as the estimator does; over all decisions without an estimator."""
        config = EstimatorConfig() if self.estimator is None else self.estimator.config
        mask = None if decisions.mask is None else decisions.valid()
        return AGGREGATES[config.aggregate](penalty, mask, decisions, config.length)


def _objective(plain: Any) -> tuple[Objective | None, float]:
    if plain is None:
        return None, 0.0
    _, coef, part = _weighted("objective", plain)
    return part, coef


def _weighted(kind: str, plain: Any) -> tuple[str, float, Any]:
    """Name, weight `coef` (default 1) and component of an entry."""
    if isinstance(plain, str):
        return plain, 1.0, build(kind, plain)
    if not isinstance(plain, Mapping):
        raise ValueError(f"Expected a name or a mapping of options for {kind}, found {plain!r}.")
    options = dict(cast(Mapping[str, Any], plain))
    what = f"Weight 'coef' of {kind} '{options.get('name', '')}'"
    coef = float(validate_option(what, float, options.pop("coef", 1.0)))
    return str(options.get("name", "")), coef, build(kind, options)
