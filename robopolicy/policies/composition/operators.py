"""Composition operators: rules for the weights of the parents, one frozen dataclass each.

Weights are ordered as the parents and sum to 1. `convex` and `affine` keep them constant, `scheduled` makes them
functions of time, `or` and `and` compute them for every sample from its log-densities under the parents, which the
sampler accumulates along the path (`joint_field.py`):

- `or` samples from the mixture of the parents: each weight is its fraction of the density of the mixture at the sample.
- `and` searches samples that all parents find equally probable: the weights keep the log-densities equal on the path.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.heads.average_velocity import DERIVATIVES
from robopolicy.schema import from_dict, to_dict


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve `matrix x = right` for `x` `(B, M)` by elimination without pivoting, for positive definite `(B, M, M)`."""
    rows = [torch.cat([row, value], 1) for row, value in zip(matrix.unbind(1), right[..., None].unbind(1), strict=True)]
    count = len(rows)
    for k in range(count):
        rows[k] = rows[k] / rows[k][:, k : k + 1]
        for i in range(count):
            if i != k:
                rows[i] = rows[i] - rows[i][:, k : k + 1] * rows[k]
    return torch.stack([row[:, -1] for row in rows], 1)


def orthonormal(columns: Tensor, min_length: float) -> Tensor:
    """Orthonormal basis `(B, N, K)` of `columns` `(B, N, K)`; 0 for columns that add less than `min_length`."""
    basis: list[Tensor] = []
    for column in columns.unbind(2):
        rest = column
        for _ in range(2):  # the second pass removes rounding errors
            for vector in basis:
                rest = rest - vector * (vector * rest).sum(1, keepdim=True)
        size = rest.square().sum(1, keepdim=True).sqrt()
        basis.append(torch.where(size > min_length, rest / size.clamp(min=min_length), 0.0))
    return torch.stack(basis, 2)


SAMPLERS = ("ode", "sde")
SUM_TOLERANCE = 1e-4  # on the sum of weights
SAME_VELOCITY = 1e-2  # parents whose velocities differ by less per coordinate are treated as equal

Weights = Sequence[float | Tensor]
"""One weight per parent: a number, or `(B, 1, 1)` with one value per row."""


class Operator(ABC):
    """Base of the operators; subclasses are frozen dataclasses of plain values."""

    name: ClassVar[str]  # key in `OPERATORS`

    @abstractmethod
    def nominal(self, count: int) -> tuple[float, ...]:
        """Weights of `count` parents before the sample is known; another number of weights raises a `UserError`.

        They define the common coordinates and the weights of actions that only some parents plan. Parents with nominal
        weight 0 are ignored.
        """

    @abstractmethod
    def with_weights(self, weights: Sequence[float]) -> Operator:
        """The same operator with other weights."""


@dataclass(frozen=True)
class Weighted(Operator):
    """Base of the operators with given weights."""

    weights: tuple[float, ...] = ()  # one per parent; () for equal weights

    def nominal(self, count: int) -> tuple[float, ...]:
        """The given or equal weights."""
        if not self.weights:
            return (1 / count,) * count
        _check_count(len(self.weights), count)
        return self.weights

    def with_weights(self, weights: Sequence[float]) -> Weighted:
        """The same operator with `weights`."""
        return replace(self, weights=tuple(float(weight) for weight in weights))


class Prescribed(Operator):
    """Base of the operators whose weights depend only on time."""

    @abstractmethod
    def at(self, t: Tensor, count: int) -> Weights:
        """Weights of `count` parents at linear time `t` `(B,)`."""


@dataclass(frozen=True)
class Convex(Weighted, Prescribed):
    """Constant weights in [0, 1]: at every noise level the geometric mean of the densities of the parents."""

    name: ClassVar[str] = "convex"

    def __post_init__(self) -> None:
        _check_weights(self.weights, min_length=0.0)

    def at(self, t: Tensor, count: int) -> Weights:
        """The weights."""
        return self.nominal(count)


