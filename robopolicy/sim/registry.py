"""Task registry: names to simulator factories and experts. Imports neither torch nor any simulator.

`robopolicy` never imports `tasks`; packages register through the entry-point group `robopolicy.tasks`, whose entries
are functions without arguments that call `register`. Third parties add tasks the same way. Tasks of contrib are rows of
`theme.toml`, whose keys are the fields of `TaskEntry`:

    [tasks."family/name"]
    make = "robopolicy.contrib.x.tasks:make"  # (SimOptions) -> VectorSim
    expert = "robopolicy.contrib.x.tasks:make_expert"  # () -> Expert; optional
    description = "One line."
    backends = ["mujoco"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from robopolicy.constraints import Natural, NotNegative, Ranged
from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import PRODUCT, contributed, installed, load, load_entry_point
from robopolicy.spec import IMAGE_PREFIX

if TYPE_CHECKING:
    from torch import Tensor

    from robopolicy.sim.contract import Observation, VectorSim
    from robopolicy.sim.wrappers.registry import WrapperSpec

REWARDS = ("sparse", "shaped")


@dataclass(frozen=True)
class WorldOptions(Ranged):
    """How a world model is played in, where one takes the place of the simulator (backend `worldmodel:FOLDER`)."""

    judge: str = ""  # who sees success: the model's own head, a folder of 'worldmodel judge', vlm:MODEL@URL, vlm:FOLDER
    every: Natural = 0  # control steps between judgements, the last one always; 0 is each, of a vlm every 20th
    samples: Natural = 0  # futures drawn per step, whose disagreement is the uncertainty; 0 is as the model was trained
    penalty: NotNegative = 0.0  # taken off the reward per unit of uncertainty
    max_uncertainty: NotNegative = 0.0  # an episode is cut where the uncertainty is larger; 0 never cuts
    steps: Natural = 0  # longest episode in control steps; 0 is the task's
    films: str = ""  # dataset in whose frames episodes start; empty: where the task's own do
    support: str = ""  # dataset, or gate of `SupportGate.save`, whose support ends episodes that leave it; empty: none
    support_penalty: NotNegative = 25.0  # taken off the reward when one does, as its part "outside"


@dataclass(frozen=True)
class SimOptions:
    """How to build a simulator; a task ignores nothing here, it refuses what it cannot do with a `UserError`."""

    num_envs: int = 16
    backend: str = "auto"  # auto | mujoco | mujoco-exact | warp | envpool | gymnasium | ... ; auto is the task's own
    device: str = "cpu"  # where physics runs in backends with a choice; the others run on the CPU
    cameras: tuple[str, ...] = ()  # cameras to render into observations `image.<camera>`
    image_size: int = 64  # pixels, square
    point_clouds: tuple[str, ...] = ()  # cameras whose depth becomes observations `point_cloud.<camera>`
    points: int = 256  # of each cloud
    reward: str = "sparse"  # sparse | shaped, where the task has both
    threads: int = 0  # physics threads; 0 is one per core
    wrappers: tuple[WrapperSpec, ...] = ()  # around the simulator; in whatever order they are listed
    world: WorldOptions = WorldOptions()  # of the backend `worldmodel:FOLDER` alone

    def refuse_cameras(self, task: str) -> None:
        """Refuse images and point clouds, for tasks that can show neither.

        Raises:
            UserError: Some are asked for.
        """
        if self.cameras or self.point_clouds:
            raise UserError(f"Task {task} has no cameras; leave them out.")


def observation_options(observations: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Fields of `SimOptions` by which one simulator shows all that several policies observe.

    Args:
        observations: Per-step shapes of each policy, as in `PolicySpec.observation`.

    Raises:
        UserError: They see images, or clouds, of different sizes, or need different options of one wrapper.
    """
    from robopolicy.nets.encoder import CLOUD_PREFIX
    from robopolicy.sim.wrappers.registry import wrappers_for

    options: dict[str, Any] = {}
    for prefix, names, size, axis in (
        (IMAGE_PREFIX, "cameras", "image_size", -1),
        (CLOUD_PREFIX, "point_clouds", "points", 0),
    ):
        found = [(key, shape[axis]) for seen in observations for key, shape in seen.items() if key.startswith(prefix)]
        sizes = sorted({number for _, number in found})
        own = [{shape[axis] for key, shape in seen.items() if key.startswith(prefix)} for seen in observations]
        if len(sizes) > 1 and all(len(each) < 2 for each in own):  # a task that shows one policy several has its own
            raise UserError(f"The policies need '{prefix}*' of different sizes {sizes}; play them one by one.")
        if found:
            options |= {names: tuple(sorted({key.removeprefix(prefix) for key, _ in found})), size: sizes[0]}
    if wrappers := wrappers_for(observations):
        options["wrappers"] = wrappers
    return options


class Expert(Protocol):
    """Demonstrator. Called once per control step; `sim.episode_step == 0` marks fresh episodes."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, A)` in the simulator's units, from the simulator or from `obs` `{key: (N, ...)}`."""
        ...


