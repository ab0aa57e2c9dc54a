"""Map from the axes of a twist and the gripper to the dimensions of an action."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from robopolicy.errors import UserError, unknown_name
from robopolicy.teleop.contract import AXES, Array

GRIPPER, FIXED = "gripper", "0"
INPUTS = (*AXES, GRIPPER)
DEFAULTS = {
    1: "x",
    2: "x y",
    3: "x y z",
    4: "x y z gripper",  # Meta-World, Fetch
    5: "x y z yaw gripper",  # OGBench
    6: "x y z roll pitch yaw",
    7: "x y z roll pitch yaw gripper",  # robosuite
}
"""Map by number of dimensions, for tasks whose actions have no names of axes."""

_AXIS = re.compile(rf"(?:.*_)?[dav]?({'|'.join(AXES)})")


@dataclass(frozen=True)
class ActionMap:
    """One input per dimension of the action, each with a sign; an input of "0" keeps the middle of the range."""

    inputs: tuple[str, ...]  # (A,) names of `INPUTS` or "0"
    signs: tuple[float, ...]  # (A,)

    @classmethod
    def parse(cls, names: Sequence[str], action_dim: int) -> ActionMap:
        """Read names such as `x`, `yaw-` (flipped) or `0`; raises a `UserError` for other names or another number."""
        if len(names) != action_dim:
            raise UserError(f"--map needs one input per dimension of the action, {action_dim}; got {len(names)}.")
        inputs = tuple(name.removesuffix("-") for name in names)
        for name in inputs:
            if name not in (*INPUTS, FIXED):
                raise unknown_name("input", name, (*INPUTS, FIXED), "of --map")
        return cls(inputs, tuple(-1.0 if name.endswith("-") else 1.0 for name in names))

    @classmethod
    def of_task(cls, action_names: Sequence[str], action_dim: int) -> ActionMap:
        """Map by the names of the action, such as "tool_dx [0.03 m]", or else by its number of dimensions.

        Raises:
            UserError: The names are unknown and the action has more dimensions than a twist and a gripper.
        """
        found = [_input_of(name) for name in action_names]
        if action_names and all(found):
            return cls(tuple(filter(None, found)), (1.0,) * action_dim)
        if action_dim not in DEFAULTS:
            raise UserError(
                f"An action of {action_dim} dimensions has no default map; pass --map with {action_dim} of "
                f"{', '.join(INPUTS)} or 0, e.g. --map {' '.join((*AXES, *['0'] * action_dim)[:action_dim])}."
            )
        return cls.parse(DEFAULTS[action_dim].split(), action_dim)

    def action(self, twist: Array, gripper: float, low: Array, high: Array) -> Array:
        """Action `(A,)` within the bounds `low` and `high` `(A,)` for `twist` `(6,)` and gripper in [-1, 1]."""
        values = dict(zip(AXES, twist, strict=True)) | {GRIPPER: gripper, FIXED: 0.0}
        unit = np.array([sign * values[name] for name, sign in zip(self.inputs, self.signs, strict=True)])
        return np.clip((low + high) / 2 + (high - low) / 2 * unit, low, high)


def _input_of(name: str) -> str | None:
    plain = name.split(" [")[0].strip()
    if match := _AXIS.fullmatch(plain):
        return match[1]
    return GRIPPER if plain.startswith(GRIPPER) else None