@dataclass(frozen=True)
class Affine(Weighted, Prescribed):
    """Constant weights of any sign: (s, 1 - s) amplifies the first parent against the second s-fold.

    Classifier-free guidance, if the second parent is the first one without its instruction.
    """

    name: ClassVar[str] = "affine"

    def __post_init__(self) -> None:
        _check_weights(self.weights)

    def at(self, t: Tensor, count: int) -> Weights:
        """The weights."""
        return self.nominal(count)


@dataclass(frozen=True)
class Scheduled(Prescribed):
    """Weights as a function of time, linear between equidistant knots from noise (t = 0) to data (t = 1)."""

    name: ClassVar[str] = "scheduled"
    knots: tuple[tuple[float, ...], ...] = ()  # weights of the parents at each of at least two knots

    def __post_init__(self) -> None:
        if len(self.knots) < 2 or len({len(knot) for knot in self.knots}) != 1:
            raise UserError(
                "A schedule needs knots with one weight per parent each, at least one for noise and one for data, got "
                f"{[list(knot) for knot in self.knots]}."
            )
        for knot in self.knots:
            _check_weights(knot, min_length=0.0)

    def nominal(self, count: int) -> tuple[float, ...]:
        """Mean of the knots."""
        _check_count(len(self.knots[0]), count)
        return tuple(sum(column) / len(self.knots) for column in zip(*self.knots, strict=True))

    def with_weights(self, weights: Sequence[float]) -> Scheduled:
        """Not supported, as each parent has several weights."""
        raise UserError("A schedule has weights at every knot; build Scheduled(knots=...) instead of setting weights.")

    def at(self, t: Tensor, count: int) -> Weights:
        """Interpolated weights, `(B, 1, 1)` per parent."""
        position = t.clamp(0, 1) * (len(self.knots) - 1)
        low = position.long().clamp(max=len(self.knots) - 2)
        fraction = (position - low)[:, None]
        knots = torch.tensor(self.knots, dtype=t.dtype, device=t.device)
        weights = knots[low] + fraction * (knots[low + 1] - knots[low])  # (B, M)
        return [weight[:, None, None] for weight in weights.unbind(1)]


@dataclass(frozen=True)
class Lookahead:
    """Effect of one step on the log-densities of the sample under the parents."""

    ahead: Tensor  # (B, M) log-densities after a step with the nominal weights [nats]
    response: Tensor  # (B, M, M) their derivative with respect to the weights
    floor: float  # response at which the parents are treated as equal


@dataclass(frozen=True)
class DensityWeighted(Weighted):
    """Base of the operators whose weights follow the log-densities of the parents at the sample."""

    sampler: str = "ode"  # ode (needs divergences) | sde (injects noise in `act`; `decode` uses the ode)
    probes: int = 1  # ode: random directions per divergence and step (Hutchinson); 0 uses every coordinate
    derivative: str = "difference"  # difference (two network calls) | exact (forward mode)

    def __post_init__(self) -> None:
        _check_weights(self.weights, min_length=0.0)
        if self.sampler not in SAMPLERS:
            raise unknown_name("sampler", self.sampler, SAMPLERS)
        if self.derivative not in DERIVATIVES:
            raise unknown_name("derivative", self.derivative, DERIVATIVES)
        if self.probes < 0:
            raise UserError(f"probes must not be negative, got {self.probes}; 0 computes divergences exactly.")

    @abstractmethod
    def solve_weights(self, levels: Tensor, lookahead: Callable[[], Lookahead]) -> Tensor:
        """Weights `(B, M)` of one step, given the log-densities `levels` `(B, M)`, up to a constant per row [nats].

        `lookahead` computes the effect of the step on the levels.
        """


