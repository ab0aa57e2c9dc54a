"""Construction of the policy and the algorithm of a run from a simulator or a dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from robopolicy.algorithms.common.algorithm import IMITATION, Algorithm
from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.core.distributed import rank
from robopolicy.data.chunks import chunk_index, last_frames
from robopolicy.data.episodes import Episodes
from robopolicy.data.statistics import dataset_statistics, vector_statistics
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.actors import check_compatible
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import make_policy
from robopolicy.policies.wrappers.nested import describe
from robopolicy.policies.wrappers.relative_actions import (
    ActionRepresentation,
    RelativeActionConfig,
    RelativeActionPolicy,
    match_entries,
)
from robopolicy.schema import to_dict
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.registry import SimOptions, WorldOptions
from robopolicy.sim.wrappers.registry import evaluation_wrappers
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.config import TrainConfig, section
from robopolicy.training.make_source import SEEDS_PER_RANK, SOURCES
from robopolicy.training.unused_settings import check_unused_encoders
from robopolicy.training.world_sims import is_world, make_env


def build_learner(
    config: TrainConfig, episodes: Episodes | None, sim: SimSpec | None, device: torch.device, start: Path | None = None
) -> tuple[Policy, Algorithm, int]:
    """Build the initial policy, its algorithm, and the number of updates.

    Args:
        config: Result of `resolve_config`.
        episodes: Dataset, or None.
        sim: Specification of the task; None for a checkpoint that is not compared with its task.
        device: Device of policy and algorithm.
        start: As in `build`.

    Raises:
        UserError: They are incompatible.
    """
    name, algorithm_config = section("algorithm", config.algorithm)
    data_source = ALGORITHMS[name].data_source
    checkpoint = start or (Path(config.init_from) if config.init_from else None)
    if checkpoint is not None:
        policy = load_policy(checkpoint, device)[0].train()
        policy_name, settings = section("policy", config.policy)
        deployed = (policy.name, to_dict(policy.config)) != (policy_name, to_dict(settings))
        if start is not None and deployed and config.task.action_representation == "absolute":
            # The algorithm deploys another policy than its initial one, which the resumed state contains.
            with torch.device(device):
                policy = make_policy(policy_name, settings, policy.spec)
            for part in policy.modules():
                if isinstance(part, Normalizer):
                    part.fitted.fill_(True)  # the statistics are loaded later
        if sim is not None:
            check_compatible(policy.spec, sim)
    else:
        assert sim is not None
        policy = _new_policy(config, episodes, sim, device, bounds=data_source not in IMITATION)
    if sim is not None and ALGORITHMS[name].requires_action_bounds:
        _check_bounds(policy, sim, name)
    updates = _total_updates(config, algorithm_config, data_source)
    if any(entry.name == "seed" for entry in fields(algorithm_config)):
        seed = algorithm_config.seed + config.seed + SEEDS_PER_RANK * rank()  # of noise and minibatches
        algorithm_config = replace(algorithm_config, seed=seed)
    with torch.device(device):
        try:
            algorithm = make_algorithm(name, algorithm_config, policy, total_updates=updates)
        except ValueError as error:  # an optimizer rejects a setting
            raise UserError(f"Settings of algorithm '{name}' do not fit: {error}.") from error
    _check_policy(algorithm.policy, name, data_source)
    if device.type != "cpu":
        for network in algorithm.checkpoint_items().values():
            if isinstance(network, nn.Module):
                config.gpu.compile_networks(network)
    return policy, algorithm, updates


def _total_updates(config: TrainConfig, algorithm_config: Any, data_source: str) -> int:
    if config.budget.updates:
        return config.budget.updates
    if SOURCES[data_source].whole_episodes:
        raise UserError(
            f"Algorithm '{config.algorithm['name']}' collects whole episodes of any length; set budget.updates instead."
        )
    steps, per_update = config.budget.env_steps, algorithm_config.num_steps * steps_per_decision(config)
    if data_source != "replay":
        return steps // per_update
    left = steps - max_warmup_steps(config, config.replay.learning_starts, algorithm_config.num_steps)
    if left < per_update:
        raise UserError(
            f"budget.env_steps={steps} ends before the first update, after replay.learning_starts="
            f"{config.replay.learning_starts}; raise budget.env_steps or lower replay.learning_starts."
        )
    return config.replay.offline_updates + left // per_update


def steps_per_decision(config: TrainConfig) -> int:
    """Return the most control steps of one decision of all environments."""
    return config.sim.num_envs * config.chunk.action_horizon


def max_warmup_steps(config: TrainConfig, learning_starts: int, num_steps: int) -> int:
    """Return the most control steps before the first update from replay; chunks cut short may shift its end.

    Workers collect `num_steps` decisions at a time, and other runs one.
    """
    return learning_starts + steps_per_decision(config) * (num_steps if config.sim.num_workers else 1) - 1


def _new_policy(
    config: TrainConfig, episodes: Episodes | None, sim: SimSpec, device: torch.device, *, bounds: bool
) -> Policy:
    """Build a policy with normalisers fitted to the dataset; with `bounds`, to the action bounds of the simulator."""
    observation = {key: spec.shape for key, spec in sim.observation.items()}
    for key in config.task.obs_keys:
        if key not in observation:
            raise unknown_name("observation", key, observation, "in task.obs_keys")
    observation = {key: shape for key, shape in observation.items() if key in (config.task.obs_keys or observation)}
    chunk = config.chunk
    try:
        spec = PolicySpec(observation, sim.action_dim, chunk.horizon, chunk.action_horizon, chunk.obs_horizon)
    except ValueError as error:
        raise UserError(f"No policy can have this chunk: {str(error).rstrip('.')}.") from error
    check_unused_encoders(config, observation)
    name, policy_config = section("policy", config.policy)
    if config.task.action_representation != "absolute":
        return _relative_policy(config, spec, episodes, sim, device)
    with torch.device(device):
        policy = make_policy(name, policy_config, spec)
    limits = _bounds(sim) if bounds else {}  # exploration exceeds the range of the data
    if episodes is not None:
        # Imitation learns the commanded actions, where a person took over only of the person.
        learned = episodes.with_executed_actions() if bounds else episodes.demonstrated()
        policy.fit_normalizer({**dataset_statistics(learned), **limits})
    else:
        try:
            policy.fit_normalizer(limits)
        except UserError as error:
            raise UserError(
                f"Policy '{name}' requires dataset statistics for its normalisers: imitate first (algorithm=bc) and "
                "pass init_from=CHECKPOINT, or choose another policy, e.g. policy=gaussian."
            ) from error
    return policy


def _relative_policy(
    config: TrainConfig, spec: PolicySpec, episodes: Episodes | None, sim: SimSpec, device: torch.device
) -> Policy:
    """Build a new policy that predicts differences of actions, whose statistics it is fitted to."""
    task = config.task
    if ALGORITHMS[str(config.algorithm["name"])].data_source != "dataset" or episodes is None:
        raise UserError(f"task.action_representation={task.action_representation} needs imitation, e.g. algorithm=bc.")
    if "state" not in spec.observation:
        raise UserError(f"{task.action_representation} actions need 'state' among the observations of the policy.")
    sizes, positions = (spec.action_dim, spec.observation["state"][0]), sim.observation["state"].names
    names = sim.action_names
    found = match_entries(
        task.action_representation, "state", names, positions, sizes, task.absolute_entries, task.poses
    )
    episodes = episodes.demonstrated()
    state, action = (torch.from_numpy(episodes.arrays[key].astype(np.float64)) for key in ("state", "action"))
    for pose in found.poses:
        pose.check(state, action)
    inner = replace(spec, action_dim=found.encoded_dim(spec.action_dim))
    with torch.device(device):
        base = make_policy(*section("policy", config.policy), inner)
        policy = RelativeActionPolicy(RelativeActionConfig(describe(base), found), spec)
    differences = encoded_actions(found, episodes, spec.horizon)
    policy.fit_normalizer({**dataset_statistics(episodes), "action": vector_statistics(differences)})
    return policy


def encoded_actions(representation: ActionRepresentation, episodes: Episodes, horizon: int) -> NDArray[np.float64]:
    """All differences `(steps, D)` of the chunks of `horizon` actions that start at every frame."""
    future, mask = chunk_index(last_frames(episodes), horizon)  # (F, H)
    obs = {representation.key: torch.from_numpy(episodes.arrays[representation.key].astype(np.float64))[:, None]}
    chunks = torch.from_numpy(episodes.arrays["action"].astype(np.float64)[future])
    return representation.encode(obs, chunks)[torch.from_numpy(mask > 0)].numpy()


def _check_policy(policy: Policy, algorithm: str, data_source: str) -> None:
    """Raise a UserError if the policy lacks the method that learning from the data source requires."""
    if data_source == "replay":  # these algorithms check the methods themselves
        return
    method = "imitation_loss" if data_source in IMITATION else "decisions"
    if getattr(type(policy), method) is getattr(Policy, method):
        raise UserError(
            f"Algorithm '{algorithm}' requires a policy with {method}, which '{policy.name}' lacks; "
            "docs/methods/compatibility.md has a table of which algorithm trains which policy."
        )


def _check_bounds(policy: Policy, sim: SimSpec, algorithm: str) -> None:
    """Raise a UserError for a policy of raw actions, assumed to be in [-1, 1], if the task has other bounds."""
    normalizer = getattr(policy, "action_normalizer", None)
    if not isinstance(normalizer, Normalizer) or normalizer.mode != "identity":
        return
    low, high = sim.action_low.cpu(), sim.action_high.cpu()
    if not (torch.allclose(low, -torch.ones_like(low)) and torch.allclose(high, torch.ones_like(high))):
        raise UserError(
            f"Algorithm '{algorithm}' requires the action bounds of {sim.task}, which are not [-1, 1], and a policy "
            "with action_normalization=identity has none; choose or clone one with policy.action_normalization=minmax."
        )


def _bounds(sim: SimSpec) -> Mapping[str, Mapping[str, Any]]:
    """Return action statistics without data: the bounds and the uniform distribution between them."""
    low, high = sim.action_low.cpu().numpy(), sim.action_high.cpu().numpy()
    spread = {"mean": (low + high) / 2, "std": (high - low) / math.sqrt(12)}
    return {"action": {"min": low, "max": high, **spread, "declared": True}}


def simulator(config: TrainConfig, num_envs: int, success_step: str = "any", *, held_out: bool = False) -> VectorSim:
    """Build the training simulator, or an evaluation of held-out problems that counts success at `success_step`."""
    options = SimOptions(
        num_envs=num_envs,
        backend=config.sim.backend,
        device=config.device,
        cameras=config.task.cameras,
        image_size=config.task.image_size,
        point_clouds=config.task.point_clouds,
        points=config.task.points,
        reward=config.task.reward,
        wrappers=config.task.wrappers,
        threads=config.sim.threads,
        exact_final_obs=_has_exact_final_obs(config),
        success_step=success_step,
        held_out=held_out,
        world=config.worldmodel if is_world(config.sim.backend) else WorldOptions(),
    )
    return make_env(config.task.name, options)


def _has_exact_final_obs(config: TrainConfig) -> bool:
    """Whether last observations are exact; by default not where one action per decision makes them slow on a device."""
    chosen = config.sim.final_obs
    return chosen == "exact" or (chosen == "auto" and (config.device == "cpu" or config.chunk.action_horizon > 1))


def eval_simulator(config: TrainConfig) -> VectorSim:
    """Build the evaluation simulator: by default the real one, even if the run trains in a world model.

    A world model evaluates whole episodes from the initial states of the task, independent of training.
    """
    backend = config.evaluation.backend or ("auto" if is_world(config.sim.backend) else config.sim.backend)
    world = WorldOptions(judge=config.worldmodel.judge, every=config.worldmodel.every)
    task = replace(config.task, wrappers=evaluation_wrappers(config.task.wrappers))
    evaluation = replace(config, task=task, sim=replace(config.sim, backend=backend), worldmodel=world)
    return simulator(evaluation, config.evaluation.num_envs, config.evaluation.success_step, held_out=True)
