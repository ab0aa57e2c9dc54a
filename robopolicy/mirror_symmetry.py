"""Left-right symmetry of observations and actions, declared by tasks and used by algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.errors import UserError


@dataclass(frozen=True)
class SignedPermutation:
    """A signed permutation that is its own inverse: element i of the result is `sign[i] * x[order[i]]`."""

    order: tuple[int, ...]
    sign: tuple[float, ...]

    def __post_init__(self) -> None:
        size = len(self.order)
        is_involution = len(self.sign) == size and all(
            0 <= j < size and self.order[j] == i and self.sign[i] * self.sign[j] == 1 for i, j in enumerate(self.order)
        )
        if not is_involution:
            raise UserError(
                f"A signed permutation applied twice must be the identity; got order {self.order}, sign {self.sign}."
            )

    @classmethod
    def of(cls, sign: Sequence[float], swapped: Sequence[tuple[int, int]] = ()) -> SignedPermutation:
        """Create a permutation that flips signs and exchanges the pairs `swapped` of elements."""
        order = list(range(len(sign)))
        for i, j in swapped:
            order[i], order[j] = j, i
        return cls(tuple(order), tuple(float(value) for value in sign))

    @classmethod
    def concat(cls, *parts: SignedPermutation) -> SignedPermutation:
        """Concatenate the permutations of the parts of a vector."""
        starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
        order = tuple(start + j for start, part in zip(starts, parts, strict=True) for j in part.order)
        return cls(order, tuple(value for part in parts for value in part.sign))

    @property
    def size(self) -> int:
        """Length of the vector."""
        return len(self.order)

    def permute(self, x: Tensor) -> Tensor:
        """Permute the elements of `x` `(..., D)` without signs, e.g. for scales."""
        return x[..., torch.tensor(self.order, device=x.device)]

    def __call__(self, x: Tensor) -> Tensor:
        """Mirror `x` `(..., D)`."""
        return self.permute(x) * torch.tensor(self.sign, device=x.device, dtype=x.dtype)


@dataclass(frozen=True)
class MirrorSymmetry:
    """Left-right symmetry of a task: a mirrored action in a mirrored state leads to the mirrored next state.

    Rewards, ends of episodes and the distribution of initial states must be invariant.
    """

    observation: Mapping[str, SignedPermutation]  # one for each vector that can be mirrored
    action: SignedPermutation

    def mirror_obs(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Mirror the observations and drop the keys without a symmetry."""
        return {key: self.observation[key](value) for key, value in obs.items() if key in self.observation}
