"""Gradients: how long they may be, and where those of several losses on the same parameters conflict."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SMALLEST = 1e-10  # squared norm of a gradient below which it has no direction


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


def parallel_share(gradient: Tensor, along: Tensor) -> Tensor:
    """How much of `along` `(P,)` is contained in `gradient` `(P,)`: `<g, a> / |a|^2`, negative where they conflict."""
    return gradient @ along / (along @ along).clamp(min=SMALLEST)


def orthogonal_sum(kept: Tensor, added: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """A loss with the whole gradient of `kept`, and of that of `added` the part orthogonal to it (ODICE, S095).

    With `c = <g_a, g_k> / |g_k|^2` the gradient of `(1 - c) kept + added` is `g_k + (g_a - c g_k)`: whatever `added`
    asks for, a small step lowers `kept` by as much as if it stood alone.

    Args:
        kept: Scalar loss.
        added: Scalar loss.
        parameters: What both are differentiated in.

    Returns:
        The loss, and c.
    """
    learned = list(parameters)
    share = parallel_share(flat_gradient(added, learned), flat_gradient(kept, learned)).detach()
    return (1 - share) * kept + added, share


def influence(gradients: Tensor) -> Tensor:
    """How far a step down the sum of several losses lowers each of them: `<g_i, sum_j g_j>` (O,), S114.

    Args:
        gradients: (O, P), of the losses.
    """
    return gradients @ gradients.sum(0)


def group_scores(values: Tensor, group: Tensor) -> Tensor:
    """Values `(N, O)` in standard deviations from the mean of their group `(N,)`; 0 where all of a group are equal."""
    places = (group[:, None] == group).int().argmax(1)  # the first row of the group stands for it

    def mean(rows: Tensor) -> Tensor:  # in double precision, which does not tell apart what is equal
        sums = torch.zeros_like(rows).index_add_(0, places, rows)
        return sums[places] / torch.bincount(places)[places, None]

    centred = values - mean(values.double()).to(values.dtype)
    std = mean(centred.double().square()).sqrt().to(values.dtype)
    return torch.where(std > SMALLEST, centred / std.clamp(min=SMALLEST), 0.0)
