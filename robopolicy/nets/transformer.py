"""Transformer decoder over an action chunk (Diffusion Policy's attention backbone)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robopolicy.nets.time import TimeEmbedding, network_rows


class ActionTransformer(nn.Module):
    """Denoising network `(B, H, A), (B,), (B, To, F)` -> `(B, H, A)`.

    Action tokens are the queries; the condition tokens are [time, observation 0, ..., observation To - 1]. Attention
    among actions is causal. Action i sees observation j only if `j <= i + first_action`, where `first_action` is the
    index of the observation at which the chunk begins: 0 is Diffusion Policy's alignment (chunk and history start
    together), `To - 1` is ours (the chunk starts at the newest observation, so every action sees all of them).
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
        """Build the network.

        Args:
            action_dim: A.
            feature_dim: F, width of the features of one observation.
            horizon: H.
            obs_horizon: To.
            first_action: Index of the observation at which the chunk begins.
            width: Token width.
            layers: Decoder layers.
            heads: Attention heads.
            dropout: Dropout inside the layers; keep 0 for RL, where it would break density ratios.
            times: Time inputs.
        """
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
        hidden = torch.arange(obs_horizon + 1)[None] > query + first_action + 1  # token 0 is time
        self.register_buffer("condition_mask", hidden, persistent=False)
        for parameter in self.decoder.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Predict at `x` `(B, ..., H, A)` and `t`, given `features` `(B, To, F)`; see `network_rows`."""
        queries, condition = self._tokens(x, t, features)
        masks = {"tgt_mask": self.self_mask, "memory_mask": self.condition_mask}
        # Whether the mask is causal is not to be found out by comparing its values, which no export can follow.
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
