"""Networks of the latent world model: an autoencoder of frames, a state network, its decoder, and an EDM denoiser."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.nets.mlp import MLP

DOWN = 8  # pixels per latent cell, along each axis


class AutoEncoder(nn.Module):
    """Convolutional autoencoder from frames `(B, 3, S, S)` in [-1, 1] to latents `(B, Z, S / 8, S / 8)`."""

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        wide, act = 2 * width, nn.SiLU
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            act(),
            nn.Conv2d(width, wide, 4, 2, 1),
            act(),
            nn.Conv2d(wide, wide, 4, 2, 1),
            act(),
            nn.Conv2d(wide, channels, 1),
        )
        self.decode = nn.Sequential(
            nn.Conv2d(channels, wide, 3, 1, 1),
            act(),
            nn.ConvTranspose2d(wide, wide, 4, 2, 1),
            act(),
            nn.ConvTranspose2d(wide, width, 4, 2, 1),
            act(),
            nn.Conv2d(width, 12, 3, 1, 1),
            nn.PixelShuffle(2),  # convolutions at full resolution would cost more than all other layers
        )


class Block(nn.Module):
    """Residual 3x3 convolutions, the second one with `FiLM` conditioning, initialised to the identity."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        groups = 8
        self.first = nn.Sequential(nn.GroupNorm(groups, width), nn.SiLU(), nn.Conv2d(width, width, 3, 1, 1))
        self.norm = nn.GroupNorm(groups, width, affine=False)
        self.film = nn.Linear(condition, 2 * width)
        self.second = nn.Conv2d(width, width, 3, 1, 1)
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map `(B, W, h, w)` and the condition `(B, E)` to `(B, W, h, w)`."""
        scale, shift = self.film(condition)[..., None, None].chunk(2, 1)
        return x + self.second(functional.silu(self.norm(self.first(x)) * (1 + scale) + shift))


class Denoiser(nn.Module):
    """Denoiser of the change of the latents, given the last frames, state vectors and actions, and the next state.

    Preconditioned as EDM (Karras et al. 2022) for data of unit standard deviation, so that it is the identity at no
    noise.
    """

    frequencies: Tensor

    def __init__(
        self, *, channels: int, grid: int, context: int, action_dim: int, proprio_dim: int, width: int, blocks: int
    ) -> None:
        """Build for latents `(channels, grid, grid)`, `context` past frames and as many actions."""
        super().__init__()
        size = 128
        self.register_buffer("frequencies", torch.exp(torch.linspace(0.0, 4.0, 16)))
        self.noise = nn.Sequential(nn.Linear(32, size), nn.SiLU(), nn.Linear(size, size))
        inputs = context * (action_dim + proprio_dim) + proprio_dim
        self.told = nn.Sequential(nn.Linear(inputs, size), nn.SiLU(), nn.Linear(size, size))
        self.place = nn.Parameter(torch.zeros(1, width, grid, grid))
        self.stem = nn.Conv2d(channels * (context + 2), width, 3, 1, 1)
        self.blocks = nn.ModuleList([Block(width, size) for _ in range(blocks)])
        self.norm = nn.GroupNorm(8, width)
        self.out = nn.Conv2d(width, channels, 3, 1, 1)
        for parameter in self.out.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        noisy: Tensor,
        sigma: Tensor,
        context: Tensor,
        proprio: Tensor,
        actions: Tensor,
        moved: Tensor,
        expected: Tensor,
    ) -> Tensor:
        """Predict the clean change of the latents `(B, Z, h, w)`.

        `noisy` `(B, Z, h, w)` has noise of standard deviation `sigma` `(B,)`; `context` `(B, C, Z, h, w)` and `proprio`
        `(B, C, P)` are past latents and state vectors, `actions` `(B, C, A)` lead from each frame to the next one,
        `moved` `(B, P)` is the change of the state vector, and `expected` `(B, Z, h, w)` the change of the latents that
        the state decoder expects.
        """
        scale = (sigma**2 + 1).rsqrt()[:, None, None, None]  # EDM: c_in; c_skip is its square
        features = (sigma.log() / 4)[:, None] * self.frequencies
        vectors = self.told(torch.cat([actions.flatten(1), proprio.flatten(1), moved], 1))
        condition = functional.silu(self.noise(torch.cat([features.sin(), features.cos()], 1)) + vectors)
        x = self.stem(torch.cat([noisy * scale, context.flatten(1, 2), expected], 1)) + self.place
        for block in self.blocks:
            x = block(x, condition)
        x = functional.silu(self.norm(x))
        return noisy * scale**2 + self.out(x) * sigma[:, None, None, None] * scale


class StateNet(nn.Module):
    """Regression of the change of the state vector `(B, P)` from past state vectors, actions and the newest latent.

    It is separate from the denoiser because it needs many more, cheaper samples: contacts depend on millimetres.
    """

    def __init__(
        self, *, channels: int, grid: int, context: int, action_dim: int, proprio_dim: int, width: int
    ) -> None:
        """Build for latents `(channels, grid, grid)`, `context` past state vectors and as many actions."""
        super().__init__()
        seen = 32  # features of the latent
        self.look = nn.Sequential(nn.Conv2d(channels, 8, 1), nn.SiLU(), nn.Flatten(), nn.Linear(8 * grid * grid, seen))
        inputs = context * (action_dim + proprio_dim) + seen
        self.body = MLP(inputs, (width, width, width), proprio_dim, activation="silu")
        for parameter in self.body[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor, proprio: Tensor, actions: Tensor) -> Tensor:
        """Map features `(B, 32)` of `look`, `(B, C, P)` and `(B, C, A)` to the change."""
        return self.body(torch.cat([actions.flatten(1), proprio.flatten(1), features], 1))


class StateDecoder(nn.Module):
    """Regression of the latents `(B, Z, h, w)` of a frame from its normalised state vector `(B, P)`.

    It shows the denoiser where objects of known state are. From past frames alone, each frame would repeat the errors
    of place of the one before it. Fourier features (Tancik et al. 2020) resolve small differences of the state.
    """

    frequencies: Tensor

    def __init__(self, *, channels: int, grid: int, proprio_dim: int, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(-2, 3))
        inputs = proprio_dim * (1 + 2 * len(self.frequencies))
        self.body = MLP(inputs, (width, width, width), channels * grid * grid, activation="silu")
        self.shape = (channels, grid, grid)

    def forward(self, proprio: Tensor) -> Tensor:
        """Return the expected latents."""
        waves = proprio[..., None] * self.frequencies
        features = torch.cat([proprio, waves.sin().flatten(1), waves.cos().flatten(1)], 1)
        return self.body(features).unflatten(1, self.shape)


class OutcomeHead(nn.Module):
    """Head from latents `(B, Z, h, w)` and state vectors `(B, P)` to logits of success and progress `(B, 2)`."""

    def __init__(self, channels: int, grid: int, proprio_dim: int) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(channels, 32, 3, 1, 1), nn.SiLU(), nn.Conv2d(32, 8, 1), nn.Flatten())
        self.judge = nn.Sequential(nn.Linear(8 * grid * grid + proprio_dim, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Return the logits."""
        return self.judge(torch.cat([self.look(latent), proprio], 1))