@dataclass(frozen=True)
class TaskEntry:
    """One row of the registry."""

    name: str  # "family/name", e.g. "manipulation/lift"
    make: Callable[[SimOptions], VectorSim]
    description: str  # one line
    make_expert: Callable[[], Expert] | None = None
    backends: tuple[str, ...] = ("mujoco",)
    requires: str = ""  # extra to install, empty when the core suffices
    module: str = ""  # what that extra brings, where it is not called like the extra
    solved: Callable[[Observation], Tensor] | None = None  # success `(N,)` bool of observations, where these tell it

    def need_expert(self) -> Callable[[], Expert]:
        """`make_expert`, where there is one.

        Raises:
            UserError: There is none.
        """
        if self.make_expert is None:
            raise UserError(f"Task {self.name} has no scripted expert; 'robopolicy list tasks' names those that have.")
        return self.make_expert


@dataclass(frozen=True)
class TaskFamily:
    """Tasks that are named `prefix/<id>` and known by nothing else."""

    make_entry: Callable[[str], TaskEntry]  # of an id
    description: str  # one line
    requires: str = ""  # as of `TaskEntry`
    module: str = ""  # as of `TaskEntry`


_TASKS: dict[str, TaskEntry] = {}
_FAMILIES: dict[str, TaskFamily] = {}
_PACKAGES: dict[str, str] = {}  # tasks of other packages -> package


def register(entry: TaskEntry) -> None:
    """Add a task; a name can be taken only once."""
    if entry.name in _TASKS:
        raise ValueError(f"Task '{entry.name}' is already registered.")
    _TASKS[entry.name] = entry


def register_family(prefix: str, family: TaskFamily) -> None:
    """Let `prefix/<id>` name tasks whose entries are built when they are asked for."""
    if prefix in _FAMILIES:
        raise ValueError(f"Task family '{prefix}' is already registered.")
    _FAMILIES[prefix] = family


@cache
def _register_installed() -> None:
    """Call the functions of the entry-point group `robopolicy.tasks`, which register tasks."""
    for point in installed("tasks").values():
        known = set(_TASKS)
        load_entry_point(point)()
        if point.dist is not None and point.dist.name != "robopolicy":
            _PACKAGES.update(dict.fromkeys(_TASKS.keys() - known, point.dist.name))


def task_names() -> list[str]:
    """Every registered task id and those of contrib, sorted."""
    _register_installed()
    return sorted({*_TASKS, *contributed("tasks")})


def task_families() -> dict[str, TaskFamily]:
    """The families by prefix, sorted."""
    _register_installed()
    return dict(sorted(_FAMILIES.items()))


def get_task(name: str) -> TaskEntry:
    """Look a task up by its id, or by its last part where that is unique ("lift")."""
    names = task_names()
    prefix, _, rest = name.partition("/")
    if name not in names and prefix in _FAMILIES and rest:
        return _FAMILIES[prefix].make_entry(rest)
    matches = [name] if name in names else [task for task in names if task.rsplit("/", 1)[-1] == name]
    if len(matches) != 1:
        raise unknown_name("task", name, names)
    return _TASKS[matches[0]] if matches[0] in _TASKS else _contributed_task(matches[0])


def task_ring(name: str) -> str:
    """Where a task of `task_names` comes from: "product", the theme of contrib, or the package that was installed."""
    return _PACKAGES.get(name, PRODUCT) if name in _TASKS else contributed("tasks")[name][0]


def _contributed_task(name: str) -> TaskEntry:
    """The entry of a row of `theme.toml`, whose functions are imported when they are called."""
    row: dict[str, Any] = contributed("tasks")[name][1]
    fields = row | {"name": name, "make_expert": row.get("expert"), "backends": tuple(row.get("backends", ("mujoco",)))}
    fields |= {key: _imported(fields.get(key)) for key in ("make", "make_expert", "solved")}
    return TaskEntry(**{key: value for key, value in fields.items() if key != "expert"})


def _imported(target: str | None) -> Callable[..., Any] | None:
    """The function at "module:attribute", imported when it is called."""
    return None if target is None else lambda *args: load(target)(*args)


def make_sim(name: str, options: SimOptions | None = None) -> VectorSim:
    """Build the simulator of a task."""
    options = options or SimOptions()
    entry = get_task(name)
    if options.num_envs < 1:
        raise UserError(f"The number of environments must be at least 1, got {options.num_envs}.")
    if options.backend not in ("auto", *entry.backends):
        raise unknown_name("backend", options.backend, ("auto", *entry.backends), f"of task {entry.name}")
    if options.world != WorldOptions():
        raise UserError("A judge and other settings of a world model belong to --backend worldmodel:FOLDER.")
    if options.reward not in REWARDS:
        raise unknown_name("reward", options.reward, REWARDS, f"of task {entry.name}")
    from robopolicy.sim.wrappers.registry import wrap

    return wrap(entry.make(options), options.wrappers)
