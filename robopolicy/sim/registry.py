"""Task registry: names to simulator factories and experts. Imports neither torch nor any simulator.

`robopolicy` never imports `tasks`; packages register through the entry-point group `robopolicy.tasks`, whose entries
are functions without arguments that call `register`. Tasks of contrib are rows of `theme.toml`, whose keys are the
fields of `TaskEntry`:

    [tasks."family/name"]
    make = "robopolicy.contrib.x.tasks:make"  # (SimOptions) -> VectorSim
    expert = "robopolicy.contrib.x.tasks:make_expert"  # () -> Expert; optional
    description = "One line."
    backends = ["mujoco"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

NO_TASK = "none"  # task that exists only as a dataset, without a simulator
REWARDS = ("sparse", "shaped")
SUCCESS_STEPS = ("any", "last")  # steps of an episode whose success may count; the protocol of Fetch counts the last

SUCCESS = {
    "any": "success at any step",
    "end": "success ends the episode",
    "last": "success of whole episodes, at their last step",
    "none": "no success, only returns",
    "sparse": "success ends the episode with sparse rewards, and may hold at any step with shaped ones",
}
"""When a task reports success."""


@dataclass(frozen=True)
class WorldOptions(Validated):
    """Options of a world model that replaces the simulator (backend `worldmodel:FOLDER`)."""

    judge: str = ""  # success detector: folder of 'worldmodel judge', vlm:MODEL@URL or vlm:FOLDER; empty: model head
    every: NonNegativeInt = 0  # control steps between detections; 0 is every step, every 20th with a VLM
    samples: NonNegativeInt = 0  # per step, whose disagreement is the uncertainty; 0 is the default of the model
    penalty: NonNegative = 0.0  # subtracted from the reward per unit of uncertainty
    max_uncertainty: NonNegative = 0.0  # truncates episodes above this uncertainty; 0 disables truncation
    steps: NonNegativeInt = 0  # maximum episode length in control steps; 0 is the limit of the task
    films: str = ""  # dataset with the initial frames of episodes; empty: initial states of the task
    support: str = ""  # dataset or file of `OODDetector.save` that ends out-of-distribution episodes
    support_penalty: NonNegative = 25.0  # subtracted from the reward at that end, as term "outside"


@dataclass(frozen=True)
class SimOptions:
    """Options of a simulator; a task raises a `UserError` for options that it does not support."""

    num_envs: int = 16
    backend: str = (
        "auto"  # auto | mujoco | mujoco-exact | warp | envpool | gymnasium | ... ; auto is the default of the task
    )
    device: str = "cpu"  # of the simulation, in backends that support devices
    cameras: tuple[str, ...] = ()  # cameras to render into observations `image.<camera>`
    image_size: int = 64  # pixels, square
    point_clouds: tuple[str, ...] = ()  # cameras whose depth becomes observations `point_cloud.<camera>`
    points: int = 256  # of each cloud
    reward: str = "sparse"  # sparse | shaped, where the task has both
    threads: int = 0  # physics threads; 0 is one per core
    exact_final_obs: bool = True  # where it costs time (mjlab, Isaac Lab): return last observations of episodes
    wrappers: tuple[WrapperSpec, ...] = ()  # wrappers around the simulator, in any order
    success_step: str = "any"  # steps whose success an evaluation counts: any | last
    ends_on_success: bool = True  # False: continue, where the simulator can; `info["ended"]` is true at such steps
    held_out: bool = True  # of tasks that split their problems: those for evaluation; False: those for training
    world: WorldOptions = WorldOptions()  # only for the backend `worldmodel:FOLDER`

    def reject_cameras(self, task: str) -> None:
        """Raise a `UserError` if cameras or point clouds are requested, for tasks without cameras."""
        if self.cameras or self.point_clouds:
            raise UserError(f"Task {task} has no cameras; remove them.")


def observation_options(observations: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Fields of `SimOptions` for the observations of several policies `{key: shape per step}`.

    Raises:
        UserError: The policies need images or clouds of different sizes, or different options of one wrapper.
    """
    from robopolicy.nets.encoder import CLOUD_PREFIX
    from robopolicy.sim.wrappers.registry import wrappers_for

    options: dict[str, Any] = {}
    kinds = ((IMAGE_PREFIX, "cameras", "image_size", -1), (CLOUD_PREFIX, "point_clouds", "points", 0))
    for prefix, names, size, axis in kinds:
        found = [
            (key, shape[axis]) for shapes in observations for key, shape in shapes.items() if key.startswith(prefix)
        ]
        sizes = sorted({number for _, number in found})
        own = [{shape[axis] for key, shape in shapes.items() if key.startswith(prefix)} for shapes in observations]
        if len(sizes) > 1 and all(len(each) < 2 for each in own):  # one policy with several sizes fits a fixed task
            raise UserError(f"The policies need '{prefix}*' of different sizes {sizes}; evaluate them separately.")
        if found:
            options |= {names: tuple(sorted({key.removeprefix(prefix) for key, _ in found})), size: sizes[0]}
    if wrappers := wrappers_for(observations):
        options["wrappers"] = wrappers
    return options


