"""Advantages towards a target distribution: the tempered policy, a reward-tilted reference (Go et al. 2023).

Source: Li et al. 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.constraints import NonNegative, Positive
from robopolicy.core.advantage import Scope, outcome
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, by_group, by_trajectory
from robopolicy.core.ratios import log_ratio


@dataclass(frozen=True)
class TemperedTarget:
    """Move successes towards the policy at another temperature, to control the entropy.

    Source: distribution-centric DCPO, Li et al. 2026.

    `(1 - a) A + a 1[R > above] w`, with w the ratio of the probabilities of a decision at the other temperature and at
    1: `extra["logp_warm"]` (N, T) above 1 while the mean entropy is at most `entropy`, else `extra["logp_cool"]`. With
    `b = min(|entropy - H|, most) / share of successes`, `a = b / (1 + b)`.
    """

    entropy: float = 0.5  # nats
    most: NonNegative = 0.1
    above: float = 0.05

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Compute the advantage `(N, T)`."""
        mask = decisions.valid()
        level = float(masked_mean(decisions.require("entropy"), mask))
        success = (outcome(decisions) > self.above).to(decisions.logp_old.dtype)
        strength = min(abs(self.entropy - level), self.most) / max(float(success.mean()), 1e-6)
        share = strength / (1.0 + strength) if bool(success.any()) else 0.0
        other = decisions.require_extra("logp_warm" if level <= self.entropy else "logp_cool")
        weight = log_ratio(other, decisions.logp_old, decisions).exp()
        return ((1.0 - share) * advantage + share * success * weight).masked_fill(~mask, 0.0)


def reverse_kl(log_t: Tensor) -> Tensor:
    """Compute `f'(t) = log t + 1`."""
    return log_t + 1.0


def forward_kl(log_t: Tensor) -> Tensor:
    """Compute `f'(t) = -1 / t`."""
    return -(-log_t).exp()


def jensen_shannon(log_t: Tensor) -> Tensor:
    """Compute `f'(t) = log 2 - log(1 + 1 / t)`."""
    return math.log(2.0) - functional.softplus(-log_t)


def total_variation(log_t: Tensor) -> Tensor:
    """Compute `f'(t) = sign(t - 1) / 2`."""
    return 0.5 * torch.sign(log_t)


def chi_squared(log_t: Tensor) -> Tensor:
    """Compute `f'(t) = 1 - 1 / t^2`."""
    return 1.0 - (-2.0 * log_t).exp()


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "chi_squared": chi_squared,
    "forward_kl": forward_kl,
    "jensen_shannon": jensen_shannon,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}


@dataclass(frozen=True)
class TargetDivergence:
    """Outcomes R replaced by `-f'(pi / p)`, whose policy gradient lowers an f-divergence to p (f-DPG, Go et al. 2023).

    The target is `p = pi_ref exp(R / beta) / Z`, with Z estimated from the trajectories of the group. Add a baseline
    after it. The reverse KL gives the gradient of the reward minus beta times the KL, divided by beta.
    """

    divergence: str = "jensen_shannon"
    beta: Positive = 0.1
    limit: NonNegative = 20.0  # maximum |log(pi / p)| [nats]

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"Unknown divergence '{self.divergence}'; known: {', '.join(DIVERGENCES)}.")

    def __call__(self, advantage: Tensor, decisions: Decisions) -> Tensor:
        """Compute the advantage `(N, 1)` from outcomes `(N, 1)`."""
        change = log_ratio(decisions.logp_old, decisions.require("logp_ref"), decisions, "sequence")[:, :1]
        weight = advantage / self.beta - change  # log p / pi up to log Z
        segments = Scope(by_group, reduce_over=by_trajectory).segments(advantage, decisions)
        top = segments.largest(weight).clamp(min=-1e30)
        norm = segments.broadcast(top + segments.mean((weight - segments.broadcast(top)).exp()).clamp(min=1e-30).log())
        return -DIVERGENCES[self.divergence]((norm - weight).clamp(-self.limit, self.limit))
