"""Positions in observations, for algorithms that depend on the places an episode visits: SubPO, polychromic PPO."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.constraints import NonNegativeInt, Positive, Validated
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy


@dataclass(frozen=True)
class PositionConfig(Validated):
    """The part of an observation that is the position."""

    key: str = "state"  # observation key
    indices: tuple[NonNegativeInt, ...] = (0, 1)  # entries that are the position
    scale: Positive = 0.1  # side of a cell, and length scale of similarity, in units of these entries

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.indices:
            raise UserError("algorithm.place.indices needs one or more entries, got none.")

    def check(self, policy: Policy) -> None:
        """Raise `UserError` if the policy does not observe the position."""
        shape = policy.spec.observation.get(self.key, ())
        if len(shape) != 1 or not all(0 <= entry < shape[0] for entry in self.indices):
            raise UserError(
                f"Policy '{policy.name}' does not observe entries {list(self.indices)} of '{self.key}'; set "
                "algorithm.place.key and algorithm.place.indices."
            )

    def extract(self, obs: Observation) -> Tensor:
        """Newest position `(..., D)` in observations `(..., To, size)`, in units of the scale."""
        return obs[self.key][..., -1, list(self.indices)] / self.scale
