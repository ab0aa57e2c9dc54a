"""What the joints of a robot may do."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class JointLimits:
    """Limits of J joints, arrays `(J,)` in SI units: rad for revolute joints, m for prismatic ones, inf where unknown.

    A joint without a velocity limit is refused: nothing could be promised about it. Coordinates without end, such as
    the pose of a base, have infinite position limits.

    Raises:
        UserError: Shapes differ, a number is not positive (or not a number), or a range is empty.
    """

    names: tuple[str, ...]
    position_low: Array  # [rad or m]
    position_high: Array
    velocity: Array  # [rad/s or m/s]
    acceleration: Array  # [rad/s^2 or m/s^2]
    jerk: Array  # [rad/s^3 or m/s^3]
    effort: Array  # [Nm or N]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            twice = [name for name in self.names if self.names.count(name) > 1]
            found = f"'{twice[0]}' twice" if twice else "none"
            raise UserError(f"Joint limits need at least one joint and each name once, got {found}.")
        for entry in fields(self)[1:]:
            value = np.array(getattr(self, entry.name), np.float64)
            if value.shape != (len(self.names),):
                raise UserError(f"Joint limits: '{entry.name}' needs {len(self.names)} numbers, got {value.shape}.")
            value.setflags(write=False)
            object.__setattr__(self, entry.name, value)
            wrong = np.isnan(value) if entry.name.startswith("position") else ~(value > 0)
            if wrong.any():
                number = "a number" if entry.name.startswith("position") else "a positive number"
                raise self._error(wrong, f"'{entry.name}' must be {number}", value)
        if not np.isfinite(self.velocity).all():
            raise self._error(~np.isfinite(self.velocity), "'velocity' must be known", self.velocity)
        empty = ~(self.position_low < self.position_high)
        if empty.any():
            raise self._error(empty, "'position_low' must be below 'position_high'", self.position_low)

    def __len__(self) -> int:
        return len(self.names)

    def inside(self, position: Array, slack: float = 0.0) -> NDArray[np.bool_]:
        """Which of the positions `(J,)` lie within their range, give or take `slack`; NaN does not."""
        return (position >= self.position_low - slack) & (position <= self.position_high + slack)

    def _error(self, wrong: NDArray[np.bool_], what: str, value: Array) -> UserError:
        joint = int(np.flatnonzero(wrong)[0])
        return UserError(f"Limits of joint '{self.names[joint]}': {what}, got {value[joint]:g}.")
