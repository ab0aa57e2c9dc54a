"""The probability-flow ODE of any head, solved through its `field` on the linear path: for those who learn from it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from robopolicy.policies.base import Observation, Policy


@torch.no_grad()
def ode_step(policy: Policy, obs: Observation, x: Tensor, t: Tensor, to: Tensor) -> Tensor:
    """Point `(B, H, A)` at time `to` `(B,)` of the trajectory through `x` at time `t` `(B,)`, by one step of Heun.

    A step that ends at 1 is Euler's: no training time lies there, so the field is not asked.
    """
    width = (to - t)[:, None, None]
    first = policy.field(obs, x, t)
    if bool((to >= 1).all()):
        return x + width * first
    second = policy.field(obs, x + width * first, to)
    second = torch.where((to < 1)[:, None, None], second, first)
    return x + width * (first + second) / 2


def ode_solve(policy: Policy, obs: Observation, noise: Tensor, steps: int) -> Tensor:
    """Data end `(B, H, A)` of the trajectories that start at `noise`, in normalised units and without bounds."""
    x, times = noise, torch.linspace(0, 1, steps + 1, device=noise.device)
    for t, to in pairwise(times):
        x = ode_step(policy, obs, x, t.expand(len(x)), to.expand(len(x)))
    return x
