"""Embedding of the path time t in [0, 1]."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError


class SinusoidalEmbedding(nn.Module):
    """Sines and cosines of t at `dim / 2` angular frequencies, geometric from 1 to 100; no parameters.

    The usual transformer frequencies are for integer steps 0..1000; these are for the unit interval.
    """

    frequencies: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 4 or dim % 2:
            raise UserError(f"The time embedding needs an even width of at least 4, got {dim}.")
        frequencies = torch.exp(torch.linspace(0.0, math.log(100.0), dim // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        """Embed `t` `(...)` as `(..., dim)`."""
        angle = t.unsqueeze(-1) * self.frequencies
        return torch.cat([angle.sin(), angle.cos()], -1)


class TimeEmbedding(nn.Module):
    """Sinusoid -> linear (4x) -> Mish -> linear on concatenated embeddings: `(..., times)` -> `(..., dim)`.

    The embedding of a single time with `dim` 1 is the time itself, as in the public codes of FQL and QC.
    """

    def __init__(self, dim: int, times: int = 1) -> None:
        super().__init__()
        self.times, self.raw = times, dim == times == 1
        if not self.raw:
            self.sinusoid = SinusoidalEmbedding(dim)
            self.mlp = nn.Sequential(nn.Linear(times * dim, 4 * dim), nn.Mish(), nn.Linear(4 * dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        """Embed `t`, `(...)` for one time."""
        if self.raw:
            return t.unsqueeze(-1)
        embedded = self.sinusoid(t)
        return self.mlp(embedded if self.times == 1 else embedded.flatten(-2))


def network_rows(x: Tensor, time: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a denoising network, one per iterate: chunks `(R, H, A)`, times `(R, D)`, features `(R, To, F)`.

    Iterates are `(B, ..., H, A)`, time embeddings broadcast to `(B, ..., D)`, and features are `(B, To, F)`.
    """
    shape = x.shape[:-2]
    for count in shape[1:]:
        features = features.repeat_interleave(count, 0)
    return x.flatten(0, -3), time.expand(*shape, -1).flatten(0, -2), features
