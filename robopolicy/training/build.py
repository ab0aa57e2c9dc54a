"""From a configuration to the objects of a run: policy, algorithm, source of experience, evaluation simulator."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robopolicy.algorithms import ALGORITHMS, make_algorithm
from robopolicy.algorithms.frames.actor_critic import ActorCritic
from robopolicy.algorithms.frames.base import Algorithm
from robopolicy.algorithms.frames.off_policy import OffPolicy
from robopolicy.core.ranks import rank, world_size
from robopolicy.critics.value import ValueNet
from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.data.lerobot import read_lerobot
from robopolicy.data.statistics import dataset_statistics
from robopolicy.device import usable_device
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.actors import check_compatible
from robopolicy.interop import POLICIES
from robopolicy.policies import make_policy
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.schema import filling, to_plain
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.registry import WorldOptions, get_task, views_of
from robopolicy.spec import MEMORY
from robopolicy.text.imitation import TextLearner, TextSFT
from robopolicy.text.learner import TextRecipe
from robopolicy.text.policy import TextPolicy
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.config import TaskConfig, TrainConfig, section
from robopolicy.training.distributed import check_distributed
from robopolicy.training.experience import source_for
from robopolicy.training.manifest import read_manifest
from robopolicy.training.simulators import eval_simulator, simulator
from robopolicy.training.sources import Source
from robopolicy.training.world_sims import is_world

WHOLE_EPISODES = (
    *("group", "vine", "scenarios", "plans", "population", "individuals"),
    *(TextSFT.experience, TextRecipe.experience),
)
"""Kinds of experience that are made of whole episodes, of any length."""


@dataclass
class Parts:
    """Everything a run consists of."""

    config: TrainConfig  # with every default and name filled in
    policy: Policy  # as it was before training
    algorithm: Algorithm
    source: Source
    eval_sim: VectorSim | None
    total_updates: int

    def close(self) -> None:
        """Stop the simulators."""
        self.source.close()
        if self.eval_sim is not None:
            self.eval_sim.close()


def complete(config: TrainConfig) -> TrainConfig:
    """Fill in what follows from the starting checkpoint, the dataset and the names.

    Raises:
        UserError: The pieces do not belong together or one is missing.
    """
    algorithm, settings = section("algorithm", config.algorithm)
    if (config.budget.updates > 0) == (config.budget.env_steps > 0):
        raise UserError(
            "Set exactly one of budget.updates and budget.env_steps, and leave the other 0, e.g. budget.updates=5000."
        )
    if config.world != WorldOptions() and not any(map(is_world, (config.sim.backend, config.evaluation.backend))):
        raise UserError("Settings of world.* belong to a world model; set sim.backend=worldmodel:FOLDER, too.")
    task = config.task.name
    if config.init_from:
        manifest = read_manifest(Path(config.init_from))
        spec = manifest.policy_spec
        chunk = replace(config.chunk, horizon=spec.horizon, execute=spec.execute, obs_horizon=spec.obs_horizon)
        with filling():  # loading the checkpoint tells whether the defaults fit
            name, policy = section("policy", {**manifest.config, "name": manifest.policy})
        config = replace(config, policy={**to_plain(policy), "name": name}, chunk=chunk)
        config = replace(config, task=_with_views(config.task, spec))
        task = task or manifest.task
    if not config.init_from and (wanted := ALGORITHMS[algorithm][1].wanted_base(settings)):
        raise UserError(f"Algorithm '{algorithm}' starts from a trained policy; pass {wanted}.")
    _check_experience(config, algorithm)
    check_distributed(config)
    if config.dataset:
        task = task or _episodes(config.dataset).tasks[0]
    if not task:
        raise UserError("No task is given; pass e.g. task=lift ('robopolicy list tasks' shows all).")
    task = get_task(task).name
    _check_speech(task, str(config.policy["name"]), algorithm)
    name = config.name or f"{task.rsplit('/', 1)[-1]}_{config.policy['name']}_{algorithm}_seed{config.seed}"
    return replace(config, task=replace(config.task, name=task), name=name)


def _check_speech(task: str, policy: str, algorithm: str) -> None:
    """Refuse text without what writes it, and what writes text where a robot is to act."""
    writes = (issubclass(POLICIES[policy][1], TextPolicy), issubclass(ALGORITHMS[algorithm][1], TextLearner))
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
    """All that the starting policy sees beside vectors, such as images and a stock, unless others are named."""
    named = (task.cameras, task.point_clouds, task.stock, task.descriptor, task.message, task.skills)
    return task if any(named) else replace(task, **views_of([spec.observation]))


def _check_experience(config: TrainConfig, name: str) -> None:
    """Refuse settings that contradict what the algorithm learns from."""
    algorithm = ALGORITHMS[name][1]
    if algorithm.experience == "dataset":
        if not config.dataset:
            raise UserError(f"Algorithm '{name}' learns from demonstrations; pass dataset=FOLDER (see collect).")
        if config.budget.env_steps:
            raise UserError(f"Algorithm '{name}' plays no steps in training; set budget.updates instead.")
    elif algorithm.needs_dataset:
        if not config.dataset:
            raise UserError(
                f"Algorithm '{name}' learns from demonstrations as well; pass dataset=FOLDER (see collect)."
            )
    elif issubclass(algorithm, TextLearner):
        if config.dataset:
            plays = (
                "what it plays, or as its recipe says" if algorithm is TextRecipe else "the task's own solutions, or"
            )
            raise UserError(
                f"Algorithm '{name}' reads no robot dataset; leave out dataset=. It learns from {plays} from "
                "algorithm.data=FILE (JSONL or parquet)."
            )
    elif not issubclass(algorithm, OffPolicy):
        if config.dataset:
            raise UserError(f"Algorithm '{name}' learns from what it plays alone; drop dataset=.")
    elif config.dataset and algorithm.decisions_only:
        raise UserError(
            f"Algorithm '{name}' learns from what it noted when it chose a chunk, which a dataset does not hold; "
            "drop dataset=."
        )
    elif not config.dataset and config.replay.offline_updates:
        raise UserError("replay.offline_updates learns from a dataset; pass dataset=FOLDER or set it to 0.")


def _plays(config: TrainConfig, experience: str) -> bool:
    """Whether training needs a simulator."""
    offline = experience == "replay" and 0 < config.budget.updates <= config.replay.offline_updates
    return experience != "dataset" and not offline


@lru_cache(maxsize=1)
def _episodes(path: str) -> Episodes:
    """The dataset, read once although both `complete` and `build` look at it."""
    return read_lerobot(path).played()


def seed_everything(config: TrainConfig) -> None:
    """Seed every global generator and fix what else results depend on."""
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    if config.device != "cpu":  # on the CPU a fixed number of threads suffices
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build(config: TrainConfig, start: Path | None = None) -> Parts:
    """Build a completed configuration.

    Args:
        config: Result of `complete`.
        start: Checkpoint with the initial policy instead of `init_from`; a resumed run passes its own.

    Raises:
        UserError: Dataset, checkpoint, simulator and policy do not fit each other.
    """
    seed_everything(config)
    device = usable_device(config.device)
    name, algorithm_config = section("algorithm", config.algorithm)
    experience = ALGORITHMS[name][1].experience
    episodes = _episodes(config.dataset) if config.dataset else None
    _episodes.cache_clear()
    judges = config.evaluation.episodes > 0 and rank() == 0
    eval_sim = eval_simulator(config) if judges else None
    train_sim = simulator(config, config.sim.num_envs // world_size()) if _plays(config, experience) else None
    sim = _spec(config, train_sim or eval_sim, experience)
    if episodes is not None and sim is not None:
        _check_dataset(episodes, sim, config.dataset)
    checkpoint = start or (Path(config.init_from) if config.init_from else None)
    if checkpoint is not None:
        policy = load_policy(checkpoint, device)[0].train()
        if policy.name != config.policy["name"]:
            # A resumed algorithm that deploys another policy than it was given; its state holds what it was given.
            with torch.device(device):
                policy = make_policy(*section("policy", config.policy), policy.spec)
        if sim is not None:
            check_compatible(policy.spec, sim)
    else:
        policy = _new_policy(config, episodes, sim, device, bounds=experience != "dataset")
    updates = _total_updates(config, algorithm_config, experience)
    if any(entry.name == "seed" for entry in fields(algorithm_config)):
        algorithm_config = replace(algorithm_config, seed=algorithm_config.seed + config.seed)
    with torch.device(device):
        try:
            algorithm = make_algorithm(name, algorithm_config, policy, total_updates=updates)
        except ValueError as error:  # an optimiser refuses a setting
            raise UserError(f"Settings of algorithm '{name}' do not fit: {error}.") from error
    if episodes is not None:
        _check_dataset_for_policy(episodes, policy.spec, config.dataset)
    _check_verb(algorithm.policy, name, algorithm.experience)
    if sim is not None:
        _check_critics(algorithm, sim)
        if isinstance(algorithm, ActorCritic):
            algorithm.use_mirror(sim.mirror)
    source = source_for(config, policy.spec, algorithm, algorithm_config, episodes, train_sim, device)
    return Parts(config, policy, algorithm, source, eval_sim, updates)


def _spec(config: TrainConfig, sim: VectorSim | None, experience: str) -> SimSpec | None:
    """What the task looks like; learning from replay needs its action bounds even where nothing is played."""
    if sim is None and experience == "replay":
        sim = simulator(config, 1)
        sim.close()
    return None if sim is None else sim.spec


def _total_updates(config: TrainConfig, algorithm_config: Any, experience: str) -> int:
    if config.budget.updates:
        return config.budget.updates
    whole = (
        "group",
        "vine",
        "scenarios",
        "plans",
        "population",
        "individuals",
        TextSFT.experience,
        TextRecipe.experience,
    )
    if experience in whole:
        raise UserError(
            f"Algorithm '{config.algorithm['name']}' plays whole episodes, of any length; set budget.updates instead."
        )
    per_update = algorithm_config.decisions * config.sim.num_envs * config.chunk.execute
    if experience != "replay":
        return math.ceil(config.budget.env_steps / per_update)
    warmup, steps = config.replay.warmup_steps, config.budget.env_steps
    if steps <= warmup:
        raise UserError(
            f"budget.env_steps={steps} ends before learning starts, after replay.warmup_steps={warmup}; "
            "raise the one or lower the other."
        )
    return config.replay.offline_updates + math.ceil((steps - warmup) / per_update)


def _new_policy(
    config: TrainConfig, episodes: Episodes | None, sim: SimSpec | None, device: torch.device, *, bounds: bool
) -> Policy:
    """A fresh policy, its normalisers fitted to the dataset, those of actions to the simulator's if `bounds`."""
    if sim is not None:
        observation, action_dim = {key: spec.shape for key, spec in sim.observation.items()}, sim.action_dim
    else:
        assert episodes is not None
        observation = {key: tuple(episodes.arrays[key].shape[1:]) for key in episodes.observation_keys}
        action_dim = int(episodes.arrays["action"].shape[1])
    for key in config.task.observe:
        if key not in observation:
            raise unknown_name("observation", key, observation, "in task.observe")
    observation = {key: shape for key, shape in observation.items() if key in (config.task.observe or observation)}
    chunk = config.chunk
    spec = PolicySpec(observation, action_dim, chunk.horizon, chunk.execute, chunk.obs_horizon)
    name, policy_config = section("policy", config.policy)
    with torch.device(device):
        policy = make_policy(name, policy_config, spec)
    limits = _bounds(sim) if bounds and sim is not None else {}  # who plays must reach beyond the data
    if episodes is not None:
        policy.fit_normalizer({**dataset_statistics(episodes), **limits})
    else:
        try:
            policy.fit_normalizer(limits)
        except UserError as error:
            raise UserError(
                f"Policy '{name}' normalises by statistics of a dataset: imitate first (algorithm=bc) and pass "
                "init_from=CHECKPOINT, or choose another policy, e.g. policy=gaussian."
            ) from error
    return policy


