"""Simulator backends by name. Importing this module imports neither torch nor any simulator.

A backend makes vector simulators (`robopolicy.sim.contract`). Tasks name the backends that they run on in
`TaskEntry.backends`. Other packages add backends by the entry-point group `robopolicy.backends`, whose entries are
`Backend` objects; themes of contrib by rows of `theme.toml`, whose keys are the fields of `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from robopolicy.plugins import Registry, load

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim


@dataclass(frozen=True)
class Backend:
    """One row of the registry.

    `make` is called as `make(environment, options, task=NAME)`. The environment is a `MujocoTask`, or the name of an
    environment in another library where `by_id` is true; `options` are `SimOptions`, `NAME` is reported in `SimSpec`.
    """

    help: str  # one line
    make: str = ""  # "module:function"; empty where a task makes its simulators without a common function
    by_id: bool = False  # runs environments of another library, as tasks `BACKEND/<id>`
    module: str = ""  # package that it needs beyond the core
    extra: str = ""  # extra of robopolicy that installs that package
    argument: str = ""  # what follows a colon in its name, e.g. FOLDER
    repeatable: bool = True  # equal seeds and actions give bit-equal episodes; `SimSpec.seeded_episodes`
    lockstep: bool = False  # all rows step together, none can be skipped; not `SimSpec.supports_masked_step`

    def maker(self) -> Callable[..., VectorSim]:
        """The function `make`, imported now."""
        return load(self.make)


_MUJOCO = "robopolicy.sim.backends.mujoco.backend:make_native"

BACKENDS: Registry[Backend] = Registry(
    "backends",
    {
        "mujoco": Backend("native MuJoCo on all cores, the engine that a task prefers", _MUJOCO),
        "mujoco-exact": Backend("native MuJoCo with one persistent MjData per environment", _MUJOCO),
        "warp": Backend(
            "MuJoCo Warp: the same tasks on a GPU, in single precision",
            "robopolicy.sim.backends.warp:make_warp",
            module="mujoco_warp",
            extra="warp",
        ),
        "gymnasium": Backend(
            "any registered gymnasium environment, stepped one at a time",
            "robopolicy.sim.backends.gymnasium:make_gymnasium",
            by_id=True,
        ),
        "envpool": Backend(
            "EnvPool's compiled environments; fast",
            "robopolicy.sim.backends.envpool:make_envpool",
            by_id=True,
            module="envpool",
            extra="envpool",
            repeatable=False,
        ),
        "mjlab": Backend(
            "mjlab's environments on a GPU or, slowly, the CPU",
            "robopolicy.sim.backends.mjlab:make_mjlab",
            by_id=True,
            module="mjlab",
            extra="mjlab",
            repeatable=False,
            lockstep=True,
        ),
        "isaaclab": Backend(
            "Isaac Lab's environments on a GPU or, slowly, the CPU (Python 3.12, an environment of its own)",
            "robopolicy.sim.backends.isaaclab:make_isaaclab",
            by_id=True,
            module="isaaclab",
            extra="isaaclab",
            repeatable=False,
            lockstep=True,
        ),
        "torch": Backend("tasks that are written in torch: toys, and those of known dynamics"),
        "text": Backend("conversations, in this process"),
        "worldmodel": Backend("a learned world model in place of a task's own simulator", argument="FOLDER"),
    },
    read=lambda row: Backend(**row),
)
"""Name -> what it is, what it needs and what its simulators can do."""


def all_lockstep(names: Iterable[str]) -> bool:
    """Whether every backend in `names` steps all rows together; unregistered ones do not."""
    return all(name in BACKENDS and BACKENDS[name].lockstep for name in names)
