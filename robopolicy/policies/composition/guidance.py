"""Guidance by the values of a critic, and Langevin steps at every noise level.

Guidance by values samples from the density of the parents times exp(strength * Q). The gradient of Q is taken at the
clean chunk that the parents expect, and mapped back to the noisy chunk as if normalised actions were Gaussian with
standard deviation `data_std`; for such data and a linear Q the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.constraints import Finite, Positive, PositiveInt, Validated
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Policy
from robopolicy.policies.wrappers.best_of_n import REDUCTIONS, reduce_members
from robopolicy.policies.wrappers.nested import same_policy


@dataclass(frozen=True)
class ValueGuidance(Validated):
    """Guidance of the samples by a Q ensemble."""

    critic: CriticConfig = field(default_factory=CriticConfig)  # Q ensemble
    strength: Finite = 1.0  # nats per unit of Q
    data_std: Positive = 0.5  # assumed standard deviation of normalised actions
    reduction: str = "mean"  # mean | min over the ensemble

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", self.reduction, REDUCTIONS)


def value_gradient(critic: QEnsemble, features: Tensor, normalizer: Normalizer, data: Tensor, reduction: str) -> Tensor:
    """Gradient `(B, H, A)` of the value at the normalised chunk `data`, given `critic.encode(obs)`.

    Differentiable if gradients are recorded; also works under `no_grad` and in inference mode.
    """
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd rejects inference tensors, but accepts their clones.
        x = data if recorded and data.requires_grad else data.detach().clone().requires_grad_()
        output = critic.output(features.clone(), normalizer.denormalize(x))
        value = reduce_members(critic.value(output), reduction)
        return torch.autograd.grad(value.sum(), x, create_graph=recorded)[0]


def guide(velocity: Tensor, gradient: Tensor, t: Tensor, guidance: ValueGuidance) -> Tensor:
    """Add guidance by the value `gradient` to `velocity` `(B, H, A)` at time `t` `(B, 1, 1)`."""
    power = guidance.data_std**2
    return velocity + guidance.strength * power * (1 - t) / (t.square() * power + (1 - t).square()) * gradient


@dataclass(frozen=True)
class Langevin(Validated):
    """Corrector: Langevin steps, which converge to the composed density of a noise level.

    Without them, the steps between levels only approximate that density.
    """

    steps: PositiveInt = 1  # at every noise level except the last
    size: Positive = 0.05  # step size, in units of the noise variance

    def move(self, x: Tensor, velocity: Tensor, noise: Tensor, t: float) -> Tensor:
        """Take one step at time `t`, given the joint velocity at `x`."""
        score = (t * velocity - x) / (1 - t)
        length = self.size * (1 - t) ** 2
        return x + length * score + (2 * length) ** 0.5 * noise


def check_critic(critic: QEnsemble, policy: Policy) -> QEnsemble:
    """Return `critic` if it has the observations and actions of `policy`; raise a `UserError` otherwise."""
    fresh = QEnsemble(critic.config, policy)
    if not same_policy(fresh, critic) or critic.steps != fresh.steps:
        raise UserError(
            "The critic has other observations or actions than the composed policy; train it on "
            f"{policy.spec.obs_horizon} step(s) of {sorted(policy.spec.observation)} and the "
            f"{policy.spec.action_horizon} executed actions."
        )
    return critic
