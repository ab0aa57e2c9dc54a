"""A bandit in closed form and policies for the tests of DSRL."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.dsrl_na import DSRLNA, DSRLNAConfig
from robopolicy.algorithms.dsrl_sac import DSRLSAC, DSRLSACConfig
from robopolicy.critics.q import CriticConfig
from robopolicy.data.replay import Transitions
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, NoiseSpace

Kind = type[DSRLNA | DSRLSAC]

# The closed-form case: one decision, base P(s, w) = s + GAIN w, value -|a - GOAL|^2.
LINEAR = PolicySpec({"state": (2,)}, action_dim=2)
GAIN, GOAL, BOUND = torch.tensor([1.0, -0.5]), torch.tensor([0.8, 0.3]), 1.5
SMALL = CriticConfig(hidden=(64, 64), activation="silu", layer_norm=False)
ACTOR = replace(STEERING_ACTOR, hidden=(64, 64), normalization="identity")
POINT_MASS = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=4)


def linear(obs: Observation, noise: Tensor) -> Tensor:
    return obs["state"] + GAIN * noise


def value(chunk: Tensor) -> Tensor:
    return -(chunk[:, 0] - GOAL).square().sum(-1)


def make(kind: Kind, base: Policy, **overrides: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"noise_space": NoiseSpace(bound=BOUND), "actor": ACTOR, "critic": SMALL}
    settings |= {"batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3} | overrides
    config = (DSRLNAConfig if kind is DSRLNA else DSRLSACConfig)(**settings)
    return kind(config, base, total_updates=100)  # type: ignore[call-arg]


def bandit(rows: int, seed: int, base: Callable[[Observation, Tensor], Tensor] = linear) -> Transitions:
    """One-step episodes with actions decoded from random noise."""
    generator = torch.Generator().manual_seed(seed)
    obs = {"state": 2 * torch.rand(rows, 1, 2, generator=generator) - 1}
    w = BOUND * (2 * torch.rand(rows, 1, 2, generator=generator) - 1)
    chunk = base(obs, w)
    reward, ones = value(chunk), torch.ones(rows)
    return Transitions(
        obs=obs,
        chunk=chunk,
        mask=ones[:, None],
        rewards=reward[:, None],
        steps=ones.long(),
        discount=torch.zeros(rows),
        reward=reward,
        next_obs=obs,
        returns=reward,
        record={"noise": w},
        online=ones.bool(),
        weight=ones,
        index=torch.arange(rows),
    )


def flow(**config: Any) -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(**({"hidden": (32, 32), "steps": 2} | config)), POINT_MASS)
    bounds = {"state": 6, "action": 2}
    policy.fit_normalizer({key: {"min": [-1.0] * n, "max": [1.0] * n} for key, n in bounds.items()})
    return policy
