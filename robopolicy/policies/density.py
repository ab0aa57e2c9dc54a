"""Densities the heads share: diagonal Gaussians from their log standard deviation, and categorical choices."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def normal_log_density(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of every element of `x` [nats]; sum over the dimensions that are one decision."""
    z = (x - mean) * (-log_std).exp()
    return -0.5 * z * z - log_std - HALF_LOG_2PI


def normal_entropy(log_std: Tensor) -> Tensor:
    """Entropy of every element [nats]."""
    return log_std + (0.5 + HALF_LOG_2PI)


def log_tanh_slope(u: Tensor) -> Tensor:
    """`log(1 - tanh(u)^2)` without cancellation: what squashing by tanh takes off a log-density."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


def choose(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """Category `(B,)` int64 drawn from `log_weight` `(B, M)` by inverting its distribution function at `uniform`."""
    passed = uniform.unsqueeze(1) >= log_weight.exp().cumsum(1)
    return passed.sum(1).clamp(max=log_weight.shape[1] - 1)
