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

from robopolicy.constraints import NonNegative, NonNegativeInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import PRODUCT, contributed, installed, load, load_entry_point
from robopolicy.sim.backends import BACKENDS
from robopolicy.spec import IMAGE_PREFIX

if TYPE_CHECKING:
    from torch import Tensor

    from robopolicy.sim.contract import Observation, VectorSim
    from robopolicy.sim.wrappers.registry import WrapperSpec

REWARDS = ("sparse", "shaped")


@dataclass(frozen=True)
class WorldOptions(Validated):
    """Options of a world model that replaces the simulator (backend `worldmodel:FOLDER`)."""

    judge: str = (
        ""  # success detector: empty (head of the model), a folder of 'worldmodel judge', vlm:MODEL@URL, vlm:FOLDER
    )
    every: NonNegativeInt = 0  # control steps between detections; 0 is every step, every 20th with a VLM
    samples: NonNegativeInt = 0  # samples per step, whose disagreement is the uncertainty; 0 is the number of the model
    penalty: NonNegative = 0.0  # subtracted from the reward per unit of uncertainty
    max_uncertainty: NonNegative = 0.0  # truncates episodes above this uncertainty; 0 disables truncation
    steps: NonNegativeInt = 0  # maximum episode length in control steps; 0 is the limit of the task
    films: str = ""  # dataset with the initial frames of episodes; empty: initial states of the task
    support: str = ""  # dataset, or gate of `OODDetector.save`, that ends out-of-distribution episodes; empty: none
    support_penalty: NonNegative = 25.0  # subtracted from the reward then, as term "outside"


@dataclass(frozen=True)
class SimOptions:
    """Options of a simulator; a task raises a `UserError` for options that it does not support."""

    num_envs: int = 16
    backend: str = "auto"  # auto | mujoco | mujoco-exact | warp | envpool | gymnasium | ... ; auto is the task's own
    device: str = "cpu"  # device of physics in backends that support it; the others run on the CPU
    cameras: tuple[str, ...] = ()  # cameras to render into observations `image.<camera>`
    image_size: int = 64  # pixels, square
    point_clouds: tuple[str, ...] = ()  # cameras whose depth becomes observations `point_cloud.<camera>`
    points: int = 256  # of each cloud
    reward: str = "sparse"  # sparse | shaped, where the task has both
    threads: int = 0  # physics threads; 0 is one per core
    wrappers: tuple[WrapperSpec, ...] = ()  # wrappers around the simulator, in any order
    world: WorldOptions = WorldOptions()  # only for the backend `worldmodel:FOLDER`

    def refuse_cameras(self, task: str) -> None:
        """Raise an error for image and point-cloud options, for tasks without cameras.

        Raises:
            UserError: Cameras are requested.
        """
        if self.cameras or self.point_clouds:
            raise UserError(f"Task {task} has no cameras; leave them out.")


