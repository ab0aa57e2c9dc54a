"""Formulas over observations, for conditions and plain controllers of behavior trees.

Source: Xu et al. 2025, PORTAL.

    norm(state[0:2] - state[4:6]) < 0.1 and state[2] > 0
    clip(3 * (state[4:6] - state[0:2]) - 1.5 * state[2:4], -1, 1)

Names are vector observations at their newest step; an index or a slice selects numbers of them. The language has
numbers, lists, `+ - * /`, comparisons of two single numbers, `and or not`, and the functions
`abs clip cos exp max min norm sign sin sqrt sum tanh`. A formula is parsed by `ast` and never run as code; its value is
a tensor per row, in the units of the observation.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError

LONGEST = 500  # maximum characters of a formula
LARGEST = torch.finfo(torch.float32).max  # of a constant


def _norm(value: Tensor) -> Tensor:
    return value.square().sum(-1, keepdim=True).sqrt()


_FUNCTIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {  # name -> number of arguments, function
    "abs": (1, torch.abs),
    "clip": (3, lambda value, low, high: torch.minimum(torch.maximum(value, low), high)),
    "cos": (1, torch.cos),
    "exp": (1, torch.exp),
    "max": (2, torch.maximum),
    "min": (2, torch.minimum),
    "norm": (1, _norm),
    "sign": (1, torch.sign),
    "sin": (1, torch.sin),
    "sqrt": (1, torch.sqrt),
    "sum": (1, lambda value: value.sum(-1, keepdim=True)),
    "tanh": (1, torch.tanh),
}
_OPERATORS: dict[type[Any], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Lt: torch.lt,
    ast.LtE: torch.le,
    ast.Gt: torch.gt,
    ast.GtE: torch.ge,
}


@dataclass(frozen=True)
class ValueType:
    """Type of the value of a formula."""

    size: int  # numbers per row
    truth: bool = False  # whether they are booleans


@dataclass(frozen=True)
class Formula:
    """A parsed formula; call `kind` to check it against the observations before its evaluation."""

    text: str
    body: ast.expr

    @property
    def names(self) -> frozenset[str]:
        """Observations that the formula reads."""
        called = {id(node.func) for node in ast.walk(self.body) if isinstance(node, ast.Call)}
        named = (node for node in ast.walk(self.body) if isinstance(node, ast.Name) and id(node) not in called)
        return frozenset(node.id for node in named)

    def kind(self, sizes: Mapping[str, int]) -> ValueType:
        """Type of its value, given the size of each vector observation.

        Raises:
            UserError: It is not in the language, reads unknown observations, or combines incompatible sizes.
        """
        try:
            return _Checker(self.text, sizes).kind(self.body)
        except RecursionError:
            raise UserError(f"The formula '{self.text}' is nested too deeply.") from None

    def __call__(self, values: Mapping[str, Tensor], one: Tensor) -> Tensor:
        """Value `(B, n)`, numbers or a boolean.

        Args:
            values: Vector observations `{key: (B, d)}`.
            one: Ones `(B, 1)`, which expand constants to rows.
        """
        return _value(self.body, values, one)


def parse_formula(text: object) -> Formula:
    """Parse a formula.

    Raises:
        UserError: It is no text, is too long, or cannot be parsed.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        raise UserError(f"A formula is a text of at most {LONGEST} characters, e.g. 'state[0] > 0.1'; got {text!r}.")
    try:
        return Formula(text, ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"The formula '{text}' cannot be parsed: {error.args[0] if error.args else error}.") from error


def _value(node: ast.expr, values: Mapping[str, Tensor], one: Tensor) -> Tensor:
    """Value `(B, n)` of a checked node; `one` `(B, 1)` provides rows, type and device."""
    match node:
        case ast.Constant():
            return one * float(node.value)  # type: ignore[arg-type]
        case ast.Name():
            return values[node.id]
        case ast.Subscript():
            return _value(node.value, values, one)[:, _places(node)]
        case ast.List():
            return torch.cat([_value(part, values, one) for part in node.elts], -1)
        case ast.UnaryOp():
            inside = _value(node.operand, values, one)
            return ~inside if isinstance(node.op, ast.Not) else -inside
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, values, one), _value(node.right, values, one))
        case ast.Compare():
            return _OPERATORS[type(node.ops[0])](
                _value(node.left, values, one), _value(node.comparators[0], values, one)
            )
        case ast.BoolOp():
            join = torch.logical_and if isinstance(node.op, ast.And) else torch.logical_or
            found = _value(node.values[0], values, one)
            for part in node.values[1:]:
                found = join(found, _value(part, values, one))
            return found
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name][1](*(_value(part, values, one) for part in node.args))
    raise AssertionError(node)


