"""Simulator backends by name. Importing this module imports neither torch nor any simulator.

A backend makes vector simulators (`robopolicy.sim.contract`). `TaskEntry.backends` lists the backends of a task. Other
packages add `Backend` objects through the entry-point group `robopolicy.backends`; themes of contrib add rows of
`theme.toml`, whose keys are the fields of `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from robopolicy.plugins import Registry, load

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim


@dataclass(frozen=True)
class Backend:
    """One row of the registry.

    `make` is called as `make(environment, options, task=NAME)`. The environment is a `MujocoTask`, or with `by_id` the
    name of an environment in another library; `options` are `SimOptions`; `NAME` is reported in `SimSpec`.
    """

    help: str  # one line
    make: str = ""  # "module:function"; empty if each task makes its own simulator
    by_id: bool = False  # runs environments of another library, as tasks `BACKEND/<id>`
    module: str = ""  # required package beyond the core
    extra: str = ""  # extra of robopolicy that installs that package
    argument: str = ""  # argument after a colon in its name, e.g. FOLDER
    repeatable: bool = True  # equal seeds and actions give bit-equal episodes; see `SimSpec.seeded_episodes`
    without_warp: str = ""  # why its tasks do not run on the backend `warp`, as the end of a sentence

    def maker(self) -> Callable[..., VectorSim]:
        """Import and return the function `make`."""
        return load(self.make)


_MUJOCO = "robopolicy.sim.backends.mujoco.backend:make_native"

BACKENDS: Registry[Backend] = Registry(
    "backends",
    {
        "mujoco": Backend(
            "native MuJoCo on all cores, with the engine that the task requires",
            _MUJOCO,
            without_warp="it is written for numpy",
        ),
        "mujoco-exact": Backend("native MuJoCo with one persistent MjData per environment", _MUJOCO),
        "warp": Backend(
            "MuJoCo Warp: the same tasks on a GPU, in single precision",
            "robopolicy.sim.backends.warp:make_warp",
            module="mujoco_warp",
            extra="warp",
        ),
        "gymnasium": Backend(
            "any registered gymnasium environment, stepped sequentially",
            "robopolicy.sim.backends.gymnasium:make_gymnasium",
            by_id=True,
            without_warp="another library steps its physics on the CPU",
        ),
        "envpool": Backend(
            "EnvPool's compiled environments; fast",
            "robopolicy.sim.backends.envpool:make_envpool",
            by_id=True,
            module="envpool",
            extra="envpool",
            repeatable=False,
            without_warp="EnvPool steps its physics on the CPU",
        ),
        "mjlab": Backend(
            "mjlab's environments on a GPU or, slowly, the CPU",
            "robopolicy.sim.backends.mjlab:make_mjlab",
            by_id=True,
            module="mjlab",
            extra="mjlab",
            repeatable=False,
            without_warp="mjlab itself runs MuJoCo Warp",
        ),
        "isaaclab": Backend(
            "Isaac Lab's environments on a GPU or, slowly, the CPU (in a separate Python 3.12 environment)",
            "robopolicy.sim.backends.isaaclab:make_isaaclab",
            by_id=True,
            module="isaaclab",
            extra="isaaclab",
            repeatable=False,
            without_warp="Isaac Lab has its own physics",
        ),
        "torch": Backend(
            "tasks written in torch: toys and tasks of known dynamics", without_warp="it has no MuJoCo model"
        ),
        "text": Backend("conversations, in this process", without_warp="it has no physics"),
        "worldmodel": Backend("a learned world model that replaces the simulator of a task", argument="FOLDER"),
    },
    read=lambda row: Backend(**row),
)
"""Backends by name."""
