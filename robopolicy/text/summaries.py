"""What a causal model shows of itself beside probabilities, as recipes ask for it.

collision (N, T)      probability that two draws from the distribution of a token agree
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.plugins import Registry
from robopolicy.text.model import head_of
from robopolicy.text.policy import TextPolicy
from robopolicy.text.scoring import collisions

ROWS = 64  # conversations at once: attention is rows x heads x length x length numbers
Options = Mapping[str, Any]


class Summary(ABC):
    """One or more fields of rows, found by looking into the model."""

    whole: ClassVar[bool] = False  # looks at all rows together, and not at `ROWS` of them

    @abstractmethod
    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Fields of `extra` by name, given the options of the part that asks."""


@torch.no_grad()
def choice_norms(policy: TextPolicy, rows: Decisions, *draws: int) -> dict[str, Tensor]:
    """`collision`, or with three draws `collision3`, at the temperature of the rows."""
    tokens, start, mask = conversations_of(rows)
    heat = rows.extra["temperature"][mask.nonzero(as_tuple=True)[0]]
    head = head_of(policy.model)
    hidden, result = policy.states(tokens, start, mask), dict[str, Tensor]()
    for number in draws:
        found = collisions(hidden, head.weight, head.bias, heat, number)
        name = "collision" if number == 2 else f"collision{number}"
        result[name] = found.new_zeros(mask.shape).masked_scatter(mask, found)
    return result


class Collisions(Summary):
    """`collision`, for the optimal baseline of tokens."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """See the top of this module."""
        return choice_norms(policy, rows, 2)


SUMMARIES: Registry[type[Summary]] = Registry("features", {"optimal_token_baseline": Collisions})
"""Part of a recipe, or key that one reads -> what it asks for."""


def summaries_of(recipe: Mapping[str, Any]) -> dict[str, Options]:
    """Those of `SUMMARIES` that a plain recipe names, with the options of the part."""
    named = dict(named_parts(recipe))
    return {name: named[name] for name in SUMMARIES if name in named}


def summarised(policy: TextPolicy, rows: Decisions, wanted: Mapping[str, Options]) -> Decisions:
    """The rows with what parts read in `extra`.

    Raises:
        UserError: The policy is not causal.
    """
    if wanted and not policy.causal:
        raise UserError(
            f"Part '{next(iter(wanted))}' of this recipe reads a causal model (policy=text), not '{policy.name}'."
        )
    extra = dict(rows.extra)
    for name, options in wanted.items():
        find = SUMMARIES[name]()
        size = len(rows) if find.whole else ROWS
        blocks = (rows.select(slice(at, at + size)) for at in range(0, len(rows), size))
        parts = [find(policy, block, options) for block in blocks]
        extra |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return rows.with_fields(extra=extra)


def named_parts(plain: Any) -> Iterator[tuple[str, Options]]:
    """Every string among the values of a plain recipe, with the mapping in which it stands."""
    if isinstance(plain, Mapping):
        for value in plain.values():
            if isinstance(value, str):
                yield value, plain
            else:
                yield from named_parts(value)
    elif isinstance(plain, list | tuple):
        for value in plain:
            yield from [(value, {})] if isinstance(value, str) else named_parts(value)


def conversations_of(rows: Decisions) -> tuple[Tensor, Tensor, Tensor]:
    """`tokens`, `start` and `mask`, as `TextPolicy.score` takes them."""
    return rows.extra["tokens"], rows.extra["start"], rows.valid()
