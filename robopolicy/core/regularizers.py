"""Regularisers of the policy-gradient loss and the controllers of their coefficients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import outcome
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, by_group
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments
from robopolicy.core.signals import covariance, highest, share_count
from robopolicy.limits import Count, NotNegative, Positive, Share
from robopolicy.plugins import Registry


def k1(difference: Tensor) -> Tensor:
    """`logp - logp_ref`: unbiased for KL(policy || ref) in value, but its on-policy gradient is 0 on average."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """`(logp - logp_ref)^2 / 2`: biased in value, its on-policy gradient is that of KL(policy || ref)."""
    return 0.5 * difference**2


def k3(difference: Tensor) -> Tensor:
    """`exp(-d) - 1 + d` with `d = logp - logp_ref`: unbiased for KL(policy || ref), never negative, low variance."""
    return torch.expm1(-difference) + difference


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def gaussian_kl(mean: Tensor, std: Tensor, ref_mean: Tensor, ref_std: Tensor) -> Tensor:
    """Exact KL of two Gaussians per dimension, in the broadcast shape; sum over dimensions and chain steps."""
    variance = (std / ref_std) ** 2
    return 0.5 * (variance - 1.0 - variance.log() + ((mean - ref_mean) / ref_std) ** 2)


def ratio_variance(log_ratio: Tensor) -> Tensor:
    """`(ratio - 1)^2` per decision; for small steps about twice the KL (S047)."""
    return torch.expm1(log_ratio) ** 2


Regularizer = Callable[[Decisions, Tensor, Tensor, Tensor | None], Tensor]
"""`(decisions, advantage (N, 1 or T), logp (N, T), entropy (N, T) or None) -> penalty`.

A penalty per decision `(N, T)` is aggregated as the losses are; a scalar is taken as it is.
"""


@dataclass(frozen=True)
class KLTo:
    """KL to another policy that scored the same decisions: the reference, or a teacher (KDRL, S080)."""

    key: str = ""  # extra[key] (N, T) holds its log-probabilities; "": those of the reference, `logp_ref`
    kind: str = "k2"  # k1 | k2 | k3
    failed: bool = False  # only on trajectories with an outcome of 0 or less

    def __post_init__(self) -> None:
        if self.kind not in KL_ESTIMATORS:
            raise ValueError(f"Unknown kind '{self.kind}' of a KL; known: {', '.join(KL_ESTIMATORS)}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Penalty `(N, T)`."""
        other = decisions.need_extra(self.key) if self.key else decisions.need("logp_ref")
        kl = KL_ESTIMATORS[self.kind](log_ratio(logp, other, decisions))
        return kl.masked_fill(outcome(decisions) > 0, 0.0) if self.failed else kl


@dataclass(frozen=True)
class Imitation:
    """Mean negative log-likelihood of the decisions of some rows; 0 where the batch has none of them."""

    rows: str = "all"  # all | best (highest outcome of their group, if not all are equal) | shown (source is not 0)

    def __post_init__(self) -> None:
        if self.rows not in ("all", "best", "shown"):
            raise ValueError(f"Imitation rows must be 'all', 'best' or 'shown', got {self.rows!r}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Penalty, a scalar."""
        keep = decisions.valid()
        if self.rows == "shown":
            keep = keep & (decisions.need("source") != 0).unsqueeze(1)
        elif self.rows == "best":
            reward = outcome(decisions)
            group = Segments(by_group(decisions), torch.ones_like(reward, dtype=torch.bool))
            keep = keep & group.spread(group.differs(reward)) & (reward >= group.spread(group.largest(reward)))
        return masked_mean(-logp, keep)


@dataclass(frozen=True)
class CovarianceKL:
    """`|log ratio|` at the share of decisions that cost most entropy, where Cov(logp, A) is highest (KL-Cov, S066)."""

    share: Share = 2e-4  # at least one decision where it is positive

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Penalty `(N, T)`."""
        mask = decisions.valid()
        picked = highest(covariance(logp.detach(), advantage, decisions), mask, share_count(mask, self.share))
        return log_ratio(logp, decisions.logp_old, decisions).abs().masked_fill(~picked, 0.0)


@dataclass(frozen=True)
class KLBarrier:
    """Keeps KL(old || new) below `limit` by the weight `max(0, slope (KL - limit))` on it, itself without gradient.

    Within the limit there is no penalty and no gradient (DisCO, S103).
    """

    limit: NotNegative = 1e-4  # nats per decision
    slope: float = 1e3

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Penalty, a scalar."""
        divergence = masked_mean(decisions.logp_old - logp, decisions.valid())
        return (self.slope * (divergence - self.limit)).clamp(min=0.0).detach() * divergence


REGULARIZERS: Registry[Callable[..., object]] = Registry(
    "parts.regularizer",
    {
        "covariance_kl": CovarianceKL,
        "imitation": Imitation,
        "kl_barrier": KLBarrier,
        "kl_to": KLTo,
    },
)


class Controller(ABC):
    """A coefficient that may change from update to update."""

    value: float

    @abstractmethod
    def update(self, measured: float, count: int = 1) -> None:
        """Take note of the regularised quantity, measured on `count` trajectories."""

    def state_dict(self) -> dict[str, Any]:
        """What decides future values."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.value = float(state["value"])


class Constant(Controller):
    """A fixed coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, measured: float, count: int = 1) -> None:
        """Nothing changes."""


class Anneal(Controller):
    """Linear or cosine path from `start` to `end` over `steps` updates."""

    def __init__(self, start: float, end: float, steps: Count, shape: str = "linear") -> None:
        if shape not in ("linear", "cosine"):
            raise ValueError(f"Anneal shape must be 'linear' or 'cosine', got {shape!r}.")
        self.start, self.end, self.steps, self.shape = start, end, steps, shape
        self.step = 0
        self.value = start

    def update(self, measured: float, count: int = 1) -> None:
        """Move one step along the path."""
        self.step = min(self.step + 1, self.steps)
        progress = self.step / self.steps
        if self.shape == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        self.value = self.start + (self.end - self.start) * progress

    def state_dict(self) -> dict[str, Any]:
        """Value and position on the path."""
        return {"value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.value, self.step = float(state["value"]), int(state["step"])


class Dual(Controller):
    """Multiplier of the constraint `measured <= target`: rises by `rate` times the excess, and never below 0."""

    def __init__(self, value: float, target: float, rate: NotNegative) -> None:
        self.value, self.target, self.rate = value, target, rate

    def update(self, measured: float, count: int = 1) -> None:
        """One step of projected gradient ascent."""
        self.value = max(self.value + self.rate * (measured - self.target), 0.0)


class Adaptive(Controller):
    """Multiplies the coefficient by `1 + clip(measured / target - 1, -0.2, 0.2) * count / horizon` (Ziegler et al.).

    `count` is the number of trajectories; batches of more than `horizon` count as that many, so the factor is positive.
    """

    def __init__(self, value: float, target: Positive, horizon: Count) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, measured: float, count: int = 1) -> None:
        """Raise the coefficient where the measured quantity exceeds the target, lower it where it stays below."""
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(count / self.horizon, 1.0)


CONTROLLERS: Registry[Callable[..., Controller]] = Registry(
    "parts.controller",
    {
        "anneal": Anneal,
        "adaptive": Adaptive,
        "dual": Dual,
    },
)
