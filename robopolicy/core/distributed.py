"""Data-parallel training: each process runs its own environments, and all take the same gradient steps.

In a single process every function returns its input without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # its functions have no type annotations


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Index of this process; only process 0 evaluates and writes files."""
    return dist.get_rank() if world_size() > 1 else 0


def all_reduce_mean(value: Tensor) -> Tensor:
    """Mean of `value` over the processes, detached; its shape must be the same in all."""
    if world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / world_size()


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace the gradients by their means over the processes, in one all-reduce."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if world_size() == 1 or not gradients:
        return
    means = all_reduce_mean(torch.cat([gradient.flatten() for gradient in gradients]))
    parts = cast(Any, means).split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, parts, strict=True):
        gradient.copy_(mean.view_as(gradient))


def all_gather(value: Tensor, dim: int = 0) -> Tensor:
    """Concatenate the values of all processes along `dim`, the only dimension whose size may differ."""
    if world_size() == 1:
        return value
    rows = value.movedim(dim, 0).contiguous()
    rows = rows.view(torch.uint8) if value.dtype == torch.bool else rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(rows)], device=rows.device))
    counts = [int(size) for size in sizes]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    whole = whole.view(torch.bool) if value.dtype == torch.bool else whole
    return whole.movedim(0, dim)


def all_reduce_max(number: int) -> int:
    """Maximum of `number` over the processes."""
    if world_size() == 1:
        return number
    value = torch.tensor([number])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)
