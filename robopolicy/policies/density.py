"""Densities of the heads: diagonal Gaussians with a log standard deviation, and categorical distributions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def normal_log_density(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of every element of `x` [nats]; to be summed over the dimensions of a decision."""
    z = (x - mean) * (-log_std).exp()
    return -0.5 * z.square() - log_std - HALF_LOG_2PI


def normal_entropy(log_std: Tensor) -> Tensor:
    """Entropy of every element [nats]."""
    return log_std + (0.5 + HALF_LOG_2PI)


def log_tanh_slope(u: Tensor) -> Tensor:
    """`log(1 - tanh(u)^2)` without cancellation: the change of a log-density by tanh, with negative sign."""
    return 2 * (math.log(2) - u - F.softplus(-2 * u))


class _Bounded(torch.autograd.Function):
    """`clamp` whose gradient is zero only where a descent step would increase the violation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward((x < low).to(x.dtype) - (x > high).to(x.dtype))
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (inwards,) = ctx.saved_tensors  # 1 below the lower bound, -1 above the upper bound
        return torch.where(slopes[0] * inwards > 0, 0.0, slopes[0]), None, None


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp a free parameter; the gradient can return a value outside of the bounds."""
    return _Bounded.apply(x, low, high)  # type: ignore[no-any-return]


class _TanhSample(torch.autograd.Function):
    """`sample_squashed` as one autograd node, as its small operations would cost more than a layer."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        std = log_std.exp()
        raw = torch.addcmul(mean, std, noise)
        drawn = raw.tanh()
        ctx.save_for_backward(drawn, std, noise)
        ctx.shapes = mean.shape, log_std.shape
        # (raw - mean) / std is the noise, and -log(1 - tanh(u)^2) is 4 softplus_2(u) - 2 u - 2 log 2.
        slope = F.softplus(raw, 2).sub_(raw, alpha=0.5)
        cost = torch.addcmul(log_std, noise, noise, value=0.5).sub_(slope, alpha=4)
        return drawn, torch.rsub(cost, -HALF_LOG_2PI - 2 * math.log(2))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        of_draw, of_density = gradients
        drawn, std, noise = ctx.saved_tensors
        # The derivative of -log(1 - tanh^2) is 2 tanh.
        of_raw = torch.ops.aten.tanh_backward(of_draw, drawn).addcmul_(of_density, drawn, value=2)
        mean_shape, std_shape = ctx.shapes
        return of_raw.sum_to_size(mean_shape), (of_raw * (std * noise) - of_density).sum_to_size(std_shape), None


def sample_squashed(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """`tanh(mean + std * noise)` and the log-density of every element [nats]; gradients reach mean and std."""
    drawn, density = _TanhSample.apply(mean, log_std, noise)  # type: ignore[misc]
    return drawn, density


def sample_category(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """Sample a category `(B,)` int64 from `log_weight` `(B, M)` by inverse transform of `uniform` `(B,)`."""
    passed = uniform.unsqueeze(1) >= log_weight.exp().cumsum(1)
    return passed.sum(1).clamp(max=log_weight.shape[1] - 1)
