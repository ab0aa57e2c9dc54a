"""Gradient clipping, and the interaction of the gradients of several losses."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MIN_STD = 1e-10  # standard deviation below which the scores of a group are 0


def backward(loss: Tensor, inputs: Sequence[Tensor] | None = None, *, weight: float = 1.0) -> None:
    """Add the gradient of `weight` times a scalar `loss` to its leaves, or only to `inputs`.

    `loss.backward()` fills a tensor with the weight every time, in a kernel of its own.
    """
    torch.autograd.backward(loss, _constant(weight, loss.dtype, loss.device), inputs=inputs)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale the gradients of `parameters` down to the joint norm `limit`, and return their norm before.

    Equals `torch.nn.utils.clip_grad_norm_` on one device, without its sorting by device and dtype, which takes longer
    than the rest for small networks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms: list[Tensor] = list(torch._foreach_norm(gradients))  # type: ignore[attr-defined]
    norm: Tensor = torch.stack(norms).square().sum().sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[attr-defined]
    return norm


def flat_gradient(loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Flat gradient `(P,)` of a scalar `loss`, 0 for unused parameters; retains the graph."""
    found = torch.autograd.grad(loss, list(parameters), retain_graph=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def influence(gradients: Tensor) -> Tensor:
    """Decrease `(O,)` of each loss per step on their sum, `<g_i, sum_j g_j>` of gradients (O, P); Lu et al. 2025."""
    return gradients @ gradients.sum(0)


def group_scores(values: Tensor, group: Tensor) -> Tensor:
    """Standardise values `(N, O)` within their group `(N,)`; 0 where all values of a group are equal."""
    index = (group[:, None] == group).int().argmax(1)  # first row of each group

    def mean(rows: Tensor) -> Tensor:  # in double precision, so that equal values stay equal
        sums = torch.zeros_like(rows).index_add_(0, index, rows)
        return sums[index] / torch.bincount(index)[index, None]

    centred = values - mean(values.double()).to(values.dtype)
    std = mean(centred.double().square()).sqrt().to(values.dtype)
    return torch.where(std > MIN_STD, centred / std.clamp(min=MIN_STD), 0.0)
