"""Networks of the Action Chunking Transformer (Zhao et al. 2023).

A transformer maps observation tokens to a chunk; the encoder of a variational autoencoder summarises a demonstrated
chunk while training. The layers normalise after each sum, and positions are added to queries and keys but not to
values, as in DETR.
Weights of LeRobot's networks give the same outputs (`robopolicy.interop.lerobot.act`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.constraints import FractionBelowOne, Layers, PositiveInt, Validated
from robopolicy.errors import UserError


@dataclass(frozen=True)
class ACTSizes(Validated):
    """Sizes of the networks."""

    width: PositiveInt = 256  # numbers per token; 512 in the paper
    attention_heads: PositiveInt = 8  # attention heads of every layer
    feedforward: PositiveInt = 1024  # width of the layers between attentions; 3200 in the paper
    encoder_layers: Layers = 4  # layers over the observation tokens
    decoder_layers: Layers = 1  # layers over the actions; the published code has 7 and uses the first
    posterior_layers: Layers = 4  # layers of the encoder of demonstrated chunks
    latent_dim: PositiveInt = 32  # latent variables of a chunk, which are 0 when acting
    dropout: FractionBelowOne = 0.1  # fraction of activations that training sets to 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.attention_heads or self.width % 4:
            raise UserError(
                f"The width {self.width} must be a multiple of 4 and of the attention heads {self.attention_heads}."
            )


class EncoderLayer(nn.Module):
    """Self-attention and two linear layers, with normalised sums."""

    def __init__(self, sizes: ACTSizes) -> None:
        super().__init__()
        self.self_attn = _attention(sizes)
        self.linear1 = nn.Linear(sizes.width, sizes.feedforward)
        self.linear2 = nn.Linear(sizes.feedforward, sizes.width)
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, position: Tensor, padded: Tensor | None = None) -> Tensor:
        """Map tokens `(B, L, W)` at `position` `(L, W)`; tokens where `padded` `(B, L)` is True are not read."""
        query = x + position
        attended, _ = self.self_attn(query, query, x, key_padding_mask=padded, need_weights=False)
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x))))))


class DecoderLayer(nn.Module):
    """Self-attention, attention to encoded tokens and two linear layers, with normalised sums."""

    def __init__(self, sizes: ACTSizes) -> None:
        super().__init__()
        self.self_attn, self.multihead_attn = _attention(sizes), _attention(sizes)
        self.linear1 = nn.Linear(sizes.width, sizes.feedforward)
        self.linear2 = nn.Linear(sizes.feedforward, sizes.width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(sizes.width) for _ in range(3))
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, position: Tensor, encoded: Tensor, encoded_position: Tensor) -> Tensor:
        """Map tokens `(B, H, W)` at `position` `(H, W)`, given `encoded` `(B, L, W)` at `encoded_position` `(L, W)`."""
        query = x + position
        attended, _ = self.self_attn(query, query, x, need_weights=False)
        x = self.norm1(x + self.dropout(attended))
        attended, _ = self.multihead_attn(x + position, encoded + encoded_position, encoded, need_weights=False)
        x = self.norm2(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x))))))


class ChunkTransformer(nn.Module):
    """Decoder of the autoencoder: latent variables and observations to one vector per action.

    The tokens are the latent variables, then all vectors of every observation step, then all pixels of every feature
    map of every observation step. Vectors have learned positions, pixels sinusoidal ones by row and column.
    """

    grid_positions: Tensor

    def __init__(
        self,
        sizes: ACTSizes,
        *,
        horizon: int,
        obs_horizon: int,
        vectors: Mapping[str, int],
        maps: Mapping[str, tuple[int, tuple[int, int]]],
    ) -> None:
        """Build the network.

        Args:
            sizes: Sizes.
            horizon: Actions of a chunk, H.
            obs_horizon: Observation steps, To.
            vectors: Numbers of every vector, by name.
            maps: Channels, rows and columns of every feature map, by name; one projection per number of channels.
        """
        super().__init__()
        width = sizes.width
        self.latent_in = nn.Linear(sizes.latent_dim, width)
        self.vectors_in = nn.ModuleDict({name: nn.Linear(numbers, width) for name, numbers in vectors.items()})
        self.maps_in = nn.ModuleDict({str(channels): nn.Linear(channels, width) for channels, _ in maps.values()})
        self.position = nn.Parameter(torch.randn(1 + obs_horizon * len(vectors), width))
        self.step_position = nn.Parameter(torch.zeros(obs_horizon, width)) if obs_horizon > 1 and maps else None
        grids = [grid_positions(*grid, width) for _, grid in maps.values()]
        self.register_buffer("grid_positions", torch.cat([torch.zeros(0, width), *grids]), persistent=False)
        self.action_position = nn.Parameter(torch.randn(horizon, width))
        self.encoder = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.decoder_layers))
        self.norm = nn.LayerNorm(width)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, latent: Tensor, vectors: Sequence[Tensor], maps: Sequence[Tensor]) -> Tensor:
        """Return `(B, H, W)` for latent variables `(B, Z)`, vectors `(B, To, D)` and maps `(B, To, P, C)`, in order."""
        tokens, positions = [self.latent_in(latent)[:, None]], list[Tensor]([self.position])
        if vectors:
            found = [layer(vector) for layer, vector in zip(self.vectors_in.values(), vectors, strict=True)]
            tokens.append(torch.stack(found, 2).flatten(1, 2))  # (B, To * K, W)
        if maps:
            found = [self.maps_in[str(each.shape[-1])](each) for each in maps]
            tokens.append(torch.cat(found, 2).flatten(1, 2))  # (B, To * P, W)
            steps = maps[0].shape[1]
            grid = self.grid_positions.expand(steps, -1, -1)
            grid = grid if self.step_position is None else grid + self.step_position[:, None]
            positions.append(grid.flatten(0, 1))
        encoded, position = torch.cat(tokens, 1), torch.cat(positions)
        for layer in self.encoder:
            encoded = layer(encoded, position)
        x = torch.zeros_like(self.action_position).expand(len(latent), -1, -1)
        for layer in self.decoder:
            x = layer(x, self.action_position, encoded, position)
        return self.norm(x)


class ChunkPosterior(nn.Module):
    """Encoder of the autoencoder: a chunk, and the state in which it was demonstrated, to latent variables."""

    positions: Tensor

    def __init__(self, sizes: ACTSizes, *, horizon: int, action_dim: int, state_dim: int) -> None:
        """Build the network; `state_dim` 0 omits the state."""
        super().__init__()
        width = sizes.width
        self.token = nn.Parameter(torch.randn(1, width))  # its output describes the chunk
        self.state_in = nn.Linear(state_dim, width) if state_dim else None
        self.action_in = nn.Linear(action_dim, width)
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.posterior_layers))
        self.output = nn.Linear(width, 2 * sizes.latent_dim)
        self.register_buffer("positions", sines(1 + bool(state_dim) + horizon, width), persistent=False)

    def forward(self, chunk: Tensor, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and log variance `(B, Z)` of a chunk `(B, H, A)` at state `(B, D)`; `mask` `(B, H)` is 0 for padding."""
        first = [self.token.expand(len(chunk), -1, -1)]
        if self.state_in is not None and state is not None:
            first.append(self.state_in(state)[:, None])
        x = torch.cat([*first, self.action_in(chunk)], 1)
        padded = None
        if mask is not None:
            kept = torch.zeros(len(chunk), len(first), dtype=torch.bool, device=chunk.device)
            padded = torch.cat([kept, mask == 0], 1)
        for layer in self.layers:
            x = layer(x, self.positions, padded)
        mean, log_variance = self.output(x[:, 0]).chunk(2, -1)
        return mean, log_variance


