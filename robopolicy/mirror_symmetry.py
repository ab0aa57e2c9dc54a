"""Left and right: how a task's observations and actions look in a mirror; declared by tasks, used by learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.errors import UserError


@dataclass(frozen=True)
class Reflection:
    """A signed permutation that undoes itself: element i of the image of x is `sign[i] * x[order[i]]`."""

    order: tuple[int, ...]
    sign: tuple[float, ...]

    def __post_init__(self) -> None:
        size = len(self.order)
        undone = len(self.sign) == size and all(
            0 <= j < size and self.order[j] == i and self.sign[i] * self.sign[j] == 1 for i, j in enumerate(self.order)
        )
        if not undone:
            raise UserError(
                f"A reflection applied twice must change nothing; got order {self.order}, sign {self.sign}."
            )

    @classmethod
    def of(cls, sign: Sequence[float], swapped: Sequence[tuple[int, int]] = ()) -> Reflection:
        """Flip signs, and exchange the pairs `swapped` of elements."""
        order = list(range(len(sign)))
        for i, j in swapped:
            order[i], order[j] = j, i
        return cls(tuple(order), tuple(float(value) for value in sign))

    @classmethod
    def joined(cls, *parts: Reflection) -> Reflection:
        """That of a vector whose parts lie one after the other."""
        starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
        order = tuple(start + j for start, part in zip(starts, parts, strict=True) for j in part.order)
        return cls(order, tuple(value for part in parts for value in part.sign))

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return len(self.order)

    def permute(self, x: Tensor) -> Tensor:
        """Exchange the elements of `x` `(..., D)` and keep their signs, as scales want it."""
        return x[..., torch.tensor(self.order, device=x.device)]

    def __call__(self, x: Tensor) -> Tensor:
        """The image of `x` `(..., D)`."""
        return self.permute(x) * torch.tensor(self.sign, device=x.device, dtype=x.dtype)


@dataclass(frozen=True)
class Mirror:
    """What a task looks like in a mirror: a mirrored action in a mirrored state leads to the mirrored next state.

    Reward, end of episodes and distribution of the first states must be the same on both sides.
    """

    observation: Mapping[str, Reflection]  # of every vector that can be mirrored
    action: Reflection

    def observe(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Mirrored `obs`, without the keys that have no image."""
        return {key: self.observation[key](value) for key, value in obs.items() if key in self.observation}
