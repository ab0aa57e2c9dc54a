"""Temporal U-Net over an action chunk, conditioned by `FiLM` layers (Diffusion Policy's convolutional backbone)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.nets.time import TimeEmbedding, network_rows


class ConvBlock(nn.Sequential):
    """Length-preserving convolution over time, GroupNorm and Mish."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, groups: int) -> None:
        super().__init__(
            nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2),
            nn.GroupNorm(min(groups, out_channels // 2), out_channels),  # a group needs two channels
            nn.Mish(),
        )


class FiLMBlock(nn.Module):
    """Two convolutions with a skip connection and `FiLM` conditioning between them."""

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


class DownLevel(nn.Module):
    """Two blocks at one resolution and, except at the last level, a convolution that halves the length."""

    def __init__(self, first: FiLMBlock, second: FiLMBlock, width: int, *, last: bool) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.shrink = nn.Identity() if last else nn.Conv1d(width, width, 3, 2, 1)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the next level and the skip connection."""
        x = self.second(self.first(x, condition), condition)
        return self.shrink(x), x


class UpLevel(nn.Module):
    """Upsampling, concatenation with the skip connection of that resolution, and two blocks."""

    def __init__(self, grow: nn.Module, first: FiLMBlock, second: FiLMBlock) -> None:
        super().__init__()
        self.grow, self.first, self.second = grow, first, second

    def forward(self, x: Tensor, skip: Tensor, condition: Tensor) -> Tensor:
        """Map `(B, C, L)` and `skip` `(B, C', 2 L)` to `(B, C', 2 L)`."""
        return self.second(self.first(torch.cat([self.grow(x), skip], 1), condition), condition)


class UNet1d(nn.Module):
    """Denoising network `(B, H, A), (B,), (B, To, F)` -> `(B, H, A)`; pads H to a multiple of 2^(levels - 1)."""

    def __init__(
        self,
        action_dim: int,
        feature_dim: int,
        *,
        channels: Sequence[int] = (256, 512, 1024),
        time_dim: int = 256,
        kernel: int = 5,
        groups: int = 8,
        times: int = 1,
    ) -> None:
        """Build the network; `feature_dim` is To * F, `channels` has the width of each level, `kernel` is odd."""
        super().__init__()
        if kernel % 2 == 0 or not channels or any(width < 1 or width % groups for width in channels):
            found = f"{kernel} and {list(channels)}"
            raise UserError(f"The U-Net needs an odd kernel and channels divisible by {groups}; got {found}.")
        condition_dim = time_dim + feature_dim

        def block(in_channels: int, out_channels: int) -> FiLMBlock:
            return FiLMBlock(in_channels, out_channels, condition_dim, kernel, groups)

        self.stride = 2 ** (len(channels) - 1)
        self.time = TimeEmbedding(time_dim, times)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width = action_dim
        for level, wider in enumerate(channels):
            last = level == len(channels) - 1
            self.down.append(DownLevel(block(width, wider), block(wider, wider), wider, last=last))
            width = wider
        self.middle = nn.ModuleList([block(width, width), block(width, width)])
        for narrower in reversed(channels[:-1]):
            grow = nn.ConvTranspose1d(width, narrower, 4, 2, 1)
            self.up.append(UpLevel(grow, block(2 * narrower, narrower), block(narrower, narrower)))
            width = narrower
        self.output = nn.Sequential(ConvBlock(width, width, kernel, groups), nn.Conv1d(width, action_dim, 1))

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Predict at `x` `(B, ..., H, A)` and `t`, given `features` `(B, To, F)`; see `network_rows`."""
        rows, condition = self._conditioned(x, t, features)
        h, skips = self._descend(rows, condition)
        for level in self.up:
            h = level(h, skips.pop(), condition)
        return self.output(h)[..., : x.shape[-2]].transpose(1, 2).reshape(x.shape)

    def representation(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Activations `(B, C * L)` at the lowest resolution."""
        return self._descend(*self._conditioned(x, t, features))[0].flatten(1)

    def _conditioned(self, x: Tensor, t: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Chunks `(R, H, A)` and conditions `(R, D)`."""
        x, time, features = network_rows(x, self.time(t), features)
        return x, torch.cat([time, features.flatten(1)], -1)

    def _descend(self, x: Tensor, condition: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Activations `(B, C, L)` after the middle blocks, and the skip connections of the upper levels."""
        horizon = x.shape[1]
        h = x.transpose(1, 2)  # (B, A, H)
        if horizon % self.stride:
            h = F.pad(h, (0, self.stride - horizon % self.stride), mode="replicate")
        skips: list[Tensor] = []
        for level in self.down:
            h, skip = level(h, condition)
            skips.append(skip)
        skips.pop()  # the lowest level has no counterpart
        for middle in self.middle:
            h = middle(h, condition)
        return h, skips