def _places(node: ast.Subscript) -> slice:
    """Numbers selected by an index or slice of constants."""
    if isinstance(node.slice, ast.Slice):
        first, last = (ast.literal_eval(part) if part else None for part in (node.slice.lower, node.slice.upper))
        return slice(first, last)
    index = ast.literal_eval(node.slice)
    return slice(index, index + 1 or None)


class _Checker:
    """Walks a formula once and rejects expressions that cannot be computed."""

    def __init__(self, text: str, sizes: Mapping[str, int]) -> None:
        self.text, self.sizes = text, sizes

    def kind(self, node: ast.expr) -> ValueType:
        match node:
            case ast.Constant(value=bool()) | ast.Constant(value=complex()):
                raise self._refusal("contains a constant that is not a number")
            case ast.Constant(value=int() | float() as value):
                if value > LARGEST:
                    raise self._refusal(f"contains a constant above {LARGEST:.1e}")
                return ValueType(1)
            case ast.Name():
                if node.id not in self.sizes:
                    known = ", ".join(sorted(self.sizes)) or "none"
                    raise self._refusal(f"reads '{node.id}', but the vector observations are: {known}")
                return ValueType(self.sizes[node.id])
            case ast.Subscript():
                return self._chosen(node)
            case ast.List():
                return ValueType(sum(kind.size for kind in self._numbers(node.elts)) or self._empty())
            case ast.UnaryOp(op=ast.Not()):
                return self._truths([node.operand])
            case ast.UnaryOp(op=ast.USub()):
                return next(self._numbers([node.operand]))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return self._joined([node.left, node.right])
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
                if self._joined([node.left, *node.comparators]).size != 1:
                    raise self._refusal("compares vectors; compare single numbers, e.g. by norm(...)")
                return ValueType(1, truth=True)
            case ast.BoolOp():
                return self._truths(node.values)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                if len(node.args) != _FUNCTIONS[name][0]:
                    raise self._refusal(f"calls {name} with {len(node.args)} arguments, {_FUNCTIONS[name][0]} expected")
                joined = self._joined(node.args)
                return ValueType(1) if name in ("norm", "sum") else joined
        raise self._refusal(f"uses '{ast.unparse(node)}', which is not in the language (see docs/guide/programs.md)")

    def _chosen(self, node: ast.Subscript) -> ValueType:
        whole = next(self._numbers([node.value])).size
        if isinstance(node.slice, ast.Slice) and node.slice.step is not None:
            raise self._refusal(f"has a slice with a step in '{ast.unparse(node)}', which is not in the language")
        try:
            places = _places(node)
            size = len(range(whole)[places])
        except (ValueError, TypeError) as error:
            raise self._refusal(f"has an index that is not an integer in '{ast.unparse(node)}'") from error
        if not size or (not isinstance(node.slice, ast.Slice) and not -whole <= (places.start or 0) < whole):
            raise self._refusal(f"selects nothing in '{ast.unparse(node)}', which has {whole} numbers")
        return ValueType(size)

    def _numbers(self, nodes: Sequence[ast.expr]) -> Iterator[ValueType]:
        for node in nodes:
            kind = self.kind(node)
            if kind.truth:
                raise self._refusal(f"computes with '{ast.unparse(node)}', which is a boolean")
            yield kind

    def _joined(self, nodes: Sequence[ast.expr]) -> ValueType:
        sizes = {kind.size for kind in self._numbers(nodes)} - {1}
        if len(sizes) > 1:
            raise self._refusal(f"combines {' and '.join(map(str, sorted(sizes)))} numbers")
        return ValueType(sizes.pop() if sizes else 1)

    def _truths(self, nodes: Sequence[ast.expr]) -> ValueType:
        for node in nodes:
            if not self.kind(node).truth:
                raise self._refusal(f"uses '{ast.unparse(node)}' as a boolean; compare it with a number")
        return ValueType(1, truth=True)

    def _empty(self) -> int:
        raise self._refusal("has an empty list")

    def _refusal(self, why: str) -> UserError:
        return UserError(f"The formula '{self.text}' {why}.")
