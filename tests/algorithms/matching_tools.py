"""Small policies, one-step rollouts and closed forms shared by the tests of the fine-tuners at stored points."""

import math
from collections.abc import Callable
from typing import Any

import torch
from fine_tuning_tools import completed
from torch import Tensor, nn

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, compute_advantages
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

NAMES = ("fpo", "fpo_pp", "awm", "ac_flow", "policyflow")
SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2)
ACTION = {"min": [-0.5, -3.0], "max": [0.5, 3.0]}
STATE = {"min": [-2.0] * 3, "max": [2.0] * 3}
BARE: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "action_clip": 0.0}


def head(name: str = "flow", spec: PolicySpec = SPEC, seed: int = 0, **config: Any) -> Any:
    torch.manual_seed(seed)
    policy = make_policy(name, POLICIES[name].config_class(**({"hidden": (32, 32), "steps": 4} | config)), spec)
    running = config.get("normalization") == "running"
    action = {} if config.get("action_normalization") == "identity" else {"action": ACTION}
    policy.fit_normalizer(action if running else {"state": STATE, **action})
    return policy


def tuner(name: str, policy: Policy | None = None, *, updates: int = 20, **config: Any) -> Any:
    policy = head() if policy is None else policy
    settings = {"batch_size": 64, "critic": ValueConfig(hidden=(8,))} | config
    algorithm_class = ALGORITHMS[name]
    config_class = algorithm_class.config_class
    algorithm: Any = algorithm_class
    return algorithm(config_class(**settings), policy, total_updates=updates)


def observations(rows: int, spec: PolicySpec = SPEC, seed: int = 1) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(rows, spec.obs_horizon, *shape, generator=generator) for key, shape in spec.observation.items()
    }


def bandit(
    policy: Policy,
    rows: int,
    reward: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
    obs: Observation | None = None,
) -> Rollout:
    """Episodes of one chunk; `reward` maps chunks `(B, H, A)` to `(B,)`, by default it prefers small first actions."""
    obs = observations(rows, policy.spec, seed) if obs is None else obs
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(seed))
    value = -sample.chunk[:, 0].square().sum(-1) if reward is None else reward(sample.chunk)
    done = torch.ones(1, rows, dtype=torch.bool)
    first = {key: item.unsqueeze(0) for key, item in obs.items()}
    record = {key: item.unsqueeze(0) for key, item in sample.record.items()}
    none = {key: item[:0] for key, item in obs.items()}
    steps = torch.ones(1, rows, dtype=torch.int64)
    return Rollout(first, record, sample.logp.unsqueeze(0), value.unsqueeze(0), steps, done, ~done, none, obs)


def prepared(algorithm: Any, rollout: Rollout) -> RolloutBatch:
    """Rows as in the first epoch."""
    rows = compute_advantages(rollout, algorithm.critic, gamma=0.99, gae_lambda=0.95)
    return completed(algorithm, rows)


def gradient(loss: Tensor, module: nn.Module) -> Tensor:
    """Flat gradient with respect to all parameters of `module`."""
    parameters = list(module.parameters())
    parts = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, parts, strict=True)]
    )


class GaussianFlow(FlowPolicy):
    """The exact flow from N(0, 1) to N(mean, std^2) in one dimension, with one trainable number."""

    def __init__(self, mean: float, std: float, steps: int = 10) -> None:
        super().__init__(FlowConfig(hidden=(4,), steps=steps, **BARE), PolicySpec({"state": (1,)}, action_dim=1))
        self.backbone.requires_grad_(False)
        self.mean = nn.Parameter(torch.tensor(mean))
        self.std = std

    def slope(self, t: Tensor) -> Tensor:
        """Derivative of the velocity with respect to the point."""
        return (t * self.std**2 - (1 - t)) / ((1 - t).square() + t.square() * self.std**2)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None, None]
        return self.mean + self.slope(t) * (x - t * self.mean)


def point_mass_return(name: str, *, updates: int, **config: Any) -> float:
    """Return of a rollout after training from scratch on the shaped point mass; about -6 before."""
    spec = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=2)
    policy = head(spec=spec, normalization="running", hidden=(64, 64), action_normalization="identity")
    settings = {"num_steps": 20, "batch_size": 512, "lr": 1e-3, "lr_final": 1e-3, "critic_lr": 1e-3}
    critic = ValueConfig(hidden=(64, 64))
    algorithm = tuner(name, policy, updates=updates, **(settings | {"critic": critic} | config))
    sim = ChunkedSim(
        make_sim("toy/point_mass", SimOptions(num_envs=64, reward="shaped")),
        action_horizon=2,
        gamma=algorithm.step_discount,
    )
    sampler = RolloutSampler(sim, decisions=algorithm.config.num_steps, seed=0)
    for _ in range(updates):
        algorithm.update(sampler.collect(algorithm.act))
    sampler.episode_stats()
    for _ in range(2):
        sampler.collect(algorithm.act)
    return sampler.episode_stats()["rollout/return"]


def ring(count: int = 6, radius: float = 0.7) -> Tensor:
    """Goals `(count, 2)` on a circle."""
    angle = 2 * math.pi * torch.arange(count) / count
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


def near_goal(chunk: Tensor, goals: Tensor, width: float = 0.15) -> Tensor:
    """Reward `(B,)` that falls off with the distance of the first action from the nearest goal."""
    distance = torch.cdist(chunk[:, 0], goals).min(1).values
    return torch.exp(-0.5 * (distance / width).square())


def modes(policy: Policy, goals: Tensor, rows: int = 1000) -> float:
    """Effective number of goals the policy reaches: the exponential of the entropy of their shares."""
    obs = {"state": torch.zeros(rows, 1, 1)}
    chunk = policy.act(obs, generator=torch.Generator().manual_seed(7))
    near = torch.cdist(chunk[:, 0], goals).min(1)
    share = torch.bincount(near.indices[near.values < 0.3], minlength=len(goals)).double()
    share = share / share.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum()))
