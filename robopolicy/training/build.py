"""Construction of a run's objects from a configuration: policy, algorithm, data source and evaluation simulator."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.core.distributed import rank, world_size
from robopolicy.critics.value import ValueNet
from robopolicy.data.compatibility import (
    check_dataset,
    check_dataset_for_metadata,
    check_dataset_for_policy,
    recorded_metadata,
    recorded_spec,
    warn_of_outliers,
)
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats import read_dataset
from robopolicy.data.selection import split_indices
from robopolicy.device import device_name, usable_device
from robopolicy.errors import UserError
from robopolicy.evaluation.action_error import HeldOut
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.wrappers.relative_actions import RelativeActionPolicy
from robopolicy.schema import fill_defaults, reject_unused, to_dict
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.registry import NO_TASK, WorldOptions, get_task, observation_options, task_label
from robopolicy.spec import HIDDEN_STATE, PolicySpec, TaskMetadata
from robopolicy.text.policy import TextPolicy
from robopolicy.text.sft import TextLearner
from robopolicy.training.config import ChunkConfig, TaskConfig, TrainConfig, section
from robopolicy.training.distributed import check_distributed
from robopolicy.training.learner import build_learner, eval_simulator, simulator, steps_per_decision
from robopolicy.training.make_source import SEEDS_PER_RANK, SOURCES, DataSource, make_source
from robopolicy.training.manifest import read_manifest
from robopolicy.training.overlap import check_overlap
from robopolicy.training.remote_replay import check_workers
from robopolicy.training.unused_settings import check_sizes_of_checkpoint, check_unused, check_unused_sizes
from robopolicy.training.world_sims import is_world


@dataclass
class RunComponents:
    """Objects of a run."""

    config: TrainConfig  # resolved: all defaults and names are set
    policy: Policy  # initial policy
    algorithm: Algorithm
    source: DataSource
    eval_sim: VectorSim | None
    total_updates: int
    held_out: HeldOut | None = None  # episodes for the action error, with the task `none`
    task_metadata: TaskMetadata | None = None  # of the dataset, with the task `none`

    def close(self) -> None:
        """Stop the simulators."""
        self.source.close()
        if self.eval_sim is not None:
            self.eval_sim.close()


def resolve_config(config: TrainConfig) -> TrainConfig:
    """Fill in the settings that follow from the initial checkpoint, the dataset and the names.

    Raises:
        UserError: Settings are missing or incompatible.
    """
    config = replace(config, device=device_name(config.device))
    algorithm, settings = section("algorithm", config.algorithm)
    if (config.budget.updates > 0) == (config.budget.env_steps > 0):
        raise UserError(
            "Set exactly one of budget.updates and budget.env_steps, and leave the other 0, e.g. budget.updates=5000."
        )
    if config.worldmodel != WorldOptions() and not any(map(is_world, (config.sim.backend, config.evaluation.backend))):
        raise UserError("Settings of worldmodel.* need a world model; set sim.backend=worldmodel:FOLDER.")
    task = config.task.name
    if task == NO_TASK:
        _check_recorded(config)
    if config.init_from:
        manifest = read_manifest(Path(config.init_from))
        spec = manifest.policy_spec
        shape = {key: getattr(spec, key) for key in ("horizon", "action_horizon", "obs_horizon")}
        with fill_defaults():  # loading the checkpoint verifies the defaults
            name, policy = section("policy", {**manifest.config, "name": manifest.policy})
        config = replace(config, policy={**to_dict(policy), "name": name}, chunk=replace(config.chunk, **shape))
        if task != NO_TASK:  # without a task, the dataset sets the observations
            task_inputs = _with_policy_inputs(config.task, spec)
            check_sizes_of_checkpoint(config.task, task_inputs)
            config = replace(config, task=task_inputs)
        task = task or manifest.task
    if not config.init_from and (hint := ALGORITHMS[algorithm].init_hint(settings)):
        raise UserError(f"Algorithm '{algorithm}' requires a trained policy; pass {hint}.")
    budget, replay = config.budget, config.replay
    ALGORITHMS[algorithm].check_settings(
        dataset=config.dataset, env_steps=budget.env_steps, offline_updates=replay.offline_updates
    )
    check_distributed(config)
    check_overlap(config)
    check_workers(config)
    if config.dataset and not task:
        task = _recorded_task(config)
    if not task:
        raise UserError("No task is given; pass e.g. task=lift ('robopolicy list tasks' prints all).")
    task = get_task(task).name
    config = _shorten_rollouts(replace(config, chunk=resolve_chunk(config, task)))
    _check_text(task, str(config.policy["name"]), algorithm)
    subject = Path(config.dataset).stem if task == NO_TASK else task_label(task)
    name = config.name or f"{subject}_{config.policy['name']}_{algorithm}_seed{config.seed}"
    config = replace(config, task=replace(config.task, name=task), name=name)
    check_unused(config)
    return config


def _recorded_task(config: TrainConfig) -> str:
    """Return the registered task on which the dataset was recorded."""
    task = load_episodes(config.dataset, "", config.task.reward).tasks[0]
    try:
        return get_task(task).name
    except UserError as error:
        raise UserError(
            f"Dataset {config.dataset} was recorded on '{task}', which is no registered task; pass task={NO_TASK} to "
            "learn from the dataset alone, or task=NAME."
        ) from error


def _check_recorded(config: TrainConfig) -> None:
    """Raise a UserError for settings that do not fit a task that exists only as a dataset."""
    name, task, replay = str(config.algorithm["name"]), config.task, config.replay
    if not config.dataset:
        raise UserError(f"task={NO_TASK} learns from a dataset alone; pass dataset=FOLDER.")
    if task.cameras or task.point_clouds or task.wrappers:
        raise UserError(f"task={NO_TASK} has the observations of its dataset; choose among them by task.obs_keys.")
    reject_unused(
        task, "task", f"with task={NO_TASK}, which has the observations of its dataset", "image_size", "points"
    )
    source = ALGORITHMS[name].data_source
    if source == "replay" and not 0 < config.budget.updates <= replay.offline_updates:
        raise UserError(
            f"task={NO_TASK} has no simulator; let '{name}' learn offline by budget.updates=N replay.offline_updates=N."
        )
    if source not in ("replay", "dataset"):
        raise UserError(f"Algorithm '{name}' needs a simulator, which task={NO_TASK} lacks; choose e.g. algorithm=bc.")


def resolve_chunk(config: TrainConfig, task: str) -> ChunkConfig:
    """Fill in the sizes of chunks that are 0.

    An explicit policy without demonstrations decides every step: chunks help to imitate, and from scratch they delay
    feedback. Text policies write one message per decision. Other policies use the sizes of `task`.
    """
    chunk, policy = config.chunk, POLICIES[str(config.policy["name"])]
    from_scratch = issubclass(policy, ExplicitPolicy) and not config.dataset and not config.init_from
    single = from_scratch or issubclass(policy, TextPolicy)
    horizon, action_horizon = (1, 1) if single else get_task(task).chunk
    horizon = chunk.horizon or max(horizon, chunk.action_horizon)
    return replace(chunk, horizon=horizon, action_horizon=chunk.action_horizon or min(action_horizon, horizon))


def _shorten_rollouts(config: TrainConfig) -> TrainConfig:
    """Limit the length of on-policy rollouts to a budget of control steps that is smaller."""
    name, settings = section("algorithm", config.algorithm)
    source, steps = ALGORITHMS[name].data_source, config.budget.env_steps
    if not steps or source == "replay" or SOURCES[source].whole_episodes:
        return config
    longest = steps // steps_per_decision(config)
    if not longest:
        raise UserError(
            f"budget.env_steps={steps} is less than one chunk of all environments, {steps_per_decision(config)} steps; "
            "raise it or lower sim.num_envs."
        )
    return replace(config, algorithm={**config.algorithm, "num_steps": min(settings.num_steps, longest)})


def _check_text(task: str, policy: str, algorithm: str) -> None:
    """Reject a text task without a text policy and algorithm, and vice versa."""
    is_text = (issubclass(POLICIES[policy], TextPolicy), issubclass(ALGORITHMS[algorithm], TextLearner))
    if "text" in get_task(task).backends:
        if not all(is_text):
            raise UserError(
                f"Task {task} is a text task; use policy=text with algorithm=text_recipe or text_sft, not "
                f"policy '{policy}' with algorithm '{algorithm}'."
            )
    elif any(is_text):
        raise UserError(
            f"Task {task} is not a text task; use a task such as text/arithmetic, or a policy and an algorithm for "
            f"robots, e.g. policy=flow algorithm=bc, not policy '{policy}' with algorithm '{algorithm}'."
        )


def _with_policy_inputs(task: TaskConfig, spec: PolicySpec) -> TaskConfig:
    """Add the cameras and point clouds of the initial policy, unless the task names its own or wrappers."""
    named = (task.cameras, task.point_clouds, task.wrappers)
    return task if any(named) else replace(task, **observation_options([spec.observation]))


def _needs_simulator(config: TrainConfig, data_source: str) -> bool:
    """Whether training needs a simulator."""
    offline = data_source == "replay" and 0 < config.budget.updates <= config.replay.offline_updates
    return data_source != "dataset" and not offline


@lru_cache(maxsize=1)
def load_episodes(path: str, task: str, reward: str) -> Episodes:
    """Read the dataset; the result is cached, since both `resolve_config` and `build` use it."""
    return read_dataset(path, task=task, reward=reward).without_closing_frames()


def seed_everything(config: TrainConfig) -> None:
    """Seed every global generator and fix the other settings that affect results."""
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    config.gpu.apply()


def build(config: TrainConfig, start: Path | None = None) -> RunComponents:
    """Build a resolved configuration.

    Args:
        config: Result of `resolve_config`.
        start: Checkpoint with the initial policy instead of `init_from`, for a resumed run.

    Raises:
        UserError: Dataset, checkpoint, simulator and policy are incompatible.
    """
    seed_everything(config)
    device = usable_device(config.device)
    name, settings = section("algorithm", config.algorithm)
    data_source = ALGORITHMS[name].data_source
    episodes = load_episodes(config.dataset, config.task.name, config.task.reward) if config.dataset else None
    load_episodes.cache_clear()
    recorded = config.task.name == NO_TASK
    evaluates = config.evaluation.episodes > 0 and rank() == 0 and not recorded
    needs_simulator = _needs_simulator(config, data_source)
    # Initial weights are equal in all processes, independent of the draws of their simulators.
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        eval_sim = eval_simulator(config) if evaluates else None
        num_envs = 1 if config.sim.num_workers else config.sim.num_envs // world_size()
        train_sim = simulator(config, num_envs) if needs_simulator else None
        sim = _spec(config, train_sim or eval_sim, episodes)
        if start is None and not recorded:
            check_unused_sizes(config.task, sim.observation)
    held_out, metadata = None, None
    if episodes is not None and recorded:
        metadata = recorded_metadata(episodes)
        known = read_manifest(Path(config.init_from)).task_metadata if config.init_from and start is None else None
        if known is not None:
            check_dataset_for_metadata(episodes, known, config.dataset)
        episodes, held_out = _hold_out(episodes, config)
    elif episodes is not None:
        check_dataset(episodes, sim, config.dataset)
    policy, algorithm, updates = build_learner(config, episodes, sim, device, start)
    if metadata is not None and not metadata.action_names and isinstance(policy, RelativeActionPolicy):
        metadata = replace(metadata, action_names=policy.representation.entry_names(policy.spec.action_dim))
    if rank():  # weights are equal in all processes, and the noise of losses is not
        torch.manual_seed(config.seed + SEEDS_PER_RANK * rank())
    if episodes is not None:
        check_dataset_for_policy(episodes, policy.spec, f"dataset {config.dataset}")
        warn_of_outliers(episodes, config.dataset)
    _check_critics(algorithm, sim)
    algorithm.attach_symmetry(sim.mirror)
    source = make_source(config, policy.spec, algorithm, settings, episodes, train_sim, device)
    return RunComponents(config, policy, algorithm, source, eval_sim, updates, held_out, metadata)


def _spec(config: TrainConfig, sim: VectorSim | None, episodes: Episodes | None) -> SimSpec:
    """Return the specification of the task; a run without a simulator opens one for it."""
    if config.task.name == NO_TASK:
        assert episodes is not None
        return recorded_spec(episodes)
    if sim is None:
        sim = simulator(config, 1)
        sim.close()
    return sim.spec


def _hold_out(episodes: Episodes, config: TrainConfig) -> tuple[Episodes, HeldOut | None]:
    """Split a dataset into episodes to train on and at most `evaluation.episodes` to evaluate on, if possible two."""
    settings, count = config.evaluation, episodes.num_episodes
    if not settings.episodes:
        return episodes, None
    if count < 2:
        raise UserError(
            f"Dataset {config.dataset} has one episode, so none can be held out; set evaluation.episodes=0 to train "
            "without evaluation."
        )
    size = min(max(round(settings.held_out * count), 2 if count > 3 else 1), settings.episodes)
    train, held_out = split_indices(count, size, settings.seed)
    spread = episodes.arrays["action"].astype(np.float64).std(0)
    return episodes.subset(train), HeldOut(episodes.subset(held_out), spread)


def _check_critics(algorithm: Algorithm, sim: SimSpec) -> None:
    """Reject a critic whose inputs the simulator does not provide."""
    hidden = {HIDDEN_STATE: (algorithm.policy.spec.hidden_dim,)} if algorithm.policy.spec.hidden_dim else {}
    available = {key: tuple(entry.shape) for key, entry in sim.observation.items()} | hidden
    for net in algorithm.checkpoint_items().values():
        for key, shape in net.observation.items() if isinstance(net, ValueNet) else ():
            found = available.get(key, "no such key")
            if found != tuple(shape):
                raise UserError(f"The critic requires '{key}' of shape {tuple(shape)}; {sim.task} has {found}.")
