"""Advantage sources: the inputs of the advantage stages of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, PositiveInt
from robopolicy.core.advantage import outcome
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, row_numbers, unit_numbers
from robopolicy.core.returns import nested_discount, sequence_gae
from robopolicy.plugins import Registry


class TrajectoryView:
    """The decisions of each trajectory in one row: S rows of at most L entries."""

    def __init__(self, decisions: Decisions) -> None:
        rows, columns = decisions.shape
        device = decisions.logp_old.device
        number = row_numbers(decisions)
        if decisions.trajectory is None:
            index = torch.arange(rows, device=device)
        else:
            index = torch.searchsorted(torch.sort(decisions.trajectory[number == 0])[0], decisions.trajectory)
        max_rows = int(number.max()) + 1
        position = (index * max_rows + number).unsqueeze(1) * columns
        self.position = position + torch.arange(columns, device=device)  # (N, T)
        self.shape = (int(index.max()) + 1, max_rows * columns)
        self.valid = self.flatten(decisions.valid())  # (S, L)
        self.unit = self.flatten(unit_numbers(decisions))  # (S, L)

    def flatten(self, value: Tensor) -> Tensor:
        """Map values per decision `(N, T)` to trajectories `(S, L)`, padded with 0."""
        flat = value.new_zeros(self.shape[0] * self.shape[1])
        return flat.scatter(0, self.position.flatten(), value.flatten()).view(self.shape)

    def unflatten(self, value: Tensor) -> Tensor:
        """Map trajectories `(S, L)` back to decisions `(N, T)`."""
        return value.flatten()[self.position]


class UnitView:
    """The units (chunks, turns) of each trajectory in order: S rows of at most U units."""

    def __init__(self, decisions: Decisions) -> None:
        self.view = view = TrajectoryView(decisions)
        starts = torch.zeros_like(view.valid)
        current = torch.full_like(view.unit[:, 0], -1)
        for t in range(view.shape[1]):
            now = view.valid[:, t]
            starts[:, t] = now & (view.unit[:, t] != current)
            current = torch.where(now, view.unit[:, t], current)
        number = torch.cumsum(starts.long(), 1)  # 1 for the first unit, 0 before it
        self.index = (number - 1).clamp(min=0)  # (S, L) unit of each entry
        self.count = max(1, int(number.max()))
        units = torch.arange(self.count, device=number.device)
        self.valid = units < number[:, -1:]  # (S, U)
        self.starts = torch.searchsorted(number, (units + 1).expand(len(number), -1).contiguous())  # (S, U)
        self.starts = self.starts.clamp(max=view.shape[1] - 1)

    def gather(self, value: Tensor) -> Tensor:
        """Select the value at the first decision of each unit, `(N, T)` to `(S, U)`, padded with 0."""
        return self.view.flatten(value).gather(1, self.starts).masked_fill(~self.valid, 0)

    def sums(self, value: Tensor) -> Tensor:
        """Sum over the valid decisions of each unit, `(N, T)` to `(S, U)`."""
        flat = self.view.flatten(value).masked_fill(~self.view.valid, 0)
        return flat.new_zeros(len(flat), self.count).scatter_add(1, self.index, flat)

    def first_mask(self) -> Tensor:
        """Mask of the first decision of each unit, bool `(N, T)`."""
        first = torch.zeros_like(self.view.unit).scatter_add(1, self.starts, self.valid.to(self.view.unit.dtype))
        return self.view.unflatten(first > 0)

    def broadcast(self, value: Tensor) -> Tensor:
        """Map a value per unit `(S, U)` to its decisions `(N, T)`; 0 where the mask is off."""
        return self.view.unflatten(value.gather(1, self.index).masked_fill(~self.view.valid, 0))


def next_entries(value: Tensor) -> Tensor:
    """The next entry of each row `(S, U)`; 0 after the last."""
    return torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)


@dataclass(frozen=True)
class StepGain:
    """`V(next) - V - penalty + r + return-to-go` of each unit, at all its decisions (DigiRL, Bai et al. 2024).

    V is read at the first decision of a unit and is 0 after the last unit; the return is discounted per unit.
    """

    penalty: float = 0.05
    gamma: Fraction = 0.9

    def __call__(self, decisions: Decisions) -> Tensor:
        """Gains `(N, T)`."""
        units = UnitView(decisions)
        value, reward = units.gather(decisions.require("value")), units.sums(decisions.require("reward"))
        togo, _ = sequence_gae(reward, torch.zeros_like(reward), self.gamma, 1.0, units.valid)
        return units.broadcast(next_entries(value) - value - self.penalty + reward + togo)

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """1 if reward follows, else 0, fitted at the first decision of each unit: the value is a probability."""
        units = UnitView(decisions)
        reward = units.sums(decisions.require("reward"))
        togo, _ = sequence_gae(reward, torch.zeros_like(reward), 1.0, 1.0, units.valid)
        return units.broadcast((togo > 0).to(reward.dtype)), units.first_mask()


def constant_one(decisions: Decisions) -> Tensor:
    """Advantage 1 for every row `(N, 1)`, for imitation without rewards."""
    return decisions.logp_old.new_ones(len(decisions), 1)


def trajectory_gae(
    decisions: Decisions,
    reward: Tensor,
    value: Tensor,
    gamma: tuple[float, float],
    lam: tuple[float, float],
    level: str,
) -> Tensor:
    """Generalised advantage estimates `(N, T)` along trajectories that may span several rows.

    `reward` and `value` are (N, T); `gamma` and `lam` are pairs: between units, and between decisions of one unit. At
    level "token" every decision is a time step. At level "unit" a chunk or turn is one: its value is read at its first
    decision, and its advantage is assigned to all its decisions.
    """
    if level == "unit":
        units = UnitView(decisions)
        advantage, _ = sequence_gae(units.sums(reward), units.gather(value), gamma[0], lam[0], units.valid)
        return units.broadcast(advantage)
    view = TrajectoryView(decisions)
    discount, trace = gamma[0], lam[0]
    if gamma[0] != gamma[1] or lam[0] != lam[1]:
        ends = nested_discount(view.unit, 1.0, 0.0, view.valid).to(reward.dtype)
        discount, trace = (ends * outer + (1.0 - ends) * inner for outer, inner in (gamma, lam))
    return view.unflatten(sequence_gae(view.flatten(reward), view.flatten(value), discount, trace, view.valid)[0])


@dataclass(frozen=True)
class ReturnToGo:
    """Discounted future reward from each decision or from the first decision of its unit."""

    gamma: Fraction = 1.0
    level: str = "token"  # token | unit
    window: PositiveInt = 1  # mean over this many entries from each on, as with smoothed rewards (PCPG)

    def __post_init__(self) -> None:
        _check_level(self.level)

    def __call__(self, decisions: Decisions) -> Tensor:
        """Returns `(N, T)`."""
        reward, gamma = decisions.require("reward"), (self.gamma, self.gamma)
        returns = trajectory_gae(decisions, reward, torch.zeros_like(reward), gamma, (1.0, 1.0), self.level)
        return returns if self.window == 1 else windowed_mean(returns, decisions, self.window)


def windowed_mean(value: Tensor, decisions: Decisions, window: int) -> Tensor:
    """Mean `(N, T)` of the valid entries among each entry and the `window - 1` after it in its trajectory."""
    view = TrajectoryView(decisions)
    valid = view.valid.to(value.dtype)
    total, count = (
        torch.cat([entries, entries.new_zeros(len(entries), window - 1)], 1).unfold(1, window, 1).sum(2)
        for entries in (view.flatten(value) * valid, valid)
    )
    return view.unflatten(total / count.clamp(min=1.0))


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimation on `Decisions.value`.

    With `inner_gamma = inner_lam = 1` the tokens or denoising steps of one unit share a time step (Wen et al. 2024);
    with `level = unit` the critic is evaluated once per unit (Bredis et al. 2025).
    """

    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    inner_gamma: Fraction | None = None  # between decisions of one unit; None: as gamma
    inner_lam: Fraction | None = None  # None: as lam
    level: str = "token"  # token | unit
    rollout_weight: Fraction = 0.0  # w of V = (1 - w) value + w extra["rollout_value"] (N, T), from cheap rollouts

    def __post_init__(self) -> None:
        _check_level(self.level)

    def __call__(self, decisions: Decisions) -> Tensor:
        """Advantages `(N, T)`."""
        value = self._value(decisions)
        gamma = (self.gamma, self.gamma if self.inner_gamma is None else self.inner_gamma)
        lam = (self.lam, self.lam if self.inner_lam is None else self.inner_lam)
        return trajectory_gae(decisions, decisions.require("reward"), value, gamma, lam, self.level)

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Lambda returns and their mask; at level `unit` the first decision of each unit."""
        fitted = UnitView(decisions).first_mask() if self.level == "unit" else decisions.valid()
        return self(decisions) + self._value(decisions), fitted

    def _value(self, decisions: Decisions) -> Tensor:
        value = decisions.require("value")
        if not self.rollout_weight:
            return value
        return (1.0 - self.rollout_weight) * value + self.rollout_weight * decisions.require_extra("rollout_value")


ADVANTAGE_SOURCES: Registry[Callable[..., object]] = Registry(
    "parts.advantage_source",
    {"outcome": outcome, "return_to_go": ReturnToGo, "gae": Gae, "constant_one": constant_one, "step_gain": StepGain},
)


def _check_level(level: str) -> None:
    if level not in ("token", "unit"):
        raise ValueError(f"Level of a return must be 'token' or 'unit', got {level!r}.")


@runtime_checkable
class ValueTargets(Protocol):
    """An advantage source with regression targets for the values."""

    def targets(self, decisions: Decisions) -> tuple[Tensor, Tensor]:
        """Targets `(N, T)` of `Decisions.value`, and the bool mask `(N, T)` of the entries that are fitted."""
        ...


@dataclass(frozen=True)
class Critic:
    """Value loss trained together with the policy; `critic` of a recipe."""

    coef: float = 0.5  # weight of the value loss
    clip: NonNegative = 0.0  # PPO's value clipping: largest change of a value per update; 0 disables
    detach: bool = False  # stop its gradient at the layers shared with the policy (VL-DAC, Bredis et al. 2025)
    warmup: NonNegativeInt = 0  # first updates that train only the critic

    def __post_init__(self) -> None:
        if self.coef <= 0 or self.clip < 0 or self.warmup < 0:
            raise ValueError(f"A critic needs coef > 0, clip >= 0 and warmup >= 0, got {self}.")

    def loss(self, value: Tensor, decisions: Decisions, target: Tensor, fitted: Tensor) -> Tensor:
        """Mean squared error of `value` (N, T) to `target` (N, T), where `fitted` (N, T) is on.

        With `clip` the larger error of the value and of the value clipped around `decisions.value` counts.
        """
        value, target = (entries.masked_fill(~fitted, 0.0) for entries in (value, target))  # NaN-safe gradient
        error = (value - target).square()
        if self.clip:
            old = decisions.require("value").masked_fill(~fitted, 0.0)
            bounded = old + (value - old).clamp(-self.clip, self.clip)
            error = torch.maximum(error, (bounded - target).square())
        return masked_mean(error, fitted)
