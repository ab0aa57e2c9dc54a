"""Transformer decoder over an action chunk (Diffusion Policy's attention backbone)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.nets.time import TimeEmbedding, network_rows


class ActionTransformer(nn.Module):
    """Denoising network `(B, H, A), (B,), (B, To, F)` -> `(B, H, A)`.

    Action tokens are the queries; the condition tokens are [time, observation 0, ..., observation To - 1]. Attention
    among actions is causal. Action i attends to observation j only if `j <= i + first_action`, where `first_action` is
    the index of the observation at which the chunk begins: 0 is Diffusion Policy's alignment (chunk and history start
    together), with `To - 1` the chunk starts at the newest observation, and every action attends to all of them.
    """

    self_mask: Tensor
    condition_mask: Tensor

    def __init__(
        self,
        action_dim: int,
        feature_dim: int,
        *,
        horizon: int,
        obs_horizon: int,
        first_action: int,
        width: int = 256,
        layers: int = 8,
        heads: int = 4,
        dropout: float = 0.0,
        times: int = 1,
    ) -> None:
        """Build the network; keep `dropout` 0 for RL, where it would break density ratios."""
        super().__init__()
        self.time = TimeEmbedding(width, times)
        self.action_in = nn.Linear(action_dim, width)
        self.feature_in = nn.Linear(feature_dim, width)
        self.action_position = nn.Parameter(0.02 * torch.randn(horizon, width))
        self.condition_position = nn.Parameter(0.02 * torch.randn(obs_horizon + 1, width))
        self.condition_mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        layer = nn.TransformerDecoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, layers, nn.LayerNorm(width))
        self.output = nn.Linear(width, action_dim)
        query = torch.arange(horizon)[:, None]
        self.register_buffer("self_mask", torch.arange(horizon)[None] > query, persistent=False)
        masked = torch.arange(obs_horizon + 1)[None] > query + first_action + 1  # token 0 is time
        self.register_buffer("condition_mask", masked, persistent=False)
        for parameter in self.decoder.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Predict at `x` `(B, ..., H, A)` and `t`, given `features` `(B, To, F)`; see `network_rows`."""
        queries, condition = self._tokens(x, t, features)
        masks = {"tgt_mask": self.self_mask, "memory_mask": self.condition_mask}
        # Without tgt_is_causal, torch compares the values of the mask, which exporters cannot trace.
        return self.output(self.decoder(queries, condition, **masks, tgt_is_causal=False)).view(x.shape)

    def representation(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Activations `(B, H * width)` after half of the layers."""
        queries, condition = self._tokens(x, t, features)
        for layer in self.decoder.layers[: (len(self.decoder.layers) + 1) // 2]:
            queries = layer(queries, condition, tgt_mask=self.self_mask, memory_mask=self.condition_mask)
        return queries.flatten(1)

    def _tokens(self, x: Tensor, t: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `(B, H, width)` and condition `(B, 1 + To, width)`."""
        x, time, features = network_rows(x, self.time(t), features)
        tokens = torch.cat([time.unsqueeze(1), self.feature_in(features)], 1)
        return self.action_in(x) + self.action_position, self.condition_mlp(tokens + self.condition_position)


Past = tuple[Tensor, Tensor]
"""Keys and values `(B, heads, P, width / heads)` of the P previous tokens of a block."""


class AttentionBlock(nn.Module):
    """Pre-norm self-attention and a GELU layer of four times the width, with skip connections; no dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UserError(f"The attention width {width} must be a multiple of the number of heads {heads}.")
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from every token of `x` `(B, L, width)` to all, or to tokens where `mask` `(B, 1, 1, L)` is True."""
        query, key, value = self._qkv(x)
        return self._finish(x, query, key, value, mask)

    def causal(self, x: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """Attend causally from `x` `(B, L, width)` to `past` and `x`; returns the outputs and the longer past."""
        query, key, value = self._qkv(x)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        new, total = query.shape[2], key.shape[2]
        mask = None if new == 1 else torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)
        return self._finish(x, query, key, value, mask), (key, value)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return joined[0], joined[1], joined[2]  # (B, heads, L, width / heads)

    def _finish(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class CausalTransformer(nn.Module):
    """Decoder-only transformer on embedded tokens with learned positions, for whole sequences or continuations."""

    def __init__(self, width: int, layers: int, heads: int, *, length: int) -> None:
        """Build the transformer for sequences of at most `length` tokens."""
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, past: list[Past] | None = None) -> tuple[Tensor, list[Past]]:
        """Outputs `(B, L, width)` of `x` `(B, L, width)` after `past`, and the longer past."""
        start = 0 if past is None else past[0][0].shape[2]
        x = x + self.position[start : start + x.shape[1]]
        longer: list[Past] = []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, AttentionBlock)
            x, extended = block.causal(x, None if past is None else past[index])
            longer.append(extended)
        return self.norm(x), longer
