"""What an algorithm learns from: the source that fits what its `experience` names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from robopolicy.algorithms.dcg_map_elites import DCGMAPElites
from robopolicy.algorithms.frames.base import Algorithm
from robopolicy.algorithms.frames.off_policy import OffPolicy
from robopolicy.algorithms.frames.pathwise import Pathwise
from robopolicy.algorithms.hnpg import HNPG
from robopolicy.algorithms.stax import STAX
from robopolicy.core.ranks import rank, world_size
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.episodes import Episodes
from robopolicy.data.replay import Replay
from robopolicy.policies.base import PolicySpec
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import VectorSim
from robopolicy.text.imitation import TextSFT
from robopolicy.text.learner import TextRecipe
from robopolicy.training.config import TrainConfig
from robopolicy.training.distributed import SEEDS_PER_RANK, SharedRollouts
from robopolicy.training.population_source import PopulationSource, ViewSource
from robopolicy.training.replay_source import ReplaySource
from robopolicy.training.scenario_source import ScenarioSource
from robopolicy.training.sources import DatasetSource, GroupSource, HybridSource, RolloutSource, Source, VineSource
from robopolicy.training.text_sources import text_source

FIRST_EPISODE = 1_000_000  # episode seeds of training start here, far above those of demonstrations and evaluation


def source_for(
    config: TrainConfig,
    spec: PolicySpec,
    algorithm: Algorithm,
    settings: Any,
    episodes: Episodes | None,
    train_sim: VectorSim | None,
    device: torch.device,
) -> Source:
    """The source that gives `algorithm` what its `experience` names, from a dataset, a simulator or both."""
    seed = FIRST_EPISODE * (1 + config.seed) + SEEDS_PER_RANK * rank()
    if isinstance(algorithm, Pathwise):
        assert train_sim is not None
        size, seen = settings.scenarios, spec.obs_horizon
        return ScenarioSource(train_sim, algorithm, device, scenarios=size, obs_horizon=seen, seed=seed)
    sim = None
    if train_sim is not None:
        sim = ChunkedSim(train_sim, execute=spec.execute, obs_horizon=spec.obs_horizon, gamma=algorithm.step_discount)
    if isinstance(algorithm, TextSFT | TextRecipe):
        return text_source(train_sim, algorithm, seed)
    if isinstance(algorithm, DCGMAPElites):
        assert sim is not None
        return PopulationSource(sim, device, algorithm, settings=config.replay, seed=seed)
    if isinstance(algorithm, STAX):
        assert sim is not None
        return ViewSource(sim, device, algorithm, seed=seed)
    if isinstance(algorithm, OffPolicy):
        if episodes is not None:
            episodes = episodes.executed()
            algorithm.use_dataset(episodes)
        request, share = algorithm.request, config.replay.prioritized
        if episodes is not None and not algorithm.needs_reward:  # what earns nothing is read all the same
            unpaid = np.zeros(len(episodes), np.float32)
            episodes = replace(episodes, arrays={"reward": unpaid, **episodes.arrays})
        offline = Replay.from_episodes(episodes, gamma=request.gamma, prioritized=share) if episodes else None
        return ReplaySource(
            sim,
            offline,
            device,
            request=request,
            settings=config.replay,
            decisions=settings.decisions,
            utd=settings.utd,
            seed=seed,
        )
    if algorithm.experience == "dataset":
        assert episodes is not None
        sampler = ChunkSampler(
            episodes,
            horizon=spec.horizon,
            obs_horizon=spec.obs_horizon,
            batch_size=settings.batch_size,
            seed=config.seed,
            reach=algorithm.reach,
        )
        return DatasetSource(sampler, device)
    assert sim is not None
    if algorithm.experience == "group":
        return GroupSource(sim, device, group_size=settings.group_size, seed=seed)
    if algorithm.experience == "vine":
        size = {"forks": settings.forks, "vines": settings.vines}
        return VineSource(sim, device, decisions=settings.decisions, seed=seed, **size)
    if isinstance(algorithm, HNPG):
        assert episodes is not None
        offline, request = Replay.from_episodes(episodes, gamma=settings.gamma), algorithm.request
        return HybridSource(sim, device, offline, request=request, decisions=settings.decisions, seed=seed)
    rollouts = RolloutSource(sim, device, decisions=settings.decisions, seed=seed, memory=spec.memory_dim)
    return rollouts if world_size() == 1 else SharedRollouts(rollouts)
