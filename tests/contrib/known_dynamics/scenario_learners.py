"""A small squashed Gaussian policy for known-dynamics tasks, and a learner with it."""

from __future__ import annotations

from typing import Any

import torch

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.contract import SimSpec


def small_policy(sim: SimSpec, **settings: Any) -> GaussianPolicy:
    torch.manual_seed(0)
    spec = PolicySpec({key: entry.shape for key, entry in sim.observation.items()}, sim.action_dim, 1, 1)
    config = GaussianConfig(
        **({"hidden": (32, 32), "activation": "relu", "orthogonal_init": False} | settings),
        squash=True,
        action_normalization="minmax",
    )
    policy = GaussianPolicy(config, spec)
    policy.fit_normalizer({"action": {"min": sim.action_low.numpy(), "max": sim.action_high.numpy()}})
    return policy


def learner(name: str, sim: SimSpec, **settings: Any) -> Any:
    algorithm = ALGORITHMS[name]
    config = algorithm.config_class
    return algorithm(config(**settings), small_policy(sim), total_updates=100)
