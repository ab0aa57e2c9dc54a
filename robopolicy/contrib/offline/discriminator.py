"""Discriminators of adversarial imitation, which separate a demonstrator's chunks from the learner's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.constraints import NonNegative, PositiveInt, Validated
from robopolicy.critics.q import CriticInput, copy_normalizers
from robopolicy.nets.mlp import MLP
from robopolicy.nets.vision import VisionConfig


@dataclass(frozen=True)
class DiscriminatorConfig(Validated):
    """Architecture of a `Discriminator`."""

    hidden: tuple[PositiveInt, ...] = (64, 64)
    activation: str = "relu"
    penalty: NonNegative = 10.0  # weight of the gradient penalty
    vision: VisionConfig = field(default_factory=VisionConfig)


class Discriminator(nn.Module):
    """D(s, chunk) in (-1, 1), high for demonstrations.

    Its input is the critic's input plus an end flag: a terminated episode continues forever in an absorbing state,
    which is scored as well (Kostrikov et al. 2018). Otherwise ending would have the value 0, good or bad depending on
    the sign of the reward only.
    """

    def __init__(self, config: DiscriminatorConfig, policy: CriticInput) -> None:
        """Build the discriminator for the observations and executed actions of `policy`."""
        super().__init__()
        spec = policy.spec
        self.steps = spec.action_horizon
        self.encoder, self.action_normalizer = copy_normalizers(policy, config.vision)
        self.size = spec.obs_horizon * self.encoder.feature_dim + self.steps * spec.action_dim + 1
        self.body = MLP(self.size, config.hidden, 1, activation=config.activation)

    def inputs(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Concatenate observations `{key: (B, To, ...)}` and chunks `(B, H, A)` in env units to rows `(B, size)`."""
        action = self.action_normalizer.normalize(chunk[:, : self.steps]).flatten(1)
        features = self.encoder(obs).flatten(1)
        return torch.cat([features, action, features.new_zeros(len(features), 1)], 1)

    def ended(self, rows: int) -> Tensor:
        """Absorbing states as rows `(B, size)`: zeros with the end flag."""
        flag = next(self.body.parameters()).new_zeros(rows, self.size)
        flag[:, -1] = 1.0
        return flag

    def forward(self, inputs: Tensor) -> Tensor:
        """Score rows of `inputs` and `ended` `(B, size)`: `(B,)`."""
        return self.body(inputs).squeeze(-1).tanh()


def reverse_kl_loss(expert: Tensor, learner: Tensor, expert_weight: Tensor, learner_weight: Tensor) -> Tensor:
    """`E_expert[exp(-D)] + E_learner[D]` of scores `(E,)` and `(L,)` with weights of the same shapes.

    For unrestricted D the minimum 1 - KL(learner || expert) is at `D = log(expert / learner)`.
    """
    first = (expert_weight * (-expert).exp()).sum() / expert_weight.sum()
    return first + (learner_weight * learner).sum() / learner_weight.sum()


def gradient_penalty(discriminator: nn.Module, expert: Tensor, learner: Tensor, mix: Tensor) -> Tensor:
    """Mean of `(|dD/dx| - 1)^2` at `mix` `(B, 1)` times `expert` plus the rest times `learner`, rows `(B, size)`."""
    between = (mix * expert + (1 - mix) * learner).detach().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()
