"""What to do while the policy cannot be followed: a function from where the joints are to where they should be next."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from robopolicy.deploy.safety.limits import Array, JointLimits
from robopolicy.errors import UserError

Fallback = Callable[[Array, float], Array | None]
"""(commanded position (J,), control period [s]) -> the next target (J,), or None to stand still."""


def hold(position: Array, dt: float) -> Array | None:
    """Stand still."""
    return None


def go_home(limits: JointLimits, home: Array, speed: float = 0.1) -> Fallback:
    """Move to `home` `(J,)`, all joints arriving together, at `speed` of what the slowest may; then stand still.

    Raises:
        UserError: `home` lies outside the limits, or `speed` outside (0, 1].
    """
    home = np.array(home, np.float64)
    if home.shape != (len(limits),) or not limits.inside(home).all():
        raise UserError("The home position of the fall-back must lie within the joint limits.")
    if not 0.0 < speed <= 1.0:
        raise UserError(f"The speed of the fall-back must lie in (0, 1], got {speed:g}.")

    def target(position: Array, dt: float) -> Array | None:
        way = home - position
        periods = np.max(np.abs(way) / (speed * limits.velocity * dt))
        return None if periods == 0.0 else position + way / max(periods, 1.0)

    return target
