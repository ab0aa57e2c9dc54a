"""Action-value ensembles with a model of the next observation, which evaluate later actions of a sequence.

Source: Patel and Siegelmann 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from robopolicy.critics.q import CriticConfig, CriticInput, QEnsemble
from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP


class ModelBasedQ(QEnsemble):
    """Values of single actions, and the change of the observation that each action causes.

    The model predicts the change in normalised units, from the whole history and one action.
    """

    def __init__(self, config: CriticConfig, policy: CriticInput, *, model_hidden: Sequence[int]) -> None:
        """Build the critic of `policy`, whose observations must be vectors."""
        super().__init__(config, policy, steps=1)
        other = [key for encoder in self.encoder.encoders() for key in encoder.observations]
        if other:
            raise UserError(
                f"The model predicts vectors only, got {', '.join(other)}; leave them out of task.obs_keys."
            )
        spec = policy.spec
        in_dim = spec.obs_horizon * self.encoder.feature_dim + spec.action_dim
        self.model = MLP(in_dim, model_hidden, self.encoder.vector_dim, activation="relu")

    def change(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """Predicted change `(B, D)` of the newest vectors, normalised, after `action` `(B, 1, A)`."""
        return self.model(self._joined(self.encode(obs), action))

    def model_loss(self, obs: Mapping[str, Tensor], action: Tensor, next_obs: Mapping[str, Tensor]) -> Tensor:
        """Squared error `(B,)` of the predicted change, averaged over its elements."""
        with torch.no_grad():
            after, before = (self.encoder(part)[:, -1] for part in (next_obs, obs))
        return (self.change(obs, action) - (after - before)).square().mean(1)

    @torch.no_grad()
    def imagine(self, obs: Mapping[str, Tensor], action: Tensor) -> dict[str, Tensor]:
        """Observations `{key: (B, To, ...)}` expected after `action` `(B, 1, A)`."""
        newest = self.encoder(obs)[:, -1] + self.change(obs, action)
        vectors = self.encoder.normalizer.denormalize(newest)
        keys = self.encoder.layout.vectors
        parts = vectors.split([self.encoder.sizes[key] for key in keys], -1)
        return {
            key: torch.cat([obs[key][:, 1:], part.view_as(obs[key][:, 0]).unsqueeze(1)], 1)
            for key, part in zip(keys, parts, strict=True)
        }
