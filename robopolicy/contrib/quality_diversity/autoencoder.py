"""Autoencoder of vectors with early stopping on held-out vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robopolicy.nets.mlp import MLP

HELD_BACK = 0.2  # fraction of the vectors
PATIENCE = 3  # epochs in which the held-out error may rise


class Autoencoder(nn.Module):
    """`(..., V)` -> codes `(..., C)` -> `(..., V)`, with vectors standardised by their training statistics."""

    mean: Tensor
    std: Tensor

    def __init__(self, view_dim: int, code_dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.encoder = MLP(view_dim, hidden, code_dim, activation="elu")
        self.decoder = MLP(code_dim, tuple(reversed(hidden)), view_dim, activation="elu")
        self.register_buffer("mean", torch.zeros(view_dim))
        self.register_buffer("std", torch.ones(view_dim))

    def encode(self, views: Tensor) -> Tensor:
        """Codes `(..., C)` of vectors `(..., V)`."""
        return self.encoder(self._standard(views))

    def error(self, views: Tensor) -> Tensor:
        """Mean squared reconstruction error `(...)`, in standard deviations."""
        views = self._standard(views)
        return (self.decoder(self.encoder(views)) - views).square().mean(-1)

    def fit(self, views: Tensor, *, epochs: int, batch_size: int, lr: float, generator: torch.Generator) -> float:
        """Continue training on vectors `(K, V)`, of which some are held out for early stopping.

        Returns:
            Error on the held-out vectors.
        """
        order = torch.randperm(len(views), generator=generator)
        held = max(1, int(HELD_BACK * len(views)))
        tests, data = views[order[:held]], views[order[held:]] if len(views) > 1 else views
        self.mean, self.std = data.mean(0), data.std(0, correction=0).clamp(min=1e-6)
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        before, risen = float("inf"), 0
        found = self._mean_error(tests)
        for _ in range(epochs):
            for rows in torch.randperm(len(data), generator=generator).split(batch_size):
                loss = self.error(data[rows]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found = self._mean_error(tests)
            risen = risen + 1 if found > before else 0
            if risen > PATIENCE:
                break
            before = found if not risen else before
        return found

    @torch.no_grad()
    def _mean_error(self, views: Tensor) -> float:
        return float(self.error(views).mean())

    def _standard(self, views: Tensor) -> Tensor:
        return (views - self.mean) / self.std
