"""Shortcut policy: a flow whose network is told the length of its step (Frans et al. 2024).

The network `v(x, t, d)` learns two things at once. With d = 0 it is a rectified flow. With d = 1, 1/2, 1/4, ... it
learns to do in one step what it does itself in two steps of d/2 (self-consistency), so that K = 1, 2, 4, ... network
calls all give good chunks, from one network and one training run. Sampling takes K steps of d = 1/K.

Use it when few network calls matter, or when the number of calls is to be chosen after training. It needs somewhat
more updates than a plain flow, which is as good with 4 to 10 calls on many tasks.

Deviations from the paper: self-consistency targets come from the trained weights without gradient, not from averaged
ones; the self-consistent rows are drawn at random instead of being the first quarter of the batch, as the rows of a
weighted batch may be ordered; times of the flow rows follow `time_law` instead of a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.limits import Count, PartialShare, Several, Share, UpTo
from robopolicy.policies.heads.average_velocity import AverageVelocityConfig, AverageVelocityPolicy, Lesson
from robopolicy.policies.heads.generative import TIME_LAWS
from robopolicy.policies.noise import Randomness, normal


@dataclass(frozen=True)
class ShortcutConfig(AverageVelocityConfig):
    """Architecture, sampler and objective of a `ShortcutPolicy`."""

    steps: Annotated[Count, UpTo("finest")] = 1  # K, a power of two up to `finest`
    finest: Several = 128  # half steps of 1 / finest count as length 0; a power of two
    consistency_share: Share = 0.25  # share of the batch that learns self-consistency, the rest learns the flow
    delta: PartialShare = 1e-5  # noise left on the data end of the path

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("steps", self.steps), ("finest", self.finest)):
            if value & (value - 1):
                raise UserError(f"A shortcut policy halves its steps, so {name} must be a power of two, got {value}.")


class ShortcutPolicy(AverageVelocityPolicy):
    """Flow with a learned step for every length 1, 1/2, 1/4, ..."""

    name: ClassVar[str] = "shortcut"
    config_class = ShortcutConfig
    config: ShortcutConfig

    def times_of(self, t: Tensor, length: Tensor) -> Tensor:
        """Steps of the finest length are instantaneous to the network."""
        return super().times_of(t, torch.where(length <= 1 / self.config.finest, 0.0, length))

    def path(self, data: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Point at time `t` `(B,)` and velocity `(B, H, A)` of the line from `noise` to almost `data`."""
        velocity = data - (1 - self.config.delta) * noise
        return noise + t[:, None, None] * velocity, velocity

    def matching_loss(self, features: Tensor, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Flow matching `(B, H)`: the part of the objective with d = 0."""
        x, velocity = self.path(data, noise, t)
        return self.reduce(self.velocity(features, x, t) - velocity)

    def lesson(self, features: Tensor, data: Tensor, noise: Tensor, generator: Randomness) -> Lesson:
        """Flow matching on most rows, self-consistency on the others."""
        n = normal((len(data), 3), generator, data.device)
        uniform = torch.special.ndtr(n)
        exponent = (uniform[:, 2] * math.log2(self.config.finest)).floor().clamp(max=math.log2(self.config.finest) - 1)
        step = torch.exp2(-exponent)  # 1, 1/2, ..., 2 / finest
        start = ((uniform[:, 0] / step).floor() * step).minimum(1 - step)
        twice = uniform[:, 1] < self.config.consistency_share
        t = torch.where(twice, start, TIME_LAWS[self.config.time_law](n[:, 0]))
        x, target = self.path(data, noise, t)
        rows = twice.nonzero().flatten()
        if len(rows):
            halves = self.two_half_steps(features[rows], x[rows], t[rows], step[rows])
            target = target.index_copy(0, rows, halves.to(target.dtype))
        return Lesson(x, t, torch.where(twice, step, 0.0), target)

    @torch.no_grad()
    def two_half_steps(self, features: Tensor, x: Tensor, t: Tensor, step: Tensor) -> Tensor:
        """Average velocity `(B, H, A)` of two steps of half the length `step` `(B,)`."""
        half = step / 2
        first = self.average(features, x, t, half)
        second = self.average(features, x + half[:, None, None] * first, t + half, half)
        return (first + second) / 2