@dataclass(frozen=True)
class Or(DensityWeighted):
    """Mixture of the parents: softmax of their log-densities plus the log of the weights."""

    name: ClassVar[str] = "or"
    sampler: str = "sde"  # sde (without divergences, at the cost of convex) | ode, as in `decode`
    temperature: float = 1.0  # of the softmax [nats]: 1 is the mixture; a lower value selects one parent earlier

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise UserError(f"The temperature must be positive, got {self.temperature}.")

    def solve_weights(self, levels: Tensor, lookahead: Callable[[], Lookahead]) -> Tensor:
        """Fractions of the density of the mixture at the sample."""
        weights = levels.new_tensor(self.nominal(levels.shape[1]))
        return (levels / self.temperature + weights.log()).softmax(1)


@dataclass(frozen=True)
class And(DensityWeighted):
    """Samples that all parents find equally probable; the initial weights apply where the parents agree."""

    name: ClassVar[str] = "and"
    reach: float = 2.0  # maximum distance of a weight from its nominal value

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach <= 0:
            raise UserError(f"reach must be positive, got {self.reach}; convex weights are the operator 'convex'.")

    def solve_weights(self, levels: Tensor, lookahead: Callable[[], Lookahead]) -> Tensor:
        """Weights that make the levels equal, as far as `reach` allows; later steps correct the remainder."""
        count, effect = levels.shape[1], lookahead()
        gap, response = (effect.ahead - effect.ahead.mean(1, keepdim=True)).double(), effect.response.double()
        # Equal weights change nothing, so the response is singular; gap and change have no such component.
        mean = response.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] / count
        eye = torch.eye(count, dtype=response.dtype, device=response.device)
        change = -solve(response + mean + effect.floor * eye, gap)
        change = change * (self.reach / change.abs().amax(1, keepdim=True).clamp(min=self.reach))
        return (change + change.new_tensor(self.nominal(count))).to(levels.dtype)


OPERATORS: dict[str, type[Any]] = {kind.name: kind for kind in (Affine, And, Convex, Or, Scheduled)}
"""Operators by name."""


def describe_operator(operator: Operator) -> dict[str, Any]:
    """Name and settings as plain values."""
    return {"name": operator.name, **to_dict(operator)}


def make_operator(description: Mapping[str, Any]) -> Operator:
    """Inverse of `describe_operator`; missing settings keep their defaults."""
    settings = dict(description)
    name = str(settings.pop("name", ""))
    if name not in OPERATORS:
        raise unknown_name("operator", name, OPERATORS)
    defaults = to_dict(OPERATORS[name]()) if name != Scheduled.name else {"knots": ()}
    return from_dict(OPERATORS[name], {**defaults, **settings}, f"operator '{name}'")


def apply_gates(weights: Weights, gates: Tensor | None) -> Weights:
    """Restrict `weights` of M parents to `gates` `(B, M)` equal to 1 and rescale them to their previous sum.

    Rows whose remaining parents have no weight, and all rows if `gates` is None, keep their weights.
    """
    if gates is None or bool((gates == 1).all()):
        return weights
    columns = [weight * gate[:, None, None] for weight, gate in zip(weights, gates.unbind(1), strict=True)]
    total = torch.stack(columns).sum(0)
    before = torch.stack([torch.as_tensor(weight).to(total).expand_as(total) for weight in weights]).sum(0)
    factor = before / total.clamp(min=SUM_TOLERANCE)
    return [torch.where(total > SUM_TOLERANCE, c * factor, w) for c, w in zip(columns, weights, strict=True)]


def _check_weights(weights: Sequence[float], min_length: float = -math.inf) -> None:
    if not weights:
        return
    if not all(math.isfinite(weight) and weight >= min_length for weight in weights) or (
        abs(sum(weights) - 1) > SUM_TOLERANCE
    ):
        sign = "" if min_length < 0 else " none of them negative,"
        raise UserError(f"Weights of parents must sum to 1,{sign} got {[round(weight, 6) for weight in weights]}.")


def _check_count(found: int, expected: int) -> None:
    if found != expected:
        raise UserError(f"{expected} parents need {expected} weights, in their order, got {found}.")
