"""Shared code of maximum-entropy algorithms: the learned entropy temperature, settings, and policies over noise.

DSRL is soft actor-critic whose actor
outputs the noise of a frozen diffusion or flow policy (`LatentPolicy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable
from robopolicy.algorithms.common.off_policy import OffPolicyConfig, make_adam
from robopolicy.constraints import Finite, NonNegative, Positive, Ratio
from robopolicy.critics.q import CriticConfig
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace


@dataclass(frozen=True)
class MaxEntropyConfig(OffPolicyConfig):
    """Settings of soft actor-critic methods; network sizes as in Stable-Baselines3."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    temperature: Positive = 1.0  # initial weight of the entropy
    temperature_lr: NonNegative = 3e-4  # 0 keeps it fixed
    target_entropy: Finite | None = None  # [nats]; None: minus the number of action dimensions
    target_std: NonNegative = 0.0  # in place of it: the entropy of a Gaussian with this deviation (FlashSAC); 0: unused
    backup_entropy: bool = True  # entropy in the critic's target; false if success ends episodes with one reward


class Temperature(nn.Module):
    """Positive weight of the entropy, trained by Adam to keep the entropy near its target."""

    value: Tensor  # current weight

    def __init__(self, initial: float, lr: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))
        self.register_buffer("value", self.log.detach().exp())
        self.optimizer = make_adam(self, lr)

    @torch.no_grad()
    def step(self, logp: Tensor, target_entropy: float) -> None:
        """Raise the weight if the entropy `-logp` `(B,)` is below its target, else lower it.

        The loss is `log * (entropy - target)`, so its gradient needs no backward pass.
        """
        self.log.grad = torch.rsub(logp.mean(), -target_entropy)
        self.optimizer.step()
        self.value = self.log.exp()

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The weight and its optimiser."""
        return {"temperature": self, "temperature_optimizer": self.optimizer}


def target_entropy(config: MaxEntropyConfig, dims: int) -> float:
    """Target entropy [nats]; by default minus the `dims` dimensions of the log-probability."""
    if config.target_std:
        return dims * math.log(config.target_std * math.sqrt(2 * math.pi * math.e))
    return -float(dims) if config.target_entropy is None else config.target_entropy


def executed_dims(policy: Policy) -> int:
    """Number of dimensions of the executed part of a chunk."""
    return policy.spec.action_horizon * policy.spec.action_dim


# Policies over the noise of a frozen policy.


@dataclass(frozen=True)
class SteeringConfig(MaxEntropyConfig):
    """Settings of DSRL as in the paper, with smaller networks (there: 3 x 2048), for sparse rewards.

    The paper's reward is -1 until success, so its values are a hundred times larger and its temperature is 1.
    """

    noise_space: NoiseSpace = field(default_factory=NoiseSpace)  # noise that the actor controls, and its bound
    actor: GaussianConfig = STEERING_ACTOR  # network of the noise actor
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(activation="tanh"))
    utd: Ratio = 5.0  # critic steps per decision of one environment (published: 20 per step of 4 environments)
    temperature: Positive = 0.01  # initial weight of the entropy (published: 1)
    backup_entropy: bool = False  # entropy in the critic's target (published: true, false for pi0)
    target_entropy: Finite | None = 0.0  # of noise / bound [nats]; None: minus the number of free dimensions


def make_latent_policy(policy: Policy, config: SteeringConfig, algorithm: str) -> LatentPolicy:
    """Wrap `policy` with a noise actor; a policy that has one is returned unchanged.

    Raises `UserError` if the policy takes no noise, the noise is unbounded, or its actor or noise space differs.
    """
    if not config.noise_space.bound:
        raise UserError(f"{algorithm} needs bounded noise; set algorithm.noise_space.bound, e.g. to 1.5.")
    if not isinstance(policy, LatentPolicy):
        return LatentPolicy.from_base(policy, config.noise_space, config.actor)
    if policy.config.space != config.noise_space:
        raise UserError(
            f"The policy's noise space is {policy.config.space}, not {config.noise_space}; set algorithm.noise_space "
            "to the former, or start from its base."
        )
    theirs, expected = vars(policy.config.actor), vars(config.actor)
    other = [f"{key}={value}" for key, value in theirs.items() if key != "normalization" and value != expected[key]]
    if other:  # normalization is the base's
        raise UserError(f"The policy's noise actor has {', '.join(other)}; set algorithm.actor to it, or use the base.")
    return policy


def noise_dims(policy: LatentPolicy) -> int:
    """Number of noise dimensions that the actor controls."""
    return policy.actor.spec.horizon * policy.actor.spec.action_dim
