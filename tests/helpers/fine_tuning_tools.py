"""Small policies, samplers and comparisons for the tests of on-policy fine-tuning."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, compute_advantages
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.rollout.groups import GroupSampler
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

SPEC = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2)
LINE = PolicySpec({"state": (1,)}, action_dim=1)
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "action_clip": 0.0}
STATISTICS = {
    "state": {"min": [-2.0] * 6, "max": [2.0] * 6, "mean": [0.0] * 6, "std": [1.0] * 6, "count": [100]},
    "action": {"min": [-1.0] * 2, "max": [1.0] * 2},
}


def flow_head(seed: int = 0, **config: Any) -> FlowPolicy:
    torch.manual_seed(seed)
    policy = FlowPolicy(FlowConfig(**({"hidden": (32, 32)} | config)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def diffusion_head(seed: int = 0, **config: Any) -> DiffusionPolicy:
    torch.manual_seed(seed)
    policy = DiffusionPolicy(DiffusionConfig(**({"hidden": (32, 32), "steps": 4} | config)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def chunked(algorithm: Any, num_envs: int = 16) -> ChunkedSim:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped"))
    spec = algorithm.policy.spec
    return ChunkedSim(
        sim, action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon, gamma=algorithm.step_discount
    )


def sampler_for(algorithm: Any, num_envs: int = 16) -> Any:
    sim = chunked(algorithm, num_envs)
    if algorithm.data_source == "group":
        return GroupSampler(sim, group_size=algorithm.config.group_size)
    return RolloutSampler(sim, decisions=algorithm.config.num_steps, memory=algorithm.policy.spec.hidden_dim)


def resumed(make: Callable[..., Any], num_envs: int = 16, sampling: Any = sampler_for) -> tuple[Any, Any]:
    """An algorithm after two updates, and one of another seed restored after the first update that made the second."""
    straight, other = make(), make(seed=1)
    sampler, again = sampling(straight, num_envs), sampling(other, num_envs)
    straight.update(sampler.collect(straight.act))
    state, place = copy.deepcopy(straight.state_dict()), copy.deepcopy(sampler.state_dict())
    straight.update(sampler.collect(straight.act))
    other.load_state_dict(state)
    again.load_state_dict(place)
    other.update(again.collect(other.act))
    return straight, other


def completed(algorithm: Any, rows: RolloutBatch) -> RolloutBatch:
    """Rows as in the first epoch: with chains, or with stored points."""
    if hasattr(algorithm, "compute_weights"):
        return algorithm.compute_weights(rows)
    if hasattr(algorithm, "flow_loss"):
        return algorithm.flow_loss.complete(rows)
    algorithm.recorder.snapshot()
    return algorithm.recorder.resample(rows)


def actor_parameters(algorithm: Any) -> list[nn.Parameter]:
    return algorithm.actor_optimizer.param_groups[0]["params"]


def rows_of(algorithm: Any, rollout: Any) -> RolloutBatch:
    return completed(algorithm, compute_advantages(rollout, algorithm.critic, gamma=0.99, gae_lambda=0.95))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def changed(before: Mapping[str, Tensor], module: nn.Module) -> set[str]:
    return {key for key, value in module.state_dict().items() if not torch.equal(before[key], value)}


def gradient(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [
        torch.zeros_like(parameter) if grad is None else grad
        for parameter, grad in zip(
            parameters, torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True), strict=True
        )
    ]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def distance(policy: Policy, other: Policy) -> float:
    """Largest difference between the weights of two policies."""
    pairs = zip(policy.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
