"""Temporal U-Net over an action chunk, conditioned by FiLM (Diffusion Policy's convolutional backbone)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.nets.time import TimeEmbedding


class ConvBlock(nn.Sequential):
    """Convolution over time, GroupNorm, Mish; the length is kept."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, groups: int) -> None:
        super().__init__(
            nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2),
            nn.GroupNorm(groups, out_channels),
            nn.Mish(),
        )


class FiLMBlock(nn.Module):
    """Two convolutions with a skip; the condition scales and shifts the channels between them."""

    def __init__(self, in_channels: int, out_channels: int, condition_dim: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.first = ConvBlock(in_channels, out_channels, kernel, groups)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(condition_dim, 2 * out_channels))
        self.second = ConvBlock(out_channels, out_channels, kernel, groups)
        self.skip = nn.Identity() if in_channels == out_channels else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map `x` `(B, C, L)` and `condition` `(B, D)` to `(B, C', L)`."""
        scale, shift = self.film(condition).unsqueeze(-1).chunk(2, 1)
        return self.second(self.first(x) * (1 + scale) + shift) + self.skip(x)


class UNet1d(nn.Module):
    """Velocity network `(B, H, A), (B,), (B, To, F)` -> `(B, H, A)`; pads H to a multiple of 2^(levels - 1)."""

    def __init__(
        self,
        action_dim: int,
        feature_dim: int,
        *,
        channels: Sequence[int] = (256, 512, 1024),
        time_dim: int = 256,
        kernel: int = 5,
        groups: int = 8,
    ) -> None:
        """Build the network.

        Args:
            action_dim: A.
            feature_dim: Width of the flattened observation features, To * F.
            channels: Width of each level; every further level halves the length.
            time_dim: Width of the time embedding.
            kernel: Odd kernel size.
            groups: Groups of every GroupNorm; divides all channels.
        """
        super().__init__()
        if kernel % 2 == 0 or any(width % groups for width in channels):
            raise UserError(f"The U-Net needs an odd kernel and channels divisible by {groups}, got {list(channels)}.")
        condition_dim = time_dim + feature_dim

        def block(in_channels: int, out_channels: int) -> FiLMBlock:
            return FiLMBlock(in_channels, out_channels, condition_dim, kernel, groups)

        self.stride = 2 ** (len(channels) - 1)
        self.time = TimeEmbedding(time_dim)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width = action_dim
        for level, wider in enumerate(channels):
            last = level == len(channels) - 1
            shrink = nn.Identity() if last else nn.Conv1d(wider, wider, 3, 2, 1)
            self.down.append(nn.ModuleList([block(width, wider), block(wider, wider), shrink]))
            width = wider
        self.middle = nn.ModuleList([block(width, width), block(width, width)])
        for narrower in reversed(channels[:-1]):
            # The skip of the level above joins after the transposed convolution has restored its length.
            grow = nn.ConvTranspose1d(width, narrower, 4, 2, 1)
            self.up.append(nn.ModuleList([grow, block(2 * narrower, narrower), block(narrower, narrower)]))
            width = narrower
        self.output = nn.Sequential(ConvBlock(width, width, kernel, groups), nn.Conv1d(width, action_dim, 1))

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Predict the velocity at `x` `(B, H, A)` and time `t` `(B,)` given `features` `(B, To, F)`."""
        horizon = x.shape[1]
        condition = torch.cat([self.time(t), features.flatten(1)], -1)
        h = x.transpose(1, 2)  # (B, A, H)
        if horizon % self.stride:
            h = F.pad(h, (0, self.stride - horizon % self.stride), mode="replicate")
        skips: list[Tensor] = []
        for first, second, shrink in self.down:  # type: ignore[misc]
            h = second(first(h, condition), condition)
            skips.append(h)
            h = shrink(h)
        for part in self.middle:
            h = part(h, condition)
        skips.pop()
        for grow, first, second in self.up:  # type: ignore[misc]
            h = second(first(torch.cat([grow(h), skips.pop()], 1), condition), condition)
        return self.output(h)[..., :horizon].transpose(1, 2)
