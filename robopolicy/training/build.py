"""From a configuration to the objects of a run: policy, algorithm, source of data, evaluation simulator."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.core.distributed import rank, world_size
from robopolicy.critics.value import ValueNet
from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.device import usable_device
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import fill_defaults, to_dict
from robopolicy.sim.backends import all_lockstep
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.registry import WorldOptions, get_task, observation_options, task_names
from robopolicy.spec import HIDDEN_STATE
from robopolicy.text.policy import TextPolicy
from robopolicy.text.sft import TextLearner
from robopolicy.training.config import TaskConfig, TrainConfig, section
from robopolicy.training.distributed import check_distributed
from robopolicy.training.learner import build_learner, eval_simulator, simulator
from robopolicy.training.make_source import DataSource, make_source
from robopolicy.training.manifest import read_manifest
from robopolicy.training.world_sims import is_world

OUT_OF_BOUNDS_WARN = 0.05  # share of actions outside the bounds that raises a doubt about a dataset


@dataclass
class RunComponents:
    """Everything a run consists of."""

    config: TrainConfig  # with every default and name filled in
    policy: Policy  # as it was before training
    algorithm: Algorithm
    source: DataSource
    eval_sim: VectorSim | None
    total_updates: int

    def close(self) -> None:
        """Stop the simulators."""
        self.source.close()
        if self.eval_sim is not None:
            self.eval_sim.close()


def resolve_config(config: TrainConfig) -> TrainConfig:
    """Fill in what follows from the starting checkpoint, the dataset and the names.

    Raises:
        UserError: The pieces do not belong together or one is missing.
    """
    algorithm, settings = section("algorithm", config.algorithm)
    if (config.budget.updates > 0) == (config.budget.env_steps > 0):
        raise UserError(
            "Set exactly one of budget.updates and budget.env_steps, and leave the other 0, e.g. budget.updates=5000."
        )
    if config.worldmodel != WorldOptions() and not any(map(is_world, (config.sim.backend, config.evaluation.backend))):
        raise UserError("Settings of worldmodel.* need a world model; set sim.backend=worldmodel:FOLDER.")
    task = config.task.name
    if config.init_from:
        manifest = read_manifest(Path(config.init_from))
        spec = manifest.policy_spec
        chunk = replace(
            config.chunk, horizon=spec.horizon, action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon
        )
        with fill_defaults():  # loading the checkpoint tells whether the defaults fit
            name, policy = section("policy", {**manifest.config, "name": manifest.policy})
        config = replace(config, policy={**to_dict(policy), "name": name}, chunk=chunk)
        config = replace(config, task=_with_views(config.task, spec))
        task = task or manifest.task
    if not config.init_from and (wanted := ALGORITHMS[algorithm].init_hint(settings)):
        raise UserError(f"Algorithm '{algorithm}' starts from a trained policy; pass {wanted}.")
    budget, replay = config.budget, config.replay
    ALGORITHMS[algorithm].check_settings(
        dataset=config.dataset, env_steps=budget.env_steps, offline_updates=replay.offline_updates
    )
    check_distributed(config)
    if config.dataset:
        task = task or episodes_of(config.dataset).tasks[0]
    if not task:
        raise UserError("No task is given; pass e.g. task=lift ('robopolicy list tasks' shows all).")
    task = get_task(task).name
    plays = _plays(config, ALGORITHMS[algorithm].data_source) and not is_world(config.sim.backend)
    if plays and all_lockstep(get_task(task).backends):
        _check_one_action(config, task)
    _check_text(task, str(config.policy["name"]), algorithm)
    name = config.name or f"{task.rsplit('/', 1)[-1]}_{config.policy['name']}_{algorithm}_seed{config.seed}"
    return replace(config, task=replace(config.task, name=task), name=name)


def _check_one_action(config: TrainConfig, task: str) -> None:
    """Refuse chunks of several actions, for a task whose environments cannot stand still one by one."""
    action_horizon = config.chunk.action_horizon
    if action_horizon > 1:
        todo = "start from a policy of one action" if config.init_from else "set chunk.horizon=1 chunk.action_horizon=1"
        raise UserError(
            f"Task {task} moves all its environments together, so it cannot play chunks of {action_horizon} "
            f"actions; {todo}."
        )


def _check_text(task: str, policy: str, algorithm: str) -> None:
    """Refuse text without what writes it, and what writes text where a robot is to act."""
    writes = (issubclass(POLICIES[policy], TextPolicy), issubclass(ALGORITHMS[algorithm], TextLearner))
    if "text" in get_task(task).backends:
        if not all(writes):
            raise UserError(
                f"Task {task} speaks text; choose policy=text with algorithm=text_recipe or text_sft, not "
                f"policy '{policy}' with algorithm '{algorithm}'."
            )
    elif any(writes):
        raise UserError(
            f"Task {task} is no text; choose a task such as text/arithmetic, or a policy and an algorithm of robots, "
            f"e.g. policy=flow algorithm=bc, not policy '{policy}' with algorithm '{algorithm}'."
        )


def _with_views(task: TaskConfig, spec: PolicySpec) -> TaskConfig:
    """What the starting policy sees besides vectors, such as images, unless other views or wrappers are named."""
    named = (task.cameras, task.point_clouds, task.wrappers)
    return task if any(named) else replace(task, **observation_options([spec.observation]))


def _plays(config: TrainConfig, data_source: str) -> bool:
    """Whether training needs a simulator."""
    offline = data_source == "replay" and 0 < config.budget.updates <= config.replay.offline_updates
    return data_source != "dataset" and not offline


@lru_cache(maxsize=1)
def episodes_of(path: str) -> Episodes:
    """The dataset, read once although both `resolve_config` and `build` look at it."""
    return read_lerobot(path).without_closing_frames()


def seed_everything(config: TrainConfig) -> None:
    """Seed every global generator and fix what else results depend on."""
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    if config.device != "cpu":  # on the CPU a fixed number of threads suffices
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build(config: TrainConfig, start: Path | None = None) -> RunComponents:
    """Build a completed configuration.

    Args:
        config: Result of `resolve_config`.
        start: Checkpoint with the initial policy instead of `init_from`; a resumed run passes its own.

    Raises:
        UserError: Dataset, checkpoint, simulator and policy do not fit each other.
    """
    seed_everything(config)
    device = usable_device(config.device)
    name, settings = section("algorithm", config.algorithm)
    data_source = ALGORITHMS[name].data_source
    episodes = episodes_of(config.dataset) if config.dataset else None
    episodes_of.cache_clear()
    judges = config.evaluation.episodes > 0 and rank() == 0
    # Networks start alike in all processes, whatever their simulators draw.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        eval_sim = eval_simulator(config) if judges else None
        train_sim = simulator(config, config.sim.num_envs // world_size()) if _plays(config, data_source) else None
    if train_sim is not None and not train_sim.spec.supports_masked_step:
        _check_one_action(config, train_sim.spec.task)
    sim = _spec(config, train_sim or eval_sim, data_source)
    if episodes is not None and sim is not None:
        _check_dataset(episodes, sim, config.dataset)
    policy, algorithm, updates = build_learner(config, episodes, sim, device, start)
    if episodes is not None:
        check_dataset_for_policy(episodes, policy.spec, f"dataset {config.dataset}")
    if sim is not None:
        _check_critics(algorithm, sim)
        algorithm.attach_symmetry(sim.mirror)
    source = make_source(config, policy.spec, algorithm, settings, episodes, train_sim, device)
    return RunComponents(config, policy, algorithm, source, eval_sim, updates)


def _spec(config: TrainConfig, sim: VectorSim | None, data_source: str) -> SimSpec | None:
    """Specification of the task; replay needs its action bounds even without a simulator."""
    if sim is None and data_source == "replay":
        sim = simulator(config, 1)
        sim.close()
    return None if sim is None else sim.spec


def _check_critics(algorithm: Algorithm, sim: SimSpec) -> None:
    """Refuse a critic that is told to see what the simulator does not show."""
    memory = {HIDDEN_STATE: (algorithm.policy.spec.hidden_dim,)} if algorithm.policy.spec.hidden_dim else {}
    shown = {key: tuple(entry.shape) for key, entry in sim.observation.items()} | memory
    for net in algorithm.checkpoint_items().values():
        for key, shape in net.observation.items() if isinstance(net, ValueNet) else ():
            found = shown.get(key, "nothing")
            if found != tuple(shape):
                raise UserError(f"The critic is to see '{key}' of shape {tuple(shape)}; {sim.task} shows {found}.")


def _check_dataset(episodes: Episodes, sim: SimSpec, path: str) -> None:
    wanted = {key: tuple(spec.shape) for key, spec in sim.observation.items()} | {"action": (sim.action_dim,)}
    for key, shape in wanted.items():
        if key not in episodes.arrays:
            raise UserError(f"Dataset {path} lacks '{key}', which {sim.task} needs; collect it again with that key.")
        found = tuple(episodes.arrays[key].shape[1:])
        if found != shape:
            todo = "choose the task it was recorded on"
            if is_image(key):
                todo = f"set task.image_size={found[-1]}"
            elif is_cloud(key):
                todo = f"set task.points={found[0]}"
            raise UserError(f"'{key}' of dataset {path} has shape {found}, but {sim.task} has {shape}; {todo}.")
    # Whole-number frame rates round the control step a little.
    if not math.isclose(episodes.control_dt, sim.control_dt, rel_tol=0.05):
        raise UserError(
            f"Dataset {path} was recorded every {episodes.control_dt:g} s, but {sim.task} acts every "
            f"{sim.control_dt:g} s; collect it again."
        )
    _warn_of_other_task(episodes, sim, path)


def _warn_of_other_task(episodes: Episodes, sim: SimSpec, path: str) -> None:
    """Say so if the data are of another task, or act beyond the bounds of this one; mixing may be what is wanted."""
    known = set(task_names())
    others = sorted({task for task in episodes.tasks if task in known and task != sim.task})
    if others and sim.task not in episodes.tasks:
        warnings.warn(f"Dataset {path} was recorded on {others[0]}, and this run plays {sim.task}.", stacklevel=2)
    action = episodes.arrays["action"]
    low, high = sim.action_low.cpu().numpy(), sim.action_high.cpu().numpy()
    slack = 0.01 * (high - low)
    beyond = ((action < low - slack) | (action > high + slack)).any(-1).mean()
    if beyond > OUT_OF_BOUNDS_WARN:
        warnings.warn(
            f"{beyond:.0%} of the actions of dataset {path} lie outside the bounds of {sim.task}; is it of that task?",
            stacklevel=2,
        )


def check_dataset_for_policy(episodes: Episodes, policy: PolicySpec, what: str) -> None:
    """Refuse episodes of other shapes than those of a policy.

    Args:
        episodes: What it is to learn from.
        policy: What it sees and does.
        what: How the episodes are called, for the message.

    Raises:
        UserError: They lack something, or have it in another shape.
    """
    wanted = {**policy.observation, "action": (policy.action_dim,)}
    for key, shape in wanted.items():
        found = tuple(episodes.arrays[key].shape[1:]) if key in episodes.arrays else None
        if found != tuple(shape):
            raise UserError(
                f"The policy needs '{key}' of shape {tuple(shape)}, but {what} has "
                f"{found or 'no such key'}; pass the dataset of its own task."
            )
