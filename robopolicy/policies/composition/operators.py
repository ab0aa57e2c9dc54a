"""Composition operators: rules for the weights of the parents, one frozen dataclass each.

Weights belong to the parents in their order and sum to 1. `convex` and `affine` keep them constant, `scheduled` lets
them follow time, `or` and `and` compute them for every sample from how probable the parents find it:

- `or` samples from the mixture of the parents: each is weighed by its share of the mixture's density at the sample.
- `and` looks for samples that all parents find equally probable: the weights keep the log-densities level on the way.

Both need log-densities, which the sampler accumulates along the path (`blend.py`).
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
    """`x` `(B, M)` of `matrix x = right`, by elimination in order: for positive definite matrices `(B, M, M)`."""
    rows = [torch.cat([row, value], 1) for row, value in zip(matrix.unbind(1), right[..., None].unbind(1), strict=True)]
    count = len(rows)
    for k in range(count):
        rows[k] = rows[k] / rows[k][:, k : k + 1]
        for i in range(count):
            if i != k:
                rows[i] = rows[i] - rows[i][:, k : k + 1] * rows[k]
    return torch.stack([row[:, -1] for row in rows], 1)


def orthonormal(columns: Tensor, least: float) -> Tensor:
    """Basis `(B, N, K)` of what `columns` `(B, N, K)` span: 0 where one adds less than the length `least` to it."""
    basis: list[Tensor] = []
    for column in columns.unbind(2):
        rest = column
        for _ in range(2):  # twice is enough: the second pass takes away what rounding left
            for known in basis:
                rest = rest - known * (known * rest).sum(1, keepdim=True)
        size = rest.square().sum(1, keepdim=True).sqrt()
        basis.append(torch.where(size > least, rest / size.clamp(min=least), 0.0))
    return torch.stack(basis, 2)


SAMPLERS = ("ode", "sde")
SUM_TOLERANCE = 1e-4  # of weights that are to sum to 1
SAME_VELOCITY = (
    1e-2  # parents whose velocities differ by less per coordinate count as one: their levels are indistinguishable
)

Weights = Sequence[float | Tensor]
"""One weight per parent: a number, or `(B, 1, 1)` for every row its own."""


class Operator(ABC):
    """Base of the operators; subclasses are frozen dataclasses of plain values."""

    name: ClassVar[str]  # key in `OPERATORS`

    @abstractmethod
    def nominal(self, count: int) -> tuple[float, ...]:
        """Weights of `count` parents before the sample is known.

        They decide about the common coordinates, and about steps of the chunk that only some parents reach. A parent
        whose nominal weight is 0 is ignored.

        Raises:
            UserError: They are weights for another number of parents.
        """

    @abstractmethod
    def with_weights(self, weights: Sequence[float]) -> Operator:
        """The same operator with other weights."""


@dataclass(frozen=True)
class Weighted(Operator):
    """Base of the operators with given weights."""

    weights: tuple[float, ...] = ()  # of the parents, in their order; () is the same for all

    def nominal(self, count: int) -> tuple[float, ...]:
        """The weights given, or equal ones."""
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
    """Constant weights in [0, 1]: at every noise level the geometric mean of the parents' densities."""

    name: ClassVar[str] = "convex"

    def __post_init__(self) -> None:
        _check_weights(self.weights, least=0.0)

    def at(self, t: Tensor, count: int) -> Weights:
        """The weights."""
        return self.nominal(count)


@dataclass(frozen=True)
class Affine(Weighted, Prescribed):
    """Constant weights of any sign: (s, 1 - s) amplifies the first parent against the second s-fold.

    This is classifier-free guidance where the second parent is the first one without its instruction.
    """

    name: ClassVar[str] = "affine"

    def __post_init__(self) -> None:
        _check_weights(self.weights)

    def at(self, t: Tensor, count: int) -> Weights:
        """The weights."""
        return self.nominal(count)


@dataclass(frozen=True)
class Scheduled(Prescribed):
    """Weights that follow time, linear between knots that are spread evenly from noise (t = 0) to data (t = 1)."""

    name: ClassVar[str] = "scheduled"
    knots: tuple[tuple[float, ...], ...] = ()  # weights of the parents at each knot, at least two of them

    def __post_init__(self) -> None:
        if len(self.knots) < 2 or len({len(knot) for knot in self.knots}) != 1:
            raise UserError(
                "A schedule needs knots with one weight per parent each, at least one for noise and one for data, got "
                f"{[list(knot) for knot in self.knots]}."
            )
        for knot in self.knots:
            _check_weights(knot, least=0.0)

    def nominal(self, count: int) -> tuple[float, ...]:
        """Mean of the knots."""
        _check_count(len(self.knots[0]), count)
        return tuple(sum(column) / len(self.knots) for column in zip(*self.knots, strict=True))

    def with_weights(self, weights: Sequence[float]) -> Scheduled:
        """Not possible: there are several weights per parent."""
        raise UserError("A schedule has weights at every knot; build Scheduled(knots=...) instead of setting weights.")

    def at(self, t: Tensor, count: int) -> Weights:
        """Interpolated weights, `(B, 1, 1)` per parent."""
        place = t.clamp(0, 1) * (len(self.knots) - 1)
        low = place.long().clamp(max=len(self.knots) - 2)
        share = (place - low)[:, None]
        knots = torch.tensor(self.knots, dtype=t.dtype, device=t.device)
        weights = knots[low] + share * (knots[low + 1] - knots[low])  # (B, M)
        return [weight[:, None, None] for weight in weights.unbind(1)]


