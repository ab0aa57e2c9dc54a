"""Sources of randomness for policies: one generator for the batch, or one stream per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from robopolicy.streams import stream


class RowStreams:
    """Independent Gaussian streams, one per batch row.

    Row i draws from a counter-based generator keyed by `(seeds[i], steps[i])`, so its noise does not depend on the
    batch size, on its position or on its neighbours. Evaluation keys rows by episode seed and decision index.
    """

    def __init__(self, seeds: Sequence[int], steps: Sequence[int]) -> None:
        self._streams = [stream(seed, step) for seed, step in zip(seeds, steps, strict=True)]

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal `(B, ...)` float32; `shape[0]` must equal the number of rows."""
        if shape[0] != len(self._streams):
            raise ValueError(f"{len(self._streams)} streams cannot fill a batch of {shape[0]} rows.")
        rows = [own.standard_normal(tuple(shape[1:]), dtype=np.float32) for own in self._streams]
        return torch.from_numpy(np.stack(rows))


class RepeatedStreams(RowStreams):
    """Streams for a batch in which every row stands `count` times in a row: each row's draws are shared out."""

    def __init__(self, streams: RowStreams, count: int) -> None:
        super().__init__([], [])
        self._inner, self._count = streams, count

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal `(B * count, ...)`."""
        return self._inner.normal((shape[0] // self._count, self._count, *shape[1:])).flatten(0, 1)


Randomness = torch.Generator | RowStreams | None
"""What `generator=` accepts: a torch generator, one stream per row, or None for the global generator."""


def normal(shape: Sequence[int], generator: Randomness, device: torch.device) -> Tensor:
    """Draw standard normal noise of `shape` on `device` from any source of randomness."""
    if isinstance(generator, RowStreams):
        return generator.normal(shape).to(device)
    if generator is not None and generator.device != device:
        return torch.randn(tuple(shape), generator=generator, device=generator.device).to(device)
    return torch.randn(tuple(shape), generator=generator, device=device)


def repeated(generator: Randomness, count: int) -> Randomness:
    """A source of randomness for a batch whose rows were repeated `count` times each."""
    return RepeatedStreams(generator, count) if isinstance(generator, RowStreams) else generator


def uniform(shape: Sequence[int], generator: Randomness, device: torch.device) -> Tensor:
    """Draw uniform noise of `shape` on (0, 1), exclusive, from any source of randomness."""
    return torch.special.ndtr(normal(shape, generator, device)).clamp(1e-7, 1 - 1e-7)
