"""Gradients: their largest norm, and how those of several losses on the same parameters affect each other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MIN_STD = 1e-10  # standard deviation below which the scores of a group are 0


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients of `parameters` down to the joint norm `limit`; returns their norm before.

    Equals `torch.nn.utils.clip_grad_norm_` for parameters of one device, some with a gradient. That sorts them by
    device and type first, which for small networks takes longer than the rest.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms: list[Tensor] = list(torch._foreach_norm(gradients))  # type: ignore[attr-defined]
    norm: Tensor = torch.stack(norms).square().sum().sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[attr-defined]
    return norm


def flat_gradient(loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Gradient `(P,)` of a scalar `loss`, all parameters in a row, 0 where it has none; the graph is kept."""
    found = torch.autograd.grad(loss, list(parameters), retain_graph=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def influence(gradients: Tensor) -> Tensor:
    """How far a step down the sum of several losses lowers each of them: `<g_i, sum_j g_j>` (O,); Lu et al. 2025.

    Args:
        gradients: (O, P), of the losses.
    """
    return gradients @ gradients.sum(0)


def group_scores(values: Tensor, group: Tensor) -> Tensor:
    """Values `(N, O)` in standard deviations from the mean of their group `(N,)`; 0 where all of a group are equal."""
    places = (group[:, None] == group).int().argmax(1)  # the first row of the group stands for it

    def mean(rows: Tensor) -> Tensor:  # in double precision, so that equal values stay equal
        sums = torch.zeros_like(rows).index_add_(0, places, rows)
        return sums[places] / torch.bincount(places)[places, None]

    centred = values - mean(values.double()).to(values.dtype)
    std = mean(centred.double().square()).sqrt().to(values.dtype)
    return torch.where(std > MIN_STD, centred / std.clamp(min=MIN_STD), 0.0)
