"""Regularisers of the policy-gradient loss and the controllers of their coefficients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, PositiveInt
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import count_for_fraction, covariance, log_ratio, topk_mask
from robopolicy.plugins import Registry


def k1(difference: Tensor) -> Tensor:
    """`logp - logp_ref`: unbiased value of KL(policy || ref), but its on-policy gradient has mean 0."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """`(logp - logp_ref)^2 / 2`: biased value, but its on-policy gradient is the gradient of KL(policy || ref)."""
    return 0.5 * difference**2


def k3(difference: Tensor) -> Tensor:
    """`exp(-d) - 1 + d` with `d = logp - logp_ref`: unbiased for KL(policy || ref), nonnegative, low variance."""
    return torch.expm1(-difference) + difference


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def gaussian_kl(mean: Tensor, std: Tensor, ref_mean: Tensor, ref_std: Tensor) -> Tensor:
    """Exact KL of two Gaussians per dimension, in the broadcast shape."""
    variance = (std / ref_std) ** 2
    return 0.5 * (variance - 1.0 - variance.log() + ((mean - ref_mean) / ref_std) ** 2)


def ratio_variance(log_ratio: Tensor) -> Tensor:
    """`(ratio - 1)^2` per decision; for small steps about twice the KL (Luo et al. 2026)."""
    return torch.expm1(log_ratio) ** 2


Regularizer = Callable[[Decisions, Tensor, Tensor, Tensor | None], Tensor]
"""`(decisions, advantage (N, 1 or T), logp (N, T), entropy (N, T) or None) -> penalty`.

A penalty per decision `(N, T)` is aggregated like the losses; a scalar is used directly.
"""


@dataclass(frozen=True)
class KLTo:
    """KL to another policy on the same decisions: the reference, or a teacher (KDRL, Xu et al. 2025)."""

    key: str = ""  # extra[key] (N, T) has its log-probabilities; "": `logp_ref`
    kind: str = "k2"  # k1 | k2 | k3
    failed: bool = False  # only on trajectories with outcome <= 0

    def __post_init__(self) -> None:
        if self.kind not in KL_ESTIMATORS:
            raise ValueError(f"Unknown kind '{self.kind}' of a KL; known: {', '.join(KL_ESTIMATORS)}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Penalty `(N, T)`."""
        other = decisions.require_extra(self.key) if self.key else decisions.require("logp_ref")
        kl = KL_ESTIMATORS[self.kind](log_ratio(logp, other, decisions))
        return kl.masked_fill(outcome(decisions) > 0, 0.0) if self.failed else kl


@dataclass(frozen=True)
class CovarianceKL:
    """`|log ratio|` at the fraction `share` of decisions with the highest Cov(logp, A) (KL-Cov, Cui et al. 2025)."""

    share: Fraction = 2e-4  # at least one decision if positive

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Penalty `(N, T)`."""
        mask = decisions.valid()
        picked = topk_mask(covariance(logp.detach(), advantage, decisions), mask, count_for_fraction(mask, self.share))
        return log_ratio(logp, decisions.logp_old, decisions).abs().masked_fill(~picked, 0.0)


REGULARIZERS: Registry[Callable[..., object]] = Registry(
    "parts.regularizer", {"covariance_kl": CovarianceKL, "kl_to": KLTo}
)


class CoefficientController(ABC):
    """A coefficient that may change after each update."""

    value: float

    @abstractmethod
    def update(self, measured: float, count: int = 1) -> None:
        """Update the coefficient from the regularised quantity, measured on `count` trajectories."""

    def state_dict(self) -> dict[str, Any]:
        """State that determines future values."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.value = float(state["value"])


class Constant(CoefficientController):
    """A fixed coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, measured: float, count: int = 1) -> None:
        """Do nothing."""


class Anneal(CoefficientController):
    """Linear or cosine schedule from `start` to `end` over `steps` updates."""

    def __init__(self, start: float, end: float, steps: PositiveInt, shape: str = "linear") -> None:
        if shape not in ("linear", "cosine"):
            raise ValueError(f"Anneal shape must be 'linear' or 'cosine', got {shape!r}.")
        self.start, self.end, self.steps, self.shape = start, end, steps, shape
        self.step = 0
        self.value = start

    def update(self, measured: float, count: int = 1) -> None:
        """Advance the schedule by one step."""
        self.step = min(self.step + 1, self.steps)
        progress = self.step / self.steps
        if self.shape == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        self.value = self.start + (self.end - self.start) * progress

    def state_dict(self) -> dict[str, Any]:
        """Value and step."""
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.value, self.step = float(state["value"]), int(state["step"])


class Dual(CoefficientController):
    """Multiplier of the constraint `measured <= target`: rises by `rate` times the excess, at least 0."""

    def __init__(self, value: float, target: float, rate: NonNegative) -> None:
        self.value, self.target, self.rate = value, target, rate

    def update(self, measured: float, count: int = 1) -> None:
        """Take a step of projected gradient ascent."""
        self.value = max(self.value + self.rate * (measured - self.target), 0.0)


CONTROLLERS: Registry[Callable[..., CoefficientController]] = Registry(
    "parts.controller", {"anneal": Anneal, "dual": Dual}
)
