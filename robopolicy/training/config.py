"""The configuration of a training run: these dataclasses are the schema and the help.

`configs/*.yaml` only selects and overrides. The `policy` and `algorithm` sections are those of the chosen policy and
algorithm, plus their `name`; `compose.py` puts a run's configuration together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.constraints import Fraction, NonNegativeInt, PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import from_dict
from robopolicy.sim.registry import WorldOptions
from robopolicy.sim.wrappers.registry import WrapperSpec


@dataclass(frozen=True)
class TaskConfig(Validated):
    """What to solve."""

    name: str = ""  # registered task; empty takes it from the checkpoint or the dataset
    reward: str = "sparse"  # sparse | shaped, where the task has both
    cameras: tuple[str, ...] = ()  # cameras the policy sees
    image_size: PositiveInt = 64  # pixels, square
    point_clouds: tuple[str, ...] = ()  # cameras whose point clouds the policy sees
    points: PositiveInt = 256  # of each cloud
    wrappers: tuple[WrapperSpec, ...] = ()  # simulator wrappers, each NAME or {name: NAME, OPTION: VALUE}
    obs_keys: tuple[str, ...] = ()  # observation keys of a new policy, e.g. [image.front]; empty: all


@dataclass(frozen=True)
class SimConfig(Validated):
    """How to simulate it."""

    num_envs: PositiveInt = 16  # parallel environments
    backend: str = "auto"  # auto | mujoco | mujoco-exact | warp | envpool | gymnasium | worldmodel:FOLDER | ...
    threads: NonNegativeInt = 0  # physics threads; 0 is one per core


@dataclass(frozen=True)
class ChunkConfig(Validated):
    """Shape of a decision."""

    horizon: PositiveInt = 8  # actions per chunk
    action_horizon: PositiveInt = 4  # actions executed before the next decision
    obs_horizon: PositiveInt = 1  # observations per decision


@dataclass(frozen=True)
class BudgetConfig(Validated):
    """When to stop; set exactly one."""

    updates: NonNegativeInt = 0  # calls of the algorithm's update
    env_steps: NonNegativeInt = (
        0  # control steps of all environments together, every chunk counted as if played in full
    )


@dataclass(frozen=True)
class ReplayConfig(Validated):
    """Memory and schedule of the algorithms that learn from replay."""

    capacity: PositiveInt = 1_000_000  # control steps kept
    learning_starts: NonNegativeInt = (
        5_000  # control steps of all environments collected before the first gradient step
    )
    offline_updates: NonNegativeInt = (
        0  # first updates, of one gradient step each, on the dataset alone; budget.updates: all
    )
    offline_fraction: Fraction = 0.5  # fraction of the dataset in every later batch; 0 without a dataset
    prioritized: Fraction = 0.0  # exponent of prioritised sampling; 0 is uniform


@dataclass(frozen=True)
class EvaluationConfig(Validated):
    """Periodic evaluation, by the same code as `robopolicy eval`."""

    every: NonNegativeInt = 0  # updates between evaluations; 0 is a tenth of the budget
    episodes: NonNegativeInt = 100  # episodes each time; 0 never evaluates
    seed: NonNegativeInt = 10_000  # first episode seed; training episodes start at a million
    num_envs: PositiveInt = 32  # parallel environments; does not change the result
    backend: str = ""  # simulator; empty: that of training, or the task's own where that is a world model


@dataclass(frozen=True)
class LoggingConfig(Validated):
    """Where numbers go besides metrics.jsonl and metrics.csv."""

    every: NonNegativeInt = 0  # updates between rows; 0 is a hundredth of the budget
    tensorboard: bool = False  # also write TensorBoard events
    wandb: bool = False  # also write to Weights & Biases, offline unless WANDB_MODE says otherwise
    project: str = "robopolicy"  # project in Weights & Biases


@dataclass(frozen=True)
class GuardConfig:
    """Guard rails."""

    finite: bool = True  # stop at the first NaN or infinity and name it
    restore_best: bool = True  # except when imitating: the best after a collapse, the base if the best falls short


@dataclass(frozen=True)
class TrainConfig(Validated):
    """One training run."""

    policy: dict[str, Any] = field(default_factory=dict)  # name and settings; those of init_from win
    algorithm: dict[str, Any] = field(default_factory=dict)  # name and settings
    task: TaskConfig = TaskConfig()
    sim: SimConfig = SimConfig()
    worldmodel: WorldOptions = field(default_factory=WorldOptions)  # used where a backend is a world model
    chunk: ChunkConfig = ChunkConfig()  # that of init_from wins
    budget: BudgetConfig = BudgetConfig()
    replay: ReplayConfig = ReplayConfig()  # used by algorithms that learn from replay
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    guards: GuardConfig = GuardConfig()
    dataset: str = ""  # folder of demonstrations: all there is to learn from, or the offline part of the replay
    init_from: str = ""  # checkpoint to start from; gives policy, chunk shape and, unless named, the task
    checkpoint_every: NonNegativeInt = 0  # updates between resume points; 0 is a tenth of the budget
    seed: NonNegativeInt = 0  # of weights, minibatches, exploration and episodes
    device: str = "cpu"  # where networks run, and physics in the backends that run on a GPU
    threads: PositiveInt = 1  # torch threads; small networks are fastest with one, and results depend on it
    out: str = "runs"  # parent folder
    name: str = ""  # run folder; empty composes it from task, policy, algorithm and seed


def section(kind: str, values: dict[str, Any]) -> tuple[str, Any]:
    """Name and config object of the `policy` or `algorithm` section."""
    registry = {"policy": POLICIES, "algorithm": ALGORITHMS}[kind]
    settings = dict(values)
    name = settings.pop("name", "")
    if name not in registry:
        raise unknown_name(kind, str(name), registry)
    try:
        return name, from_dict(registry[name].config_class, settings, kind)
    except ValueError as error:
        raise UserError(f"{kind}: {error}") from error


def check_run_name(name: str) -> None:
    """Refuse names of runs that would lie elsewhere.

    Raises:
        UserError: It is no plain folder name, nor empty.
    """
    if name and (Path(name).name != name or name == ".." or "\0" in name or not name.strip()):
        raise UserError(f"name must be a plain folder name, got '{name}'; out=FOLDER says where it lies.")


def check_settings(config: TrainConfig) -> None:
    """Refuse settings that do not fit each other, and those of a policy or algorithm that it does not have or take.

    Raises:
        UserError: Names the first such setting.
    """
    if config.chunk.action_horizon > config.chunk.horizon:
        raise UserError(
            f"chunk.action_horizon must not exceed chunk.horizon, got {config.chunk.action_horizon} > "
            f"{config.chunk.horizon}."
        )
    if config.name == "null":
        raise UserError("name=null names no run; leave name out to have it composed.")
    check_run_name(config.name)
    section("policy", config.policy)
    section("algorithm", config.algorithm)
