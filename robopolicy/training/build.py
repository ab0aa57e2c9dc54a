"""Construction of a run's objects from a configuration: policy, algorithm, data source and evaluation simulator."""

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
from robopolicy.data.formats import read_dataset
from robopolicy.device import device_name, usable_device
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import fill_defaults, to_dict
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.registry import WorldOptions, get_task, observation_options, task_names
from robopolicy.spec import HIDDEN_STATE
from robopolicy.text.policy import TextPolicy
from robopolicy.text.sft import TextLearner
from robopolicy.training.config import ChunkConfig, TaskConfig, TrainConfig, section
from robopolicy.training.distributed import check_distributed
from robopolicy.training.learner import build_learner, eval_simulator, simulator, steps_per_decision
from robopolicy.training.make_source import SEEDS_PER_RANK, SOURCES, DataSource, make_source
from robopolicy.training.manifest import read_manifest
from robopolicy.training.overlap import check_overlap
from robopolicy.training.remote_replay import check_workers
from robopolicy.training.world_sims import is_world

OUT_OF_BOUNDS_WARN = 0.05  # fraction of actions outside the bounds above which a dataset causes a warning


@dataclass
class RunComponents:
    """Objects of a run."""

    config: TrainConfig  # resolved: all defaults and names are set
    policy: Policy  # initial policy
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
    if config.init_from:
        manifest = read_manifest(Path(config.init_from))
        spec = manifest.policy_spec
        shape = {key: getattr(spec, key) for key in ("horizon", "action_horizon", "obs_horizon")}
        with fill_defaults():  # loading the checkpoint verifies the defaults
            name, policy = section("policy", {**manifest.config, "name": manifest.policy})
        config = replace(config, policy={**to_dict(policy), "name": name}, chunk=replace(config.chunk, **shape))
        config = replace(config, task=_with_policy_inputs(config.task, spec))
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
    if config.dataset:
        task = task or load_episodes(config.dataset, "", config.task.reward).tasks[0]
    if not task:
        raise UserError("No task is given; pass e.g. task=lift ('robopolicy list tasks' prints all).")
    task = get_task(task).name
    config = _shorten_rollouts(replace(config, chunk=resolve_chunk(config, task)))
    _check_text(task, str(config.policy["name"]), algorithm)
    name = config.name or f"{task.rsplit('/', 1)[-1]}_{config.policy['name']}_{algorithm}_seed{config.seed}"
    return replace(config, task=replace(config.task, name=task), name=name)


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
    evaluates = config.evaluation.episodes > 0 and rank() == 0
    needs_simulator = _needs_simulator(config, data_source)
    # Initial weights are equal in all processes, independent of the draws of their simulators.
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        eval_sim = eval_simulator(config) if evaluates else None
        num_envs = 1 if config.sim.num_workers else config.sim.num_envs // world_size()
        train_sim = simulator(config, num_envs) if needs_simulator else None
    sim = _spec(config, train_sim or eval_sim, data_source)
    if episodes is not None and sim is not None:
        _check_dataset(episodes, sim, config.dataset)
    policy, algorithm, updates = build_learner(config, episodes, sim, device, start)
    if rank():  # weights are equal in all processes, and the noise of losses is not
        torch.manual_seed(config.seed + SEEDS_PER_RANK * rank())
    if episodes is not None:
        check_dataset_for_policy(episodes, policy.spec, f"dataset {config.dataset}")
    if sim is not None:
        _check_critics(algorithm, sim)
        algorithm.attach_symmetry(sim.mirror)
    source = make_source(config, policy.spec, algorithm, settings, episodes, train_sim, device)
    return RunComponents(config, policy, algorithm, source, eval_sim, updates)


def _spec(config: TrainConfig, sim: VectorSim | None, data_source: str) -> SimSpec | None:
    """Return the specification of the task; replay needs its action bounds even without a simulator."""
    if sim is None and data_source == "replay":
        sim = simulator(config, 1)
        sim.close()
    return None if sim is None else sim.spec


def _check_critics(algorithm: Algorithm, sim: SimSpec) -> None:
    """Reject a critic whose inputs the simulator does not provide."""
    hidden = {HIDDEN_STATE: (algorithm.policy.spec.hidden_dim,)} if algorithm.policy.spec.hidden_dim else {}
    available = {key: tuple(entry.shape) for key, entry in sim.observation.items()} | hidden
    for net in algorithm.checkpoint_items().values():
        for key, shape in net.observation.items() if isinstance(net, ValueNet) else ():
            found = available.get(key, "no such key")
            if found != tuple(shape):
                raise UserError(f"The critic requires '{key}' of shape {tuple(shape)}; {sim.task} has {found}.")


def _check_dataset(episodes: Episodes, sim: SimSpec, path: str) -> None:
    expected = {key: tuple(spec.shape) for key, spec in sim.observation.items()} | {"action": (sim.action_dim,)}
    for key, shape in expected.items():
        if key not in episodes.arrays:
            raise UserError(f"Dataset {path} lacks '{key}', which {sim.task} requires; collect it again with that key.")
        found = tuple(episodes.arrays[key].shape[1:])
        if found != shape:
            hint = "choose the task it was recorded on"
            if is_image(key):
                hint = f"set task.image_size={found[-1]}"
            elif is_cloud(key):
                hint = f"set task.points={found[0]}"
            raise UserError(f"'{key}' of dataset {path} has shape {found}, but {sim.task} has {shape}; {hint}.")
    # Integer frame rates round the control step.
    # Whole-number frame rates round the control step a little.
    if not math.isclose(episodes.control_dt, sim.control_dt, rel_tol=0.05):
        raise UserError(
            f"Dataset {path} was recorded every {episodes.control_dt:g} s, but {sim.task} acts every "
            f"{sim.control_dt:g} s; collect it again."
        )
    _warn_about_mismatch(episodes, sim, path)


def _warn_about_mismatch(episodes: Episodes, sim: SimSpec, path: str) -> None:
    """Warn if the data are from another task or exceed the action bounds; a mixture may be intended."""
    known = set(task_names())
    others = sorted({task for task in episodes.tasks if task in known and task != sim.task})
    if others and sim.task not in episodes.tasks:
        warnings.warn(f"Dataset {path} was recorded on {others[0]}, and this run uses {sim.task}.", stacklevel=2)
    action = episodes.arrays["action"]
    low, high = sim.action_low.cpu().numpy(), sim.action_high.cpu().numpy()
    margin = 0.01 * (high - low)
    beyond = ((action < low - margin) | (action > high + margin)).any(-1).mean()
    if beyond > OUT_OF_BOUNDS_WARN:
        warnings.warn(
            f"{beyond:.0%} of the actions of dataset {path} exceed the bounds of {sim.task}; check its task.",
            stacklevel=2,
        )


def check_dataset_for_policy(episodes: Episodes, policy: PolicySpec, what: str) -> None:
    """Raise a UserError if `episodes`, named `what` in the message, lack a key of the policy or differ in shape."""
    expected = {**policy.observation, "action": (policy.action_dim,)}
    for key, shape in expected.items():
        found = tuple(episodes.arrays[key].shape[1:]) if key in episodes.arrays else None
        if found != tuple(shape):
            raise UserError(
                f"The policy requires '{key}' of shape {tuple(shape)}, but {what} has "
                f"{found or 'no such key'}; pass a dataset of the task of the policy."
            )
