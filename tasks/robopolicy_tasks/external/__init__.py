"""Tasks of Gymnasium-Robotics by id, `gymnasium_robotics/<id>`, without individual registration.

Each backend that runs environments by id has its own family (`gymnasium/<id>`, `envpool/<id>`, ...).
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

    description = f"{env_id} of Gymnasium-Robotics."
    return TaskEntry(name, make, description, backends=("gymnasium",), requires=EXTRA, module=ROBOTICS)


def register() -> None:
    """Register the family without importing the package."""
    description = f"Any task of {ROBOTICS} by its id in the package."
    register_family(ROBOTICS, TaskFamily(_robotics_entry, description, requires=EXTRA, module=ROBOTICS))
