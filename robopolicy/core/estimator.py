"""The policy-gradient estimator: a loss composed of orthogonal parts (Lv et al. 2025, generalised).

    loss = aggregate( mask * weight * surrogate(log_ratio, advantage, bounds) ) + sum_j coefficient_j * regulariser_j

PPO, DPPO, ReinFlow, GRPO and related methods are configurations of it. Before the first gradient step every ratio is 1,
and the gradient is `-mean(advantage * grad logp)` with the mean of the chosen aggregation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from robopolicy.constraints import NonNegative, Positive
from robopolicy.core.aggregate import AGGREGATES, masked_mean
from robopolicy.core.decisions import Decisions
from robopolicy.core.options import validate_option
from robopolicy.core.ratios import LEVELS, REDUCTIONS, Bounds, ConstantBounds, Hierarchy, importance_weight, log_ratio
from robopolicy.core.regularizers import KL_ESTIMATORS, CoefficientController, Constant, Dual, k3, ratio_variance
from robopolicy.core.selection import MaskRule, Weight, compose
from robopolicy.core.surrogates import LINEAR_IN_LOG_RATIO, SURROGATES


@dataclass(frozen=True)
class EstimatorConfig:
    """Parts of the estimator; the defaults are PPO."""

    level: str = "token"  # of a ratio: token (decision) | unit (chunk, turn) | sequence | hierarchical
    reduction: str = "sum"  # of log-ratios within the level: sum | mean | normalized (divided by count)
    count: Positive = 1.0  # divisor of "normalized", e.g. steps x action dimensions
    hierarchy: Hierarchy = field(default_factory=Hierarchy)  # budgets of the level "hierarchical"
    log_ratio_limit: Positive = 20.0  # log-ratios are clamped to +- this many nats before exp
    bounds: Bounds = field(default_factory=ConstantBounds)  # lowest and highest ratio
    surrogate: str = "clip"  # a key of SURROGATES
    surrogate_options: Mapping[str, float] = field(default_factory=dict[str, float])  # e.g. {"cap": 3.0}
    masks: tuple[MaskRule, ...] = ()  # rules beyond the validity mask
    importance_cap: Positive | None = None  # upper limit of the weight old / behaviour; None: no weight
    importance_level: str = "token"  # token | unit | sequence
    aggregate: str = "token_mean"  # token_mean | sequence_sum | sequence_mean | fixed_length
    length: Positive = 1.0  # divisor of "fixed_length"
    kl: str = "k3"  # estimator of the KL to logp_ref: k1 | k2 | k3
    kl_coef: NonNegative = 0.0
    entropy_coef: float = 0.0  # bonus
    ratio_variance_coef: NonNegative = 0.0  # penalty on (ratio - 1)^2
    weights: tuple[Weight, ...] = ()  # detached factors of the loss per decision

    def __post_init__(self) -> None:
        _known("level", self.level, (*LEVELS, "hierarchical"))
        _known("reduction", self.reduction, REDUCTIONS)
        _known("surrogate", self.surrogate, tuple(SURROGATES))
        _known("importance_level", self.importance_level, tuple(LEVELS))
        _known("aggregate", self.aggregate, tuple(AGGREGATES))
        _known("kl", self.kl, tuple(KL_ESTIMATORS))
        options = options_of(self.surrogate)
        for name, value in self.surrogate_options.items():
            _known(f"option of surrogate '{self.surrogate}'", name, tuple(options))
            validate_option(f"Option '{name}' of surrogate '{self.surrogate}'", options[name], value)


class Estimator:
    """The loss of a configuration. The coefficient controllers are its only state."""

    def __init__(self, config: EstimatorConfig, controllers: Mapping[str, CoefficientController] | None = None) -> None:
        """Compose the parts.

        `controllers` replace the constant coefficients "kl", "entropy" and "ratio_variance", or options of the
        surrogate, e.g. a clip width that shrinks during training.
        """
        self.config = config
        self.controllers: dict[str, CoefficientController] = {
            "kl": Constant(config.kl_coef),
            "entropy": Constant(config.entropy_coef),
            "ratio_variance": Constant(config.ratio_variance_coef),
        }
        self._scheduled = [name for name in options_of(config.surrogate) if name in (controllers or {})]
        for name, controller in (controllers or {}).items():
            _known("controller", name, (*self.controllers, *options_of(config.surrogate)))
            self.controllers[name] = controller

    def __call__(
        self,
        decisions: Decisions,
        advantage: Tensor,
        logp: Tensor,
        entropy: Tensor | None = None,
        *,
        log_stats: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a minibatch, and detached scalars.

        The advantage is (N,) or (N, 1) per row, or (N, T) per decision, and is detached. `logp` and, for an entropy
        bonus, `entropy` (N, T) are under the current parameters. Decisions that a mask rule drops count in the ratio of
        their unit or trajectory, without a gradient. The scalars are `approx_kl` (k3 [nats] at the ratio level; per
        decision if hierarchical), `clip_fraction`, `ratio_mean`, `ratio_max` (largest |ratio - 1|), and, where used,
        `entropy`, `kl_ref` and `ratio_variance`. `log_stats=False` omits the statistics of the ratio, as costly as the
        loss.
        """
        if logp.shape != decisions.logp_old.shape:
            raise ValueError(f"logp must have shape {decisions.shape}, got {tuple(logp.shape)}.")
        config = self.config
        advantage = _per_row(advantage, decisions).detach()
        pooled = bool(config.masks) and config.level != "token"  # then dropped decisions share a ratio with kept ones
        with torch.set_grad_enabled(torch.is_grad_enabled() and not pooled):
            plain, gated = self._ratio(logp, decisions)
        mask = compose(config.masks, decisions, advantage, self._bounded(gated.detach()) if config.masks else gated)
        if pooled and mask is not None:
            plain, gated = self._ratio(torch.where(mask, logp, logp.detach()), decisions)
        ratio = self._bounded(gated)
        options = {**config.surrogate_options, **{name: self.controllers[name].value for name in self._scheduled}}
        unclipped = config.surrogate in LINEAR_IN_LOG_RATIO
        surrogate = SURROGATES[config.surrogate]
        out = surrogate(gated if unclipped else ratio, advantage, *config.bounds(decisions), **options)
        losses = out.loss
        for weight in config.weights:
            losses = losses * weight(decisions, advantage, ratio.detach()).detach()
        if config.importance_cap is not None:
            losses = losses * importance_weight(decisions, config.importance_level, config.importance_cap)
        loss = self._aggregate(losses, mask, decisions)
        info: dict[str, Tensor] = {}
        if log_stats:
            # Before the budgets of a hierarchy, which would hide the KL.
            drift = None if plain is gated else self._bounded(plain.detach())
            info = _diagnostics(ratio.detach(), drift, out.clipped, mask)
        penalty = self._regularize(decisions, logp, entropy, ratio, mask, info)
        return (loss if penalty is None else loss + penalty), info

    def observe(self, info: Mapping[str, Tensor], count: int = 1) -> None:
        """Update the controllers with the scalars of one update on `count` trajectories."""
        for name, key in (("kl", "kl_ref"), ("entropy", "entropy"), ("ratio_variance", "ratio_variance")):
            if key in info:
                self.controllers[name].update(float(info[key]), count)
        for name in self._scheduled:
            self.controllers[name].update(0.0, count)

    def state_dict(self) -> dict[str, Any]:
        """State of the controllers."""
        return {name: controller.state_dict() for name, controller in self.controllers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, controller in self.controllers.items():
            controller.load_state_dict(state[name])

    def _ratio(self, logp: Tensor, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Log-ratio `(N, T)` at the level, without and with the budgets of a hierarchy [nats]."""
        config = self.config
        gated = config.level == "hierarchical"
        level = "token" if gated else config.level
        plain = log_ratio(logp, decisions.logp_old, decisions, level, config.reduction, config.count)
        return plain, config.hierarchy(plain, decisions) if gated else plain

    def _bounded(self, ratio: Tensor) -> Tensor:
        return F.hardtanh(ratio, -self.config.log_ratio_limit, self.config.log_ratio_limit)  # a clamp in fewer kernels

    def _aggregate(self, losses: Tensor, mask: Tensor | None, decisions: Decisions) -> Tensor:
        return AGGREGATES[self.config.aggregate](losses, mask, decisions, self.config.length)

    def _regularize(
        self,
        decisions: Decisions,
        logp: Tensor,
        entropy: Tensor | None,
        ratio: Tensor,
        mask: Tensor | None,
        info: dict[str, Tensor],
    ) -> Tensor | None:
        """Sum of the active penalties; adds their values to `info`."""
        terms: list[Tensor] = []
        coefficient = self.controllers["entropy"].value
        if entropy is not None:
            mean = masked_mean(entropy, mask)
            info["entropy"] = mean.detach()
            if coefficient != 0.0:
                shared = mean if self.config.aggregate == "token_mean" else self._aggregate(entropy, mask, decisions)
                terms.append(-coefficient * shared)
        elif coefficient != 0.0:
            raise ValueError("An entropy bonus needs the entropy of the current policy.")
        if (coefficient := self.controllers["kl"].value) != 0.0:
            difference = log_ratio(logp, decisions.require("logp_ref"), decisions)
            kl = KL_ESTIMATORS[self.config.kl](difference)
            info["kl_ref"] = masked_mean(kl.detach(), mask)
            terms.append(coefficient * self._aggregate(kl, mask, decisions))
        constrained = self.controllers["ratio_variance"]
        if constrained.value != 0.0 or isinstance(constrained, Dual):  # a multiplier of 0 may rise
            variance = ratio_variance(ratio)
            info["ratio_variance"] = masked_mean(variance.detach(), mask)
            terms.append(constrained.value * self._aggregate(variance, mask, decisions))
        return functools.reduce(torch.add, terms) if terms else None


def options_of(surrogate: str) -> dict[str, Any]:
    """Options of a surrogate and their types: its arguments after the four common ones."""
    function = SURROGATES[surrogate]
    hints = get_type_hints(function, include_extras=True)
    return {name: hints[name] for name in tuple(inspect.signature(function).parameters)[4:]}


def _diagnostics(ratio: Tensor, drift: Tensor | None, clipped: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Scalars of the log-ratios `(N, T)`; `drift` has the ones for the KL if they differ from `ratio`."""
    change = torch.expm1(ratio)  # ratio - 1
    counted = change if mask is None else change.masked_fill(~mask, 0.0)
    return {
        "approx_kl": masked_mean(change - ratio if drift is None else k3(-drift), mask),
        "clip_fraction": masked_mean(clipped, mask),
        "ratio_mean": masked_mean(change, mask) + 1.0,
        "ratio_max": counted.abs().max(),
    }


def _per_row(advantage: Tensor, decisions: Decisions) -> Tensor:
    """Advantage as (N, 1) or (N, T)."""
    rows, length = decisions.shape
    if advantage.shape == (rows,):
        return advantage.unsqueeze(1)
    if advantage.shape not in ((rows, 1), (rows, length)):
        raise ValueError(f"advantage must be ({rows},), ({rows}, 1) or {(rows, length)}, got {tuple(advantage.shape)}.")
    return advantage


def _known(kind: str, name: str, options: tuple[str, ...]) -> None:
    if name not in options:
        raise ValueError(f"Unknown {kind} '{name}'; known: {', '.join(options) or 'none'}.")
