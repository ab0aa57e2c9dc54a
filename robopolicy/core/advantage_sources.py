"""Where the advantage starts: what a recipe hands to the first stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.constraints import Count, Natural, NotNegative, Share
from robopolicy.core.advantage import outcome
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, row_numbers, unit_numbers
from robopolicy.core.returns import sequence_gae, two_clock
from robopolicy.plugins import Registry


class Timeline:
    """The decisions of each trajectory in one line: S lines of at most L entries."""

    def __init__(self, decisions: Decisions) -> None:
        rows, columns = decisions.shape
        device = decisions.logp_old.device
        number = row_numbers(decisions)
        if decisions.trajectory is None:
            line = torch.arange(rows, device=device)
        else:
            line = torch.searchsorted(torch.sort(decisions.trajectory[number == 0])[0], decisions.trajectory)
        longest = int(number.max()) + 1
        self.place = (line * longest + number).unsqueeze(1) * columns + torch.arange(columns, device=device)  # (N, T)
        self.shape = (int(line.max()) + 1, longest * columns)
        self.valid = self.lay(decisions.valid())  # (S, L)
        self.unit = self.lay(unit_numbers(decisions))  # (S, L)

    def lay(self, value: Tensor) -> Tensor:
        """Per decision `(N, T)` to lines `(S, L)`; 0 where a trajectory is shorter."""
        flat = value.new_zeros(self.shape[0] * self.shape[1])
        return flat.scatter(0, self.place.flatten(), value.flatten()).view(self.shape)

    def back(self, value: Tensor) -> Tensor:
        """Lines `(S, L)` to `(N, T)`."""
        return value.flatten()[self.place]


class Units:
    """The units (chunks, turns) of each trajectory in order: S lines of at most U units."""

    def __init__(self, decisions: Decisions) -> None:
        self.line = line = Timeline(decisions)
        starts = torch.zeros_like(line.valid)
        current = torch.full_like(line.unit[:, 0], -1)
        for t in range(line.shape[1]):
            now = line.valid[:, t]
            starts[:, t] = now & (line.unit[:, t] != current)
            current = torch.where(now, line.unit[:, t], current)
        number = torch.cumsum(starts.long(), 1)  # 1 for the first unit, 0 before it
        self.index = (number - 1).clamp(min=0)  # (S, L) unit of each entry
        self.count = max(1, int(number.max()))
        places = torch.arange(self.count, device=number.device)
        self.valid = places < number[:, -1:]  # (S, U)
        self.starts = torch.searchsorted(number, (places + 1).expand(len(number), -1).contiguous())  # (S, U)
        self.starts = self.starts.clamp(max=line.shape[1] - 1)

    def at(self, value: Tensor) -> Tensor:
        """What stands at the first decision of each unit, `(N, T)` to `(S, U)`; 0 where there is no unit."""
        return self.line.lay(value).gather(1, self.starts).masked_fill(~self.valid, 0)

    def sums(self, value: Tensor) -> Tensor:
        """Sum over the valid decisions of each unit, `(N, T)` to `(S, U)`."""
        laid = self.line.lay(value).masked_fill(~self.line.valid, 0)
        return laid.new_zeros(len(laid), self.count).scatter_add(1, self.index, laid)

    def beginnings(self) -> Tensor:
        """The first decision of each unit, bool `(N, T)`."""
        begins = torch.zeros_like(self.line.unit).scatter_add(1, self.starts, self.valid.to(self.line.unit.dtype))
        return self.line.back(begins > 0)

    def spread(self, value: Tensor) -> Tensor:
        """One number per unit `(S, U)` to its decisions `(N, T)`; 0 where the mask is off."""
        return self.line.back(value.gather(1, self.index).masked_fill(~self.line.valid, 0))


def following(value: Tensor) -> Tensor:
    """The entry after each `(S, U)`; 0 behind the last."""
    return torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)


@dataclass(frozen=True)
class StepGain:
    """`V(next) - V - penalty + r + return-to-go` of each unit, at its decisions (DigiRL, S157).

    The value of a unit stands at its first decision, that after the last is 0; the return is discounted per unit.
    """

    penalty: float = 0.05
    gamma: Share = 0.9

    def __call__(self, decisions: Decisions) -> Tensor:
        """Gains `(N, T)`."""
        units = Units(decisions)
        value, reward = units.at(decisions.need("value")), units.sums(decisions.need("reward"))
        togo, _ = sequence_gae(reward, torch.zeros_like(reward), self.gamma, 1.0, units.valid)
        return units.spread(following(value) - value - self.penalty + reward + togo)

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """1 at the first decision of a unit behind which there is reward, 0 at others: the value is a probability."""
        units = Units(decisions)
        reward = units.sums(decisions.need("reward"))
        togo, _ = sequence_gae(reward, torch.zeros_like(reward), 1.0, 1.0, units.valid)
        return units.spread((togo > 0).to(reward.dtype)), units.beginnings()


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


@runtime_checkable
class Fitted(Protocol):
    """A start of advantages that says what its values should have been."""

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Returns `(N, T)` to which `Decisions.value` is fitted, and where, bool `(N, T)`."""
        ...


@dataclass(frozen=True)
class Critic:
    """How values are learned beside the policy; `critic` of a recipe."""

    coef: float = 0.5  # weight of the value loss
    clip: NotNegative = 0.0  # largest change of a value that its loss rewards, as in PPO; 0 disables
    detach: bool = False  # its gradient stops at what it shares with the policy (VL-DAC, S178)
    warmup: Natural = 0  # first updates, in which it learns alone

    def __post_init__(self) -> None:
        if self.coef <= 0 or self.clip < 0 or self.warmup < 0:
            raise ValueError(f"A critic needs coef > 0, clip >= 0 and warmup >= 0, got {self}.")

    def loss(self, value: Tensor, decisions: Decisions, target: Tensor, fitted: Tensor) -> Tensor:
        """Mean squared error, with `clip` the larger one of the value and of one that moved by at most that much.

        Args:
            value: (N, T) under the current parameters.
            decisions: `value` of these is that before the update.
            target: (N, T) returns.
            fitted: (N, T) bool, where there is a target.
        """
        value, target = (entries.masked_fill(~fitted, 0.0) for entries in (value, target))  # for the gradient, too
        error = (value - target).square()
        if self.clip:
            old = decisions.need("value").masked_fill(~fitted, 0.0)
            bounded = old + (value - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (bounded - target).square())
        return masked_mean(error, fitted)
