"""Where the advantage starts: what a recipe hands to the first stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import outcome
from robopolicy.core.advantages.steps import StepGain
from robopolicy.core.advantages.timeline import Timeline, Units
from robopolicy.core.decisions import Decisions
from robopolicy.core.returns import sequence_gae, two_clock
from robopolicy.limits import Count, Share
from robopolicy.plugins import Registry


def ones(decisions: Decisions) -> Tensor:
    """1 for every row `(N, 1)`: what is imitated has no reward."""
    return decisions.logp_old.new_ones(len(decisions), 1)


def along_time(
    decisions: Decisions,
    reward: Tensor,
    value: Tensor,
    gamma: tuple[float, float],
    lam: tuple[float, float],
    level: str,
) -> Tensor:
    """Generalised advantage estimates `(N, T)` along trajectories that may span several rows.

    Args:
        decisions: Gives trajectories, units and mask.
        reward: (N, T).
        value: (N, T).
        gamma: Discount from unit to unit, and between decisions of one unit.
        lam: Likewise the lambda.
        level: "token": every decision is a moment of its own. "unit": a chunk or turn is one; its value stands at its
            first decision, and all its decisions get its advantage.
    """
    if level == "unit":
        units = Units(decisions)
        advantage, _ = sequence_gae(units.sums(reward), units.at(value), gamma[0], lam[0], units.valid)
        return units.spread(advantage)
    line = Timeline(decisions)
    discount, trace = gamma[0], lam[0]
    if gamma[0] != gamma[1] or lam[0] != lam[1]:
        ends = two_clock(line.unit, 1.0, 0.0, line.valid).to(reward.dtype)
        discount, trace = (ends * outer + (1.0 - ends) * inner for outer, inner in (gamma, lam))
    return line.back(sequence_gae(line.lay(reward), line.lay(value), discount, trace, line.valid)[0])


@dataclass(frozen=True)
class ReturnToGo:
    """Discounted reward still to come, from each decision or from the beginning of its unit."""

    gamma: Share = 1.0
    level: str = "token"  # token | unit
    window: Count = 1  # mean over this many entries, the own and those that follow: that of smoothed rewards (S082)

    def __post_init__(self) -> None:
        _check_level(self.level)

    def __call__(self, decisions: Decisions) -> Tensor:
        """Returns `(N, T)`."""
        reward, gamma = decisions.need("reward"), (self.gamma, self.gamma)
        found = along_time(decisions, reward, torch.zeros_like(reward), gamma, (1.0, 1.0), self.level)
        return found if self.window == 1 else smoothed(found, decisions, self.window)


def smoothed(value: Tensor, decisions: Decisions, window: int) -> Tensor:
    """Mean of `value` over the valid ones of `window` entries from each on `(N, T)`, those in the trajectory alone."""
    line = Timeline(decisions)
    valid = line.valid.to(value.dtype)
    total, count = (
        torch.cat([laid, laid.new_zeros(len(laid), window - 1)], 1).unfold(1, window, 1).sum(2)
        for laid in (line.lay(value) * valid, valid)
    )
    return line.back(total / count.clamp(min=1.0))


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimation on `Decisions.value`.

    With `inner_gamma = inner_lam = 1` tokens or denoising steps of one unit share a moment of time (two clocks, S021);
    with `level = unit` the critic is read once per unit (S178).
    """

    gamma: Share = 1.0
    lam: Share = 1.0
    inner_gamma: Share | None = None  # between decisions of one unit; None: as gamma
    inner_lam: Share | None = None  # None: as lam
    level: str = "token"  # token | unit
    rollout_weight: Share = 0.0  # w of V = (1 - w) value + w extra["rollout_value"] (N, T), from cheap rollouts (S180)

    def __post_init__(self) -> None:
        _check_level(self.level)

    def __call__(self, decisions: Decisions) -> Tensor:
        """Advantages `(N, T)`."""
        value = self._value(decisions)
        gamma = (self.gamma, self.gamma if self.inner_gamma is None else self.inner_gamma)
        lam = (self.lam, self.lam if self.inner_lam is None else self.inner_lam)
        return along_time(decisions, decisions.need("reward"), value, gamma, lam, self.level)

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Lambda returns; on level `unit` at the first decision of each."""
        fitted = Units(decisions).beginnings() if self.level == "unit" else decisions.valid()
        return self(decisions) + self._value(decisions), fitted

    def _value(self, decisions: Decisions) -> Tensor:
        value = decisions.need("value")
        if not self.rollout_weight:
            return value
        return (1.0 - self.rollout_weight) * value + self.rollout_weight * decisions.need_extra("rollout_value")


STARTS: Registry[Callable[..., object]] = Registry(
    "parts.start",
    {
        "outcome": outcome,
        "return_to_go": ReturnToGo,
        "gae": Gae,
        "ones": ones,
        "step_gain": StepGain,
    },
)


def _check_level(level: str) -> None:
    if level not in ("token", "unit"):
        raise ValueError(f"Level of a return must be 'token' or 'unit', got {level!r}.")
