"""Configuration of a training run; the dataclasses are both schema and help.

`configs/*.yaml` only select and override. The sections `policy` and `algorithm` contain the config of the chosen policy
or algorithm plus its `name`; `compose.py` composes the configuration of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, OpenFraction, PositiveInt, Range, Validated
from robopolicy.data.goals import HindsightConfig
from robopolicy.device import GPUConfig
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.wrappers.relative_poses import PoseConfig
from robopolicy.schema import from_dict
from robopolicy.sim.registry import SUCCESS_STEPS, WorldOptions
from robopolicy.sim.wrappers.registry import WrapperSpec
from robopolicy.spec import MAX_HORIZON

Horizon = Annotated[int, Range(0, MAX_HORIZON)]
FINAL_OBS = ("auto", "exact", "previous")


@dataclass(frozen=True)
class TaskConfig(Validated):
    """Task."""

    name: str = ""  # registered task, or none: the dataset alone; empty: the task of the checkpoint or the dataset
    reward: str = "sparse"  # sparse | shaped, where the task has both
    cameras: tuple[str, ...] = ()  # cameras of the policy's images
    image_size: PositiveInt = 64  # pixels, square
    point_clouds: tuple[str, ...] = ()  # cameras of the policy's point clouds
    points: PositiveInt = 256  # points per cloud
    wrappers: tuple[WrapperSpec, ...] = ()  # simulator wrappers, each NAME or {name: NAME, OPTION: VALUE}
    action_representation: str = "absolute"  # absolute | delta | relative actions in a new policy that imitates
    absolute_entries: tuple[str, ...] = ()  # entries that are no differences, e.g. [gripper], by name or number
    poses: tuple[PoseConfig, ...] = ()  # poses of relative actions, each {position: [x, y, z], rotation: [...]}
    obs_keys: tuple[str, ...] = ()  # observation keys of a new policy, e.g. [image.front]; empty: all


@dataclass(frozen=True)
class SimConfig(Validated):
    """Simulation."""

    num_envs: PositiveInt = 16  # parallel environments
    backend: str = "auto"  # auto | mujoco | mujoco-exact | warp | envpool | gymnasium | worldmodel:FOLDER | ...
    threads: NonNegativeInt = 0  # physics threads; 0 is one per core
    num_workers: NonNegativeInt = 0  # processes with the environments of an algorithm with replay; 0: this process
    worker_backend: str = "process"  # process | ray, workers on this machine or in a cluster
    weights_every: PositiveInt = 1  # updates after which the workers receive new weights
    final_obs: str = "auto"  # last observations in mjlab, Isaac Lab: auto | exact | previous (faster on a device)
    overlap: Annotated[int, Range(0, 1)] = 0  # 1: collect the next data during an update, with the weights before it


@dataclass(frozen=True)
class ChunkConfig(Validated):
    """Size of an action chunk."""

    horizon: Horizon = 0  # actions per chunk; 0: 1 for explicit policies from scratch, else as the task suggests
    action_horizon: NonNegativeInt = 0  # actions executed before the next decision; 0: as for horizon
    obs_horizon: Annotated[int, Range(1, MAX_HORIZON)] = 1  # observations per decision


@dataclass(frozen=True)
class BudgetConfig(Validated):
    """Budget; set exactly one."""

    updates: NonNegativeInt = 0  # calls of the algorithm's update
    env_steps: NonNegativeInt = 0  # most control steps of all environments together


@dataclass(frozen=True)
class ReplayConfig(Validated):
    """Size and schedule of the replay buffer."""

    capacity: PositiveInt = 1_000_000  # control steps
    learning_starts: NonNegativeInt = 5_000  # control steps of all environments before the first gradient step
    offline_updates: NonNegativeInt = 0  # first updates, of one gradient step each on the dataset only
    offline_fraction: Fraction | None = 0.5  # of the dataset in every later batch; null: as in both buffers together
    prioritized: Fraction = 0.0  # exponent of prioritised sampling; 0 is uniform
    device: str = "auto"  # of the buffers; auto: the device of the run, or the CPU where they do not fit
    noise_repeat: PositiveInt = 1  # most decisions with the same exploration noise of sac and td3 (FlashSAC: 16)
    hindsight: HindsightConfig = field(default_factory=HindsightConfig)  # goals in hindsight for tasks with goals (HER)
    return_max: NonNegative = 0.0  # scale rewards so that returns stay within it (FlashSAC, without dataset); 0: off


@dataclass(frozen=True)
class EvaluationConfig(Validated):
    """Periodic evaluation, by the same code as `robopolicy eval`."""

    every: NonNegativeInt = 0  # updates between evaluations; 0 is a tenth of the budget, or more within max_fraction
    episodes: NonNegativeInt = 100  # episodes of the last evaluation, and at most of the others; 0 disables evaluation
    max_fraction: NonNegative = 0.2  # most control steps before the last evaluation per one of training; 0: no limit
    seed: NonNegativeInt = 10_000  # first episode seed; training episodes start at a million
    num_envs: PositiveInt = 32  # parallel environments; does not change the result
    success_step: str = "any"  # steps of an episode whose success counts: any | last (protocol of Fetch)
    held_out: OpenFraction = 0.1  # of the episodes of the dataset, not trained on, to evaluate with task=none
    backend: str = ""  # simulator; empty: the training backend, or the task's own if that is a world model


@dataclass(frozen=True)
class LoggingConfig(Validated):
    """Loggers in addition to metrics.jsonl and metrics.csv."""

    every: NonNegativeInt = 0  # updates between rows; 0 is a hundredth of the budget
    tensorboard: bool = False  # also write TensorBoard events
    wandb: bool = False  # also write to Weights & Biases, offline unless WANDB_MODE is set
    trackio: bool = False  # also write to Trackio, locally unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set
    project: str = "robopolicy"  # project in Weights & Biases and Trackio


@dataclass(frozen=True)
class GuardConfig:
    """Safeguards."""

    finite: bool = True  # stop at the first NaN or infinity and name it
    restore_best: bool = True  # RL: restore the best after a collapse, and the base if it is better than the best


@dataclass(frozen=True)
class TrainConfig(Validated):
    """One training run."""

    policy: dict[str, Any] = field(default_factory=dict)  # name and settings; init_from takes precedence
    algorithm: dict[str, Any] = field(default_factory=dict)  # name and settings
    task: TaskConfig = TaskConfig()
    sim: SimConfig = SimConfig()
    worldmodel: WorldOptions = field(default_factory=WorldOptions)  # used if a backend is a world model
    chunk: ChunkConfig = ChunkConfig()  # init_from takes precedence
    budget: BudgetConfig = BudgetConfig()
    replay: ReplayConfig = ReplayConfig()  # used by algorithms that learn from replay
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    guards: GuardConfig = GuardConfig()
    dataset: str = ""  # demonstrations, or offline data of the replay buffer: of any format, or a mapping file
    init_from: str = ""  # initial checkpoint; sets policy, chunk size and the task unless named
    checkpoint_every: NonNegativeInt = 0  # updates between resume points; 0 is a tenth of the budget
    seed: NonNegativeInt = 0  # seed of weights, minibatches, exploration and episodes
    device: str = "auto"  # device of the networks, and of the physics in GPU backends; auto: the GPU if there is one
    gpu: GPUConfig = field(default_factory=GPUConfig)
    threads: PositiveInt = 1  # torch threads; small networks are fastest with one, and results depend on it
    out: str = "runs"  # parent folder
    name: str = ""  # run folder; empty: composed of task, policy, algorithm and seed


def section(kind: str, values: dict[str, Any]) -> tuple[str, Any]:
    """Return name and config object of the `policy` or `algorithm` section."""
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
    """Raise a UserError if a non-empty name of a run is not a plain folder name."""
    if name and (Path(name).name != name or name == ".." or "\0" in name or not name.strip()):
        raise UserError(f"name must be a plain folder name, got '{name}'; set its parent folder with out=FOLDER.")


def check_settings(config: TrainConfig) -> None:
    """Raise a UserError for settings that are incompatible, or invalid for the chosen policy or algorithm."""
    if config.chunk.action_horizon > config.chunk.horizon > 0:
        raise UserError(
            f"chunk.action_horizon must not exceed chunk.horizon, got {config.chunk.action_horizon} > "
            f"{config.chunk.horizon}."
        )
    if config.name == "null":
        raise UserError("name=null is not a name; omit name to have it composed.")
    check_run_name(config.name)
    representation, kinds = config.task.action_representation, ("absolute", "delta", "relative")
    if representation not in kinds:
        raise unknown_name("value", representation, kinds, "of task.action_representation")
    if representation == "absolute" and config.task.absolute_entries:
        raise UserError("task.absolute_entries has no effect on absolute actions; set task.action_representation too.")
    if representation != "relative" and config.task.poses:
        raise UserError("task.poses are relative to the measured pose; set task.action_representation=relative.")
    if representation != "absolute" and config.init_from:
        raise UserError("The representation of actions comes from the checkpoint; drop task.action_representation.")
    if config.sim.final_obs not in FINAL_OBS:
        raise unknown_name("value", config.sim.final_obs, FINAL_OBS, "of sim.final_obs")
    if config.evaluation.success_step not in SUCCESS_STEPS:
        raise unknown_name("value", config.evaluation.success_step, SUCCESS_STEPS, "of evaluation.success_step")
    section("policy", config.policy)
    section("algorithm", config.algorithm)
