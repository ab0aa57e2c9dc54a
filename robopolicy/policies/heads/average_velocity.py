"""What the heads that learn steps of any length share: a network of two times, point of departure and step length.

`average(features, x, t, h)` is the mean velocity along the flow from `x` at time `t` to time `t + h`, so one step of
length h is `x + h * average`. Length 0 is the instantaneous velocity of a plain flow: it is what `velocity` returns
and what `matching_loss` trains. Shortcut models and MeanFlow differ in how they learn the other lengths.

Iterates are clipped as those of a plain flow are, see there; with one step this is no more than a bound on the chunk.
Their chains are those of the flow family, so whatever fine-tunes a flow's transitions (ReinFlow) fine-tunes these.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from robopolicy.limits import NotNegative, Positive
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.noise import Randomness, normal


@dataclass(frozen=True)
class AverageVelocityConfig(FlowConfig):
    """Architecture and sampler of the heads with two times."""

    dispersive_coef: NotNegative = 0.0  # weight of the dispersive loss on the middle layer; DMPO takes 0.5, 0 disables
    dispersive_temperature: Positive = 0.3


class Lesson(NamedTuple):
    """Where the network is asked in training and what it should have answered."""

    x: Tensor  # (B, H, A)
    t: Tensor  # (B,)
    length: Tensor  # (B,) of the step
    target: Tensor  # (B, H, A) average velocity, without gradient


class AverageVelocityPolicy(FlowPolicy):
    """Base of shortcut and MeanFlow heads."""

    times = 2
    config: AverageVelocityConfig

    @abstractmethod
    def lesson(self, features: Tensor, data: Tensor, noise: Tensor, generator: Randomness) -> Lesson:
        """Points, step lengths and targets of one minibatch."""

    def reduce(self, error: Tensor) -> Tensor:
        """Loss `(B, H)` of the regression `error` `(B, H, A)`."""
        return error.square().mean(-1)

    def times_of(self, t: Tensor, length: Tensor) -> Tensor:
        """How the network is told `(B, 2)` of a step."""
        return torch.stack([t, length], -1)

    def average(self, features: Tensor, x: Tensor, t: Tensor, length: Tensor) -> Tensor:
        """Average velocity `(B, H, A)` of the step from `x` at `t` `(B,)` to `t + length`."""
        return self.backbone(x, self.times_of(t, length), features)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Instantaneous velocity: that of a step of length 0."""
        return self.average(features, x, t, torch.zeros_like(t))

    def step(self, features: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """One learned step of length 1 / K from time k / K, before the bound on it."""
        t = self.grid[k]
        length = 1 / self.config.steps
        return x + self.average(features, x, t, torch.full_like(t, length)) * length

    def training_loss(self, features: Tensor, data: Tensor, generator: Randomness) -> Tensor:
        """Regression on the targets of `lesson`, with the dispersive loss if it is switched on."""
        noise = normal(data.shape, generator, data.device)
        x, t, length, target = self.lesson(features, data, noise, generator)
        loss = self.reduce(self.average(features, x, t, length) - target)
        if self.config.dispersive_coef:
            middle = self.backbone.representation(x, self.times_of(t, length), features)  # type: ignore[operator]
            loss = loss + self.config.dispersive_coef * dispersive_loss(middle, self.config.dispersive_temperature)
        return loss


def dispersive_loss(z: Tensor, temperature: float) -> Tensor:
    """InfoNCE without positives, with squared distances (Wang and He 2025): falls as the rows of `z` `(B, D)` part.

    `log mean_ij exp(-|z_i - z_j|^2 / (D temperature))` over all pairs, a row with itself included.
    """
    distance = torch.pdist(z.float()).square() / z.shape[1]  # (B (B - 1) / 2,)
    both = torch.cat([distance, distance, distance.new_zeros(len(z))]) / temperature
    return torch.logsumexp(-both, 0) - torch.log(torch.tensor(float(len(both)), device=z.device))
