"""Data-parallel training: each process has its own rows, and all take the same gradient steps.

In a single process every function returns its input without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
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


def local_size(total: int) -> int:
    """Share of this process in `total` rows, at least one."""
    return max(1, total // world_size())


def all_reduce_mean(value: Tensor) -> Tensor:
    """Mean of `value` over the processes, detached; its shape must be the same in all."""
    if world_size() == 1:
        return value
    total = _transferable(value.detach().clone())
    dist.all_reduce(total)
    return (total / world_size()).to(value.device)


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
    rows = _transferable(value.movedim(dim, 0).contiguous())
    rows = rows.view(torch.uint8) if value.dtype == torch.bool else rows
    counts = _gather_counts(len(rows))
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    whole = whole.view(torch.bool) if value.dtype == torch.bool else whole
    return whole.movedim(0, dim).to(value.device)


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Bytes of all processes, in their order."""
    if world_size() == 1:
        return [data]
    whole = bytes(all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy())
    return [whole[start:end] for start, end in pairwise(accumulate(_gather_counts(len(data)), initial=0))]


def all_gather_moments(count: int, mean: Tensor, squares: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
    """Number of rows, means `(...)` and sums of squared deviations `(...)` of every process."""
    if world_size() == 1:
        return [(count, mean, squares)]
    own = torch.stack((torch.full_like(mean, count), mean, squares))  # (3, ...)
    return [(part[0].flatten()[0], part[1], part[2]) for part in all_gather(own[None])]


def all_reduce_max(number: int) -> int:
    """Maximum of `number` over the processes."""
    return max(_gather_counts(number))


def all_reduce_sum(number: int) -> int:
    """Sum of `number` over the processes."""
    return sum(_gather_counts(number))


def _gather_counts(number: int) -> list[int]:
    """Numbers of all processes, exchanged by the CPU, which waits for no device."""
    if world_size() == 1:
        return [number]
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(value) for value in numbers]


def _transferable(value: Tensor) -> Tensor:
    """`value`, or its copy on the CPU if no backend of torch exchanges tensors of its device."""
    return value if value.device.type in dist.Backend.default_device_backend_map else value.cpu()