def sines(count: int, width: int) -> Tensor:
    """Alternating sines and cosines `(count, width)` of positions 0, 1, ..., with periods from 2 pi to 20,000 pi."""
    index = torch.arange(width, dtype=torch.float64)
    angle = torch.arange(count, dtype=torch.float64)[:, None] / 10_000 ** (2 * (index // 2) / width)
    return torch.where(index % 2 == 0, angle.sin(), angle.cos()).float()


def grid_positions(rows: int, columns: int, width: int) -> Tensor:
    """Positions `(rows * columns, width)`: sines of the row, then of the column, each scaled to (0, 2 pi]."""
    half = width // 2
    frequency = 10_000 ** (-2 * (torch.arange(half, dtype=torch.float64) // 2) / half)

    def along(count: int) -> Tensor:
        angle = torch.arange(1, count + 1, dtype=torch.float64)[:, None] / (count + 1e-6) * 2 * math.pi * frequency
        return torch.where(torch.arange(half) % 2 == 0, angle.sin(), angle.cos()).float()

    by_row = along(rows)[:, None].expand(rows, columns, half)
    by_column = along(columns)[None].expand(rows, columns, half)
    return torch.cat([by_row, by_column], -1).flatten(0, 1)


def _attention(sizes: ACTSizes) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(sizes.width, sizes.attention_heads, dropout=sizes.dropout, batch_first=True)