class Expert(Protocol):
    """Scripted demonstrator. Called once per control step; `sim.episode_step == 0` marks new episodes."""

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
    requires: str = ""  # extra to install; empty if the core is sufficient
    module: str = ""  # module of that extra, if its name differs from the extra
    success_fn: Callable[[Observation], Tensor] | None = None  # success `(N,)` bool of observations, if available
    success: str = "any"  # key of `SUCCESS`
    chunk: tuple[int, int] = (8, 4)  # actions per chunk and executed ones, by default, of policies that imitate
    nominal: str = ""  # name of the same task without randomization, if this one is randomized for training

    def require_expert(self) -> Callable[[], Expert]:
        """Return `make_expert`; raise a `UserError` if the task has no expert."""
        if self.make_expert is None:
            raise UserError(
                f"Task {self.name} has no scripted expert; 'robopolicy list tasks' lists the tasks with an expert."
            )
        return self.make_expert


@dataclass(frozen=True)
class TaskFamily:
    """Tasks named `prefix/<id>`, built on request."""

    make_entry: Callable[[str], TaskEntry]  # from an id
    description: str  # one line
    requires: str = ""  # as in `TaskEntry`
    module: str = ""  # as in `TaskEntry`


_TASKS: dict[str, TaskEntry] = {}
_FAMILIES: dict[str, TaskFamily] = {}
_RENAMED: dict[str, str] = {}  # former name of a task -> its name and the reason
_PACKAGES: dict[str, str] = {}  # tasks of other packages -> package


def register(entry: TaskEntry) -> None:
    """Register a task under a new name."""
    if entry.name in _TASKS:
        raise ValueError(f"Task '{entry.name}' is already registered.")
    _TASKS[entry.name] = entry


def register_renamed(former: str, name: str, reason: str) -> None:
    """Register the `former` name of the task `name`; using it raises a UserError with both and the `reason`."""
    _RENAMED[former] = f"{name}: {reason}"


def register_family(prefix: str, family: TaskFamily) -> None:
    """Register tasks `prefix/<id>`."""
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
    """Sorted ids of the registered tasks and the tasks of contrib."""
    _register_installed()
    return sorted({*_TASKS, *contributed("tasks")})


def task_families() -> dict[str, TaskFamily]:
    """Families by prefix, sorted: registered families, and one per backend that runs environments by id."""
    _register_installed()
    families = _FAMILIES | {name: _backend_family(name) for name in BACKENDS if BACKENDS[name].by_id}
    return dict(sorted(families.items()))


def _backend_family(backend: str) -> TaskFamily:
    row = BACKENDS[backend]
    description = f"Any task of {backend} by its id in {backend}."
    return TaskFamily(lambda name: backend_entry(backend, name), description, requires=row.extra, module=row.module)


def backend_entry(backend: str, environment: str, name: str = "", description: str = "") -> TaskEntry:
    """Entry of a task that runs an environment of another library on a backend with `by_id`.

    `name` is the id of the task, by default `BACKEND/ENVIRONMENT`.
    """
    name = name or f"{backend}/{environment}"
    row = BACKENDS[backend]

    def make(options: SimOptions) -> VectorSim:
        return check_cameras(row.maker()(environment, options, task=name), options)

    description = description or f"{environment} of {backend}."
    return TaskEntry(name, make, description, backends=(backend,), requires=row.extra, module=row.module)


