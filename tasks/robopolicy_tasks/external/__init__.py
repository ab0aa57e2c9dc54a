"""Tasks of Gymnasium-Robotics by their own ids, `gymnasium_robotics/<id>`, without individual registration.

Tasks `gymnasium/<id>`, `envpool/<id>`, `mjlab/<id>` and `isaaclab/<id>` need no registration: each backend that runs
environments by id has a family of its name.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, TaskEntry, TaskFamily, check_cameras, register_family

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

ROBOTICS = "gymnasium_robotics"
EXTRA = "gymnasiumrobotics"


def _robotics_entry(env_id: str) -> TaskEntry:
    name = f"{ROBOTICS}/{env_id}"

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.sim.backends.gymnasium import make_gymnasium

        if find_spec(ROBOTICS) is None:
            raise UserError(f"Task {name} needs pip install 'robopolicy[{EXTRA}]'.")
        return check_cameras(make_gymnasium(f"{ROBOTICS}:{env_id}", options, task=name), options)

    description = f"Gymnasium-Robotics' {env_id}."
    return TaskEntry(name, make, description, backends=("gymnasium",), requires=EXTRA, module=ROBOTICS)


def register() -> None:
    """Register the family without importing the package."""
    description = f"Any task of {ROBOTICS} by its own id."
    register_family(ROBOTICS, TaskFamily(_robotics_entry, description, requires=EXTRA, module=ROBOTICS))
