"""Embedding of the path time t in [0, 1]."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError


class SinusoidalEmbedding(nn.Module):
    """Sines and cosines of t at `dim / 2` angular frequencies, geometric from 1 to 100; no parameters.

    The usual transformer frequencies assume integer steps 0..1000; these cover the unit interval instead.
    """

    frequencies: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 4 or dim % 2:
            raise UserError(f"The time embedding needs an even width of at least 4, got {dim}.")
        frequencies = torch.exp(torch.linspace(0.0, math.log(100.0), dim // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        """Embed `t` `(B,)` as `(B, dim)`."""
        angle = t.unsqueeze(-1) * self.frequencies
        return torch.cat([angle.sin(), angle.cos()], -1)


class TimeEmbedding(nn.Module):
    """Sinusoid -> linear (4x) -> Mish -> linear, several times side by side: `(B, times)` -> `(B, dim)`."""

    def __init__(self, dim: int, times: int = 1) -> None:
        super().__init__()
        self.sinusoid = SinusoidalEmbedding(dim)
        self.mlp = nn.Sequential(nn.Linear(times * dim, 4 * dim), nn.Mish(), nn.Linear(4 * dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        """Embed `t`, `(B,)` for one time."""
        return self.mlp(self.sinusoid(t).flatten(1))
