"""Parts of maximum-entropy algorithms: the learned weight of the entropy, its settings, and policies over noise.

SAC and its relatives move the actor and the weight of its entropy by one optimiser. DSRL is soft actor-critic whose
actor chooses the noise of a frozen diffusion or flow policy (`LatentPolicy`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.off_policy import OffPolicyConfig
from robopolicy.constraints import Finite, NonNegative, Positive, Ratio
from robopolicy.critics.q import CriticConfig
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace


@dataclass(frozen=True)
class MaxEntropyConfig(OffPolicyConfig):
    """Settings of every soft actor-critic; the sizes are Stable-Baselines3's."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    temperature: Positive = 1.0  # initial weight of the entropy
    temperature_lr: NonNegative = 3e-4  # 0 keeps it fixed
    target_entropy: Finite | None = None  # nats; None is minus the number of action dimensions that the entropy counts
    backup_entropy: bool = True  # entropy in the critic's target; false where success ends episodes and pays once


class Temperature(nn.Module):
    """Positive weight of the entropy, learned so that the entropy stays near its target."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))

    @property
    def value(self) -> Tensor:
        """Current weight."""
        return self.log.exp()

    def loss(self, logp: Tensor, target_entropy: float) -> Tensor:
        """Loss whose descent grows the weight while the entropy `-logp` `(B,)` lies below its target."""
        return -(self.log * (logp.detach() + target_entropy)).mean()


def target_entropy(config: MaxEntropyConfig, dims: int) -> float:
    """Entropy in nats that the settings ask for; minus the `dims` dimensions of the log-probability where left out."""
    return -float(dims) if config.target_entropy is None else config.target_entropy


def executed_dims(policy: Policy) -> int:
    """Numbers in the executed part of a chunk."""
    return policy.spec.action_horizon * policy.spec.action_dim


def actor_optimizer(actor: nn.Module, temperature: Temperature, config: MaxEntropyConfig) -> torch.optim.Optimizer:
    """Adam over actor and temperature, whose losses have no gradient for each other."""
    groups = [
        {"params": list(actor.parameters()), "lr": config.lr},
        {"params": list(temperature.parameters()), "lr": config.temperature_lr},
    ]
    return torch.optim.Adam(groups, fused=True)


# Policies over the noise of a frozen policy.


@dataclass(frozen=True)
class SteeringConfig(MaxEntropyConfig):
    """Settings of both variants of DSRL: the paper's with smaller networks (there: 3 x 2048), for sparse rewards.

    The paper pays -1 until success, so that values are a hundred times larger and a temperature of 1 fits them.
    """

    noise_space: NoiseSpace = field(default_factory=NoiseSpace)  # which noise the actor chooses, and its bound
    actor: GaussianConfig = STEERING_ACTOR  # network that chooses the noise
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(activation="tanh"))
    utd: Ratio = 5.0  # critic steps per decision of one environment (published: 20 per step of 4 environments)
    temperature: Positive = 0.01  # initial weight of the entropy (published: 1)
    backup_entropy: bool = False  # entropy in the critic's target (published: true, false for pi0)
    target_entropy: Finite | None = 0.0  # nats of noise / bound; None is minus the number of free noise dimensions


def make_latent_policy(policy: Policy, config: SteeringConfig, algorithm: str) -> LatentPolicy:
    """`policy` with an actor that chooses its noise; one that has such an actor already is returned as it is.

    Raises:
        UserError: It takes no noise, the noise is unbounded, or it has another actor or noise space.
    """
    if not config.noise_space.bound:
        raise UserError(
            f"{algorithm} keeps the noise near what the base knows; set algorithm.noise_space.bound, e.g. to 1.5."
        )
    if not isinstance(policy, LatentPolicy):
        return LatentPolicy.from_base(policy, config.noise_space, config.actor)
    if policy.config.space != config.noise_space:
        raise UserError(
            f"The policy is steered in {policy.config.space}, not in {config.noise_space}; set algorithm.noise_space "
            "to the former, or start from its base."
        )
    theirs, wanted = vars(policy.config.actor), vars(config.actor)
    other = [f"{key}={value}" for key, value in theirs.items() if key != "normalization" and value != wanted[key]]
    if other:  # normalization is the base's
        raise UserError(
            f"The policy is steered by an actor with {', '.join(other)}; set algorithm.actor to that, or start from "
            "its base."
        )
    return policy


def noise_dims(policy: LatentPolicy) -> int:
    """Numbers of the noise that the actor chooses."""
    return policy.actor.spec.horizon * policy.actor.spec.action_dim
