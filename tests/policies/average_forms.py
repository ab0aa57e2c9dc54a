"""Closed-form networks of the few-step heads for data from N(M, S^2)."""

from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.policies.base import PolicySpec

POINT = PolicySpec({"state": (1,)}, action_dim=1)
CHUNK = PolicySpec({"state": (3,)}, action_dim=2, horizon=5, action_horizon=2, obs_horizon=2)
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "action_clip": 0.0}
SMALL: dict[str, Any] = {**RAW, "hidden": (32, 32), "unet_channels": (8, 16), "transformer_width": 16}
SMALL |= {"transformer_layers": 2}
BACKBONES = ("mlp", "unet", "transformer")
M, S = 0.4, 0.3


def nothing(rows: int) -> dict[str, Tensor]:
    """Observations without information."""
    return {"state": torch.zeros(rows, 1, 1)}


def deviation(t: Tensor) -> Tensor:
    """Standard deviation at linear time `t`."""
    return ((t * S) ** 2 + (1 - t) ** 2).sqrt()


def velocity(x: Tensor, t: Tensor) -> Tensor:
    """Velocity of the flow from N(0, 1) to N(M, S^2)."""
    return M + (t * S**2 - (1 - t)) / deviation(t) ** 2 * (x - t * M)


def flow_map(x: Tensor, t: Tensor, to: Tensor) -> Tensor:
    """The flow map of `x` from time `t` to time `to`."""
    return to * M + deviation(to) / deviation(t) * (x - t * M)


class ExactAverage(nn.Module):
    """Average velocity of the flow over a step, given its start time and length; records its inputs in `asked`."""

    def __init__(self, time_scale: float = 1.0) -> None:
        super().__init__()
        self.time_scale = time_scale
        self.asked: list[Tensor] = []

    def forward(self, x: Tensor, times: Tensor, features: Tensor) -> Tensor:
        times = times / self.time_scale
        self.asked.append(times.detach())
        t, length = times[:, 0].view(-1, 1, 1), times[:, 1].view(-1, 1, 1)
        step = length.clamp(min=1e-12)
        return torch.where(length > 1e-6, (flow_map(x, t, t + length) - x) / step, velocity(x, t))
