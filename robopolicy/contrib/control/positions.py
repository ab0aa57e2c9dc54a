"""Where a policy is, for algorithms that care which places an episode visits: SubPO, polychromic objectives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.constraints import NonNegativeInt, Positive, Validated
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy


@dataclass(frozen=True)
class PositionConfig(Validated):
    """The part of an observation that is the place."""

    key: str = "state"  # observation that holds it
    indices: tuple[NonNegativeInt, ...] = (0, 1)  # its entries that are the place
    scale: Positive = 0.1  # side of a cell, and length over which places are alike, in units of those entries

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.indices:
            raise UserError("A place needs one or more entries, got none.")

    def check(self, policy: Policy) -> None:
        """Refuse a policy that does not see the place."""
        shape = policy.spec.observation.get(self.key, ())
        if len(shape) != 1 or not all(0 <= entry < shape[0] for entry in self.indices):
            raise UserError(
                f"Policy '{policy.name}' sees no entries {list(self.indices)} of '{self.key}'; set algorithm.place.key "
                "and algorithm.place.indices."
            )

    def extract(self, obs: Observation) -> Tensor:
        """Newest place `(..., D)` in observations `(..., To, size)`, in units of the scale."""
        return obs[self.key][..., -1, list(self.indices)] / self.scale
