"""A contextual bandit with one-step episodes of mixed quality: 15 % near the best action, the rest far from it."""

import numpy as np
import torch
from torch import Tensor

from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.data.batches import Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.data.replay import Replay
from robopolicy.policies.base import Policy


def best(state: Tensor) -> Tensor:
    """The best action `(B,)` of states `(B, 2)`."""
    return 0.5 + 0.3 * state[:, 0]


def mixed(rows: int = 600, good: float = 0.15, seed: int = 0) -> Episodes:
    """Bad actions are between -0.9 and 0; the reward is 1 minus twice the distance to the best action."""
    rng = np.random.default_rng(seed)
    state = rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    target = best(torch.from_numpy(state)).numpy()
    skilled = target + 0.15 * rng.normal(size=rows)
    action = np.where(rng.random(rows) < good, skilled, rng.uniform(-0.9, 0.0, rows)).clip(-1, 1).astype(np.float32)
    arrays = {
        "state": state,
        "action": action[:, None],
        "reward": 1 - 2 * np.abs(action - target),
        "terminated": np.ones(rows, np.bool_),
    }
    ends = np.arange(1, rows + 1)
    return Episodes(arrays, ends, ("bandit",) * rows, np.full(rows, -1), 0.1)


def batches(algorithm: OffPolicy, episodes: Episodes, count: int, seed: int = 0) -> list[Transitions]:
    """Minibatches of the data, sampled as in training."""
    memory = Replay.from_episodes(episodes, gamma=algorithm.config.gamma)
    generator = torch.Generator().manual_seed(seed)
    return [memory.sample(algorithm.sample_spec, generator) for _ in range(count)]


def regret(policy: Policy, rows: int = 300) -> float:
    """Mean distance of the deployed action to the best one."""
    state = torch.rand(rows, 2, generator=torch.Generator().manual_seed(7)) * 2 - 1
    action = policy.act({"state": state[:, None]}, deterministic=True)[:, 0, 0]
    return float((action - best(state)).abs().mean())