def check_cameras(sim: VectorSim, options: SimOptions) -> VectorSim:
    """Return `sim` if it observes the requested cameras and point clouds; else close it and raise a `UserError`."""
    from robopolicy.nets.encoder import CLOUD_PREFIX

    requested = [IMAGE_PREFIX + camera for camera in options.cameras]
    requested += [CLOUD_PREFIX + camera for camera in options.point_clouds]
    if not set(requested) <= set(sim.spec.observation):
        sim.close()
        raise UserError(f"Task {sim.spec.task} has fixed observations and cannot add cameras; remove them.")
    return sim


def get_task(name: str) -> TaskEntry:
    """Look up a task by its id, or by a unique last part such as "lift"; `none` is a dataset without a simulator."""
    if name == NO_TASK:
        return TaskEntry(NO_TASK, _no_simulator, "A dataset, without a simulator.", backends=())
    names = task_names()
    if name in _RENAMED:
        raise UserError(f"Task {name} is now {_RENAMED[name]}")
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


def task_label(name: str) -> str:
    """Label of a task in names of files: its last part, after its family where another task may have the same one.

    Tasks of a family that runs environments by their id always have the family: gymnasium/Ant-v5 is gymnasium_Ant-v5.
    """
    family, last = name.partition("/")[0], name.rsplit("/", 1)[-1]
    unique = [task for task in task_names() if task.rsplit("/", 1)[-1] == last] == [name]
    return last if unique or last == name else f"{family}_{last}"


def _no_simulator(options: SimOptions) -> VectorSim:
    raise UserError(
        f"Task {NO_TASK} is a dataset and has no simulator; compare policies with recorded actions by 'robopolicy eval "
        "CKPT --dataset FOLDER', or estimate returns by 'robopolicy ope'."
    )


def task_ring(name: str) -> str:
    """Origin of a task: "product", a theme of contrib, or an installed package."""
    return _PACKAGES.get(name, PRODUCT) if name in _TASKS else contributed("tasks")[name][0]


def _contributed_task(name: str) -> TaskEntry:
    """Entry of a row of `theme.toml`; its functions are imported when they are called."""
    row: dict[str, Any] = contributed("tasks")[name][1]
    fields = row | {"name": name, "make_expert": row.get("expert"), "backends": tuple(row.get("backends", ("mujoco",)))}
    fields |= {"chunk": tuple(row["chunk"])} if "chunk" in row else {}
    fields |= {key: _imported(fields.get(key)) for key in ("make", "make_expert", "success_fn")}
    return TaskEntry(**{key: value for key, value in fields.items() if key != "expert"})


def _imported(target: str | None) -> Callable[..., Any] | None:
    """Function at "module:attribute", imported when it is called."""
    return None if target is None else lambda *args: load(target)(*args)


def make_sim(name: str, options: SimOptions | None = None) -> VectorSim:
    """Build the simulator of a task."""
    options = options or SimOptions()
    entry = get_task(name)
    if options.num_envs < 1:
        raise UserError(f"The number of environments must be at least 1, got {options.num_envs}.")
    if options.backend not in ("auto", *entry.backends):
        raise _unsupported(entry, options.backend)
    if options.world != WorldOptions():
        raise UserError("World-model settings such as a judge need --backend worldmodel:FOLDER.")
    if options.reward not in REWARDS:
        raise unknown_name("reward", options.reward, REWARDS, f"of task {entry.name}")
    from robopolicy.sim.wrappers.registry import wrap

    sim = wrap(entry.make(options), options.wrappers)
    sim.spec = replace(sim.spec, success_step=options.success_step)
    return sim


def _unsupported(entry: TaskEntry, backend: str) -> UserError:
    """Error for a backend that a task does not run on."""
    if backend not in BACKENDS:
        return unknown_name("backend", backend, ("auto", *entry.backends), f"of task {entry.name}")
    reason = BACKENDS[entry.backends[0]].without_warp if backend == "warp" and entry.backends[0] in BACKENDS else ""
    because = f" because {reason}" if reason else ""
    return UserError(
        f"Task {entry.name} does not run on backend '{backend}'{because}; choose {', '.join(entry.backends)}."
    )
