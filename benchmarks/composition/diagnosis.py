"""Disagreement of two parents along the path of a sample: without one, a composition can change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.wrappers.composed import compose

STEPS = 10  # Euler steps of a path
WEIGHTS = ((0.75, 0.25), (0.5, 0.5), (0.25, 0.75))  # both parents active, so that all paths have one frame


@torch.no_grad()
def disagreement(parents: list[Policy], obs: Observation, seed: int = 0) -> list[float]:
    """Difference of the velocities of two parents over their mean velocity, root mean squares, by step of the path.

    The path belongs to the convex composition with equal weights, from noise to a chunk, for `obs` `{key: (B, ...)}`.
    """
    first, middle, second = (compose(parents, "convex", weights=weights) for weights in WEIGHTS)
    rows = len(next(iter(obs.values())))
    x = torch.randn((rows, *middle.noise_shape), generator=torch.Generator().manual_seed(seed))
    found: list[float] = []
    for step in range(STEPS):
        t = torch.full((rows,), step / STEPS)
        velocity = middle.field(obs, x, t)
        gap = 2 * (first.field(obs, x, t) - second.field(obs, x, t))  # fields are linear in the weights
        found.append(float(_rms(gap) / _rms(velocity)))
        x = x + velocity / STEPS
    return found


def _rms(value: Tensor) -> Tensor:
    return value.square().mean().sqrt()