@dataclass(frozen=True)
class Lookahead:
    """Effect of one step on the log-densities of the sample under the parents."""

    ahead: Tensor  # (B, M) log-densities after it, if it is taken with the nominal weights [nats]
    response: Tensor  # (B, M, M) how much they change with the weights
    floor: float  # response that means nothing, because the parents want the same


@dataclass(frozen=True)
class DensityWeighted(Weighted):
    """Base of the operators whose weights follow the log-densities of the parents at the sample."""

    sampler: str = "ode"  # ode (needs divergences) | sde (injects noise while acting; `decode` takes the ode)
    probes: int = 1  # ode: random directions per divergence and step (Hutchinson); 0 takes every coordinate
    derivative: str = "difference"  # difference (two network calls) | exact (forward mode)

    def __post_init__(self) -> None:
        _check_weights(self.weights, least=0.0)
        if self.sampler not in SAMPLERS:
            raise unknown_name("sampler", self.sampler, SAMPLERS)
        if self.derivative not in DERIVATIVES:
            raise unknown_name("derivative", self.derivative, DERIVATIVES)
        if self.probes < 0:
            raise UserError(f"probes must not be negative, got {self.probes}; 0 computes divergences exactly.")

    @abstractmethod
    def solve_weights(self, levels: Tensor, outlook: Callable[[], Lookahead]) -> Tensor:
        """Weights `(B, M)` of one step.

        Args:
            levels: Log-densities `(B, M)` of the sample under the parents, up to a constant per row [nats].
            outlook: Computes what the step will do to them.
        """


@dataclass(frozen=True)
class Or(DensityWeighted):
    """Mixture of the parents: softmax of their log-densities, the weights are the shares of the mixture."""

    name: ClassVar[str] = "or"
    sampler: str = "sde"  # sde (needs no divergences, so it costs no more than convex) | ode, as in `decode`
    temperature: float = 1.0  # of the softmax [nats]: 1 is the mixture, less decides earlier for one parent

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise UserError(f"The temperature must be positive, got {self.temperature}.")

    def solve_weights(self, levels: Tensor, outlook: Callable[[], Lookahead]) -> Tensor:
        """Shares of the mixture's density at the sample."""
        shares = levels.new_tensor(self.nominal(levels.shape[1]))
        return (levels / self.temperature + shares.log()).softmax(1)


@dataclass(frozen=True)
class And(DensityWeighted):
    """Samples that all parents find equally probable; the weights it starts from are those where parents agree."""

    name: ClassVar[str] = "and"
    reach: float = 2.0  # largest distance of a weight from where it starts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reach <= 0:
            raise UserError(f"reach must be positive, got {self.reach}; convex weights are the operator 'convex'.")

    def solve_weights(self, levels: Tensor, outlook: Callable[[], Lookahead]) -> Tensor:
        """Weights after which the levels are equal, as near as `reach` allows; later steps make up for the rest."""
        count, seen = levels.shape[1], outlook()
        gap, response = (seen.ahead - seen.ahead.mean(1, keepdim=True)).double(), seen.response.double()
        # Equal weights change nothing, so the response is singular; neither the gap nor the change has such a part.
        mean = response.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] / count
        eye = torch.eye(count, dtype=response.dtype, device=response.device)
        change = -solve(response + mean + seen.floor * eye, gap)
        change = change * (self.reach / change.abs().amax(1, keepdim=True).clamp(min=self.reach))
        return (change + change.new_tensor(self.nominal(count))).to(levels.dtype)


OPERATORS: dict[str, type[Any]] = {kind.name: kind for kind in (Affine, And, Convex, Or, Scheduled)}
"""Operators by name."""


def describe_operator(operator: Operator) -> dict[str, Any]:
    """Name and settings as plain values."""
    return {"name": operator.name, **to_dict(operator)}


def make_operator(description: Mapping[str, Any]) -> Operator:
    """Inverse of `describe_operator`; settings that are missing take their defaults."""
    settings = dict(description)
    name = str(settings.pop("name", ""))
    if name not in OPERATORS:
        raise unknown_name("operator", name, OPERATORS)
    defaults = to_dict(OPERATORS[name]()) if name != Scheduled.name else {"knots": ()}
    return from_dict(OPERATORS[name], {**defaults, **settings}, f"operator '{name}'")


def apply_gates(weights: Weights, gates: Tensor | None) -> Weights:
    """`weights` of M parents where `gates` `(B, M)` are 1, rescaled to their sum; as they are where None or all are.

    A row that lets only parents without weight through keeps its weights.
    """
    if gates is None or bool((gates == 1).all()):
        return weights
    columns = [weight * gate[:, None, None] for weight, gate in zip(weights, gates.unbind(1), strict=True)]
    total = torch.stack(columns).sum(0)
    whole = torch.stack([torch.as_tensor(weight).to(total).expand_as(total) for weight in weights]).sum(0)
    share = whole / total.clamp(min=SUM_TOLERANCE)
    return [torch.where(total > SUM_TOLERANCE, c * share, w) for c, w in zip(columns, weights, strict=True)]


def _check_weights(weights: Sequence[float], least: float = -math.inf) -> None:
    if not weights:
        return
    if not all(math.isfinite(weight) and weight >= least for weight in weights) or (
        abs(sum(weights) - 1) > SUM_TOLERANCE
    ):
        sign = "" if least < 0 else " none of them negative,"
        raise UserError(f"Weights of parents must sum to 1,{sign} got {[round(weight, 6) for weight in weights]}.")


def _check_count(found: int, wanted: int) -> None:
    if found != wanted:
        raise UserError(f"{wanted} parents need {wanted} weights, in their order, got {found}.")