def _check_verb(policy: Policy, algorithm: str, experience: str) -> None:
    """Refuse an algorithm whose policy lacks the verb that its kind of experience needs."""
    if experience == "replay":  # various verbs, which these algorithms check themselves
        return
    verb = "imitation_loss" if experience == "dataset" else "decisions"
    if getattr(type(policy), verb) is getattr(Policy, verb):
        raise UserError(
            f"Algorithm '{algorithm}' needs a policy with {verb}, which '{policy.name}' lacks; "
            "choose another algorithm or policy."
        )


def _check_critics(algorithm: Algorithm, sim: SimSpec) -> None:
    """Refuse a critic that is told to see what the simulator does not show."""
    memory = {MEMORY: (algorithm.policy.spec.memory_dim,)} if algorithm.policy.spec.memory_dim else {}
    shown = {key: tuple(entry.shape) for key, entry in sim.observation.items()} | memory
    for net in algorithm.parts().values():
        for key, shape in net.observation.items() if isinstance(net, ValueNet) else ():
            found = shown.get(key, "nothing")
            if found != tuple(shape):
                raise UserError(f"The critic is to see '{key}' of shape {tuple(shape)}; {sim.task} shows {found}.")


def _bounds(sim: SimSpec) -> Mapping[str, Mapping[str, Any]]:
    """Action statistics when there is no data: the bounds, and the uniform distribution between them."""
    low, high = sim.action_low.cpu().numpy(), sim.action_high.cpu().numpy()
    return {"action": {"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / math.sqrt(12)}}


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


def _check_dataset_for_policy(episodes: Episodes, policy: PolicySpec, path: str) -> None:
    """Refuse a dataset of other shapes than those of the starting checkpoint."""
    wanted = {**policy.observation, "action": (policy.action_dim,)}
    for key, shape in wanted.items():
        found = tuple(episodes.arrays[key].shape[1:]) if key in episodes.arrays else None
        if found != tuple(shape):
            raise UserError(
                f"The policy needs '{key}' of shape {tuple(shape)}, but dataset {path} has "
                f"{found or 'no such key'}; pass the dataset of its own task."
            )
