"""Training of a head or of a student on demonstrations of the scripted expert."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import cache

import torch

from benchmarks.few_step.learners import LEARNERS, TASK, Sampler, Settings
from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.algorithms.distill import Distill, DistillConfig
from robopolicy.algorithms.reflow import Reflow, ReflowConfig
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.collect import EpisodeList, collect
from robopolicy.data.episodes import Episodes
from robopolicy.data.statistics import dataset_statistics
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.sim.registry import SimOptions, get_task, make_sim


@cache
def demonstrations(seed: int, count: int) -> Episodes:
    """Episodes of the scripted expert; every seed has its own."""
    found = EpisodeList()
    with closing(make_sim(TASK, SimOptions(num_envs=min(count, 16)))) as sim:
        collect(sim, get_task(TASK).require_expert()(), found, episodes=count, seed=100_000 + 1_000 * seed)
        return Episodes.from_list(found, sim.spec.control_dt)


@cache
def train(name: str, seed: int, settings: Settings) -> tuple[Policy, float]:
    """The trained policy of a learner and its training seconds, including its teacher's."""
    learner, data = LEARNERS[name], demonstrations(seed, settings.demonstrations)
    torch.manual_seed(seed)
    common = {"lr": settings.lr, "batch_size": settings.batch_size}
    if learner.teacher:
        teacher, spent = train(learner.teacher, seed, settings)
        start = time.perf_counter()
        if learner.algorithm == "distill":
            algorithm: BC = Distill(DistillConfig(**common, seed=seed), teacher, total_updates=settings.updates)
        else:
            student = with_sampler(teacher, {}).requires_grad_(True)
            algorithm = Reflow(ReflowConfig(**common, seed=seed), student, total_updates=settings.updates)
    else:
        spent, start = 0.0, time.perf_counter()
        shapes = {key: tuple(data.arrays[key].shape[1:]) for key in data.observation_keys}
        spec = PolicySpec(shapes, data.arrays["action"].shape[1], settings.horizon, settings.action_horizon)
        policy = make_policy(learner.policy, POLICIES[learner.policy].config_class(**learner.settings), spec)
        policy.fit_normalizer(dataset_statistics(data))
        algorithm = BC(BCConfig(**common), policy, total_updates=settings.updates)
    batches = ChunkSampler(data, horizon=settings.horizon, batch_size=settings.batch_size, seed=seed)
    for _, batch in zip(range(settings.updates), batches, strict=False):
        algorithm.update(batch)
    return algorithm.inference_policy(), spent + time.perf_counter() - start


def with_sampler(policy: Policy, sampler: Sampler) -> Policy:
    """The same weights with other sampler settings."""
    other = type(policy)(replace(policy.config, **sampler), policy.spec)  # type: ignore[call-arg,attr-defined]
    other.load_state_dict(policy.state_dict())
    return other.eval()