def observation_options(observations: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Fields of `SimOptions` for a simulator with the observations of several policies.

    Args:
        observations: Per-step shapes of each policy, as in `PolicySpec.observation`.

    Raises:
        UserError: The policies need images or clouds of different sizes, or different options of one wrapper.
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
            raise UserError(f"The policies need '{prefix}*' of different sizes {sizes}; evaluate them separately.")
        if found:
            options |= {names: tuple(sorted({key.removeprefix(prefix) for key, _ in found})), size: sizes[0]}
    if wrappers := wrappers_for(observations):
        options["wrappers"] = wrappers
    return options


class Expert(Protocol):
    """Scripted demonstrator. Called once per control step; `sim.episode_step == 0` marks fresh episodes."""

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
    module: str = ""  # module of that extra, if its name differs from the extra
    success_fn: Callable[[Observation], Tensor] | None = None  # success `(N,)` bool of observations, where possible

    def require_expert(self) -> Callable[[], Expert]:
        """Return `make_expert`.

        Raises:
            UserError: The task has no expert.
        """
        if self.make_expert is None:
            raise UserError(
                f"Task {self.name} has no scripted expert; 'robopolicy list tasks' shows the tasks with one."
            )
        return self.make_expert


@dataclass(frozen=True)
class TaskFamily:
    """Tasks named `prefix/<id>`, built on request."""

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
    """Register tasks `prefix/<id>` whose entries are built on request."""
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
    """The families by prefix, sorted: registered ones, and one for each backend that runs environments by id."""
    _register_installed()
    families = _FAMILIES | {name: _backend_family(name) for name in BACKENDS if BACKENDS[name].by_id}
    return dict(sorted(families.items()))


def _backend_family(backend: str) -> TaskFamily:
    row = BACKENDS[backend]
    description = f"Any task of {backend} by its own id."
    return TaskFamily(lambda name: backend_entry(backend, name), description, requires=row.extra, module=row.module)


def backend_entry(backend: str, environment: str, name: str = "", description: str = "") -> TaskEntry:
    """The task that runs an environment of another library on a backend.

    Args:
        backend: Key in `BACKENDS` of one that runs environments by id.
        environment: Name of the environment in its library.
        name: Id of the task; `BACKEND/ENVIRONMENT` by default.
        description: One line.
    """
    name = name or f"{backend}/{environment}"
    row = BACKENDS[backend]

    def make(options: SimOptions) -> VectorSim:
        return check_views(row.maker()(environment, options, task=name), options)

    description = description or f"{environment} of {backend}."
    return TaskEntry(name, make, description, backends=(backend,), requires=row.extra, module=row.module)


def check_views(sim: VectorSim, options: SimOptions) -> VectorSim:
    """The simulator, if its own observations include the requested cameras and point clouds.

    Raises:
        UserError: They do not; the simulator is closed.
    """
    from robopolicy.nets.encoder import CLOUD_PREFIX

    wanted = [IMAGE_PREFIX + camera for camera in options.cameras]
    wanted += [CLOUD_PREFIX + camera for camera in options.point_clouds]
    if not set(wanted) <= set(sim.spec.observation):
        sim.close()
        raise UserError(f"Task {sim.spec.task} has fixed observations and cannot add cameras; leave them out.")
    return sim


def get_task(name: str) -> TaskEntry:
    """Look a task up by its id, or by its last part where that is unique ("lift")."""
    names = task_names()
    prefix, _, rest = name.partition("/")
    if name not in names and rest:
        if prefix in _FAMILIES:
            return _FAMILIES[prefix].make_entry(rest)
        if prefix in BACKENDS and BACKENDS[prefix].by_id:
            return backend_entry(prefix, rest)
    matches = [name] if name in names else [task for task in names if task.rsplit("/", 1)[-1] == name]
    if len(matches) != 1:
        raise unknown_name("task", name, names)
    return _TASKS[matches[0]] if matches[0] in _TASKS else _contributed_task(matches[0])


def task_ring(name: str) -> str:
    """Origin of a task: "product", a theme of contrib, or an installed package."""
    return _PACKAGES.get(name, PRODUCT) if name in _TASKS else contributed("tasks")[name][0]


def _contributed_task(name: str) -> TaskEntry:
    """The entry of a row of `theme.toml`, whose functions are imported when they are called."""
    row: dict[str, Any] = contributed("tasks")[name][1]
    fields = row | {"name": name, "make_expert": row.get("expert"), "backends": tuple(row.get("backends", ("mujoco",)))}
    fields |= {key: _imported(fields.get(key)) for key in ("make", "make_expert", "success_fn")}
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
        raise UserError("World-model settings such as a judge need --backend worldmodel:FOLDER.")
    if options.reward not in REWARDS:
        raise unknown_name("reward", options.reward, REWARDS, f"of task {entry.name}")
    from robopolicy.sim.wrappers.registry import wrap

    return wrap(entry.make(options), options.wrappers)
