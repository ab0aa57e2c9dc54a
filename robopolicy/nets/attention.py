"""Self-attention blocks, and a causal transformer that reads a sequence at once or token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError

Past = tuple[Tensor, Tensor]
"""Keys and values `(B, heads, P, width / heads)` of the P tokens one block has read."""


class AttentionBlock(nn.Module):
    """Pre-norm self-attention and a GELU layer of four times the width, each with a skip; no dropout."""

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

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Every token of `x` `(B, L, width)` sees all of them, or those where `seen` `(B, 1, 1, L)` is True."""
        query, key, value = self._qkv(x)
        return self._finish(x, query, key, value, seen)

    def causal(self, x: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """Every token of `x` `(B, L, width)` sees `past` and the tokens up to itself; returns the longer past too."""
        query, key, value = self._qkv(x)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        new, seen = query.shape[2], key.shape[2]
        mask = None if new == 1 else torch.ones(new, seen, dtype=torch.bool, device=x.device).tril(seen - new)
        return self._finish(x, query, key, value, mask), (key, value)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return joined[0], joined[1], joined[2]  # (B, heads, L, width / heads)

    def _finish(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class CausalTransformer(nn.Module):
    """Decoder-only transformer over embedded tokens, positions included.

    One function reads a whole sequence (scoring) or continues from what it has read (sampling).
    """

    def __init__(self, width: int, layers: int, heads: int, *, length: int) -> None:
        """Build it for sequences of at most `length` tokens."""
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, past: list[Past] | None = None) -> tuple[Tensor, list[Past]]:
        """Read `x` `(B, L, width)` after `past`; returns the outputs `(B, L, width)` and everything read so far."""
        start = 0 if past is None else past[0][0].shape[2]
        x = x + self.position[start : start + x.shape[1]]
        read: list[Past] = []
        for index, block in enumerate(self.blocks):
            assert isinstance(block, AttentionBlock)
            x, seen = block.causal(x, None if past is None else past[index])
            read.append(seen)
        return self.norm(x), read
