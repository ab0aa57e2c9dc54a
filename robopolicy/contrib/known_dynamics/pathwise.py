"""Base of the algorithms that differentiate through known dynamics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics
from robopolicy.constraints import NonNegativeInt, Positive, Validated
from robopolicy.contrib.known_dynamics.scenarios import Unrolled
from robopolicy.core.gradients import clip_gradients
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class PathwiseConfig(Validated):
    """Settings of every algorithm with known dynamics; `sim.num_envs` scenarios make a batch."""

    lr: Positive = 3e-3  # learning rate of Adam
    grad_clip: Positive = 1.0  # maximum gradient norm
    scenarios: NonNegativeInt = 8192  # size of the fixed set of training episodes; 0 draws new ones for every update


class Pathwise(Algorithm):
    """Trains the mode of a squashed Gaussian on the loss of unrolled scenarios, which a subclass defines."""

    policy: GaussianPolicy
    config: PathwiseConfig

    def __init__(self, config: PathwiseConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train the mode of `policy`."""
        if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
            raise UserError(
                f"{type(self).__name__} differentiates the mode of a squashed Gaussian, which respects the action "
                f"bounds, got '{policy.name}'; pass policy=squashed_gaussian."
            )
        super().__init__(policy, total_updates=total_updates)
        self.config = config
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Unrolled, Info]:
        """Loss to minimise, and the episodes that update the policy's observation statistics."""

    def update(self, batch: Any) -> Metrics:
        """Take one gradient step on a batch of scenarios."""
        loss, unrolled, info = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_gradients(self.policy.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.policy.update_stats(unrolled.obs)
        self.updates += 1
        metrics = {"actor/loss": loss.item(), "actor/grad_norm": norm.item()}
        return metrics | {f"actor/{key}": value.item() for key, value in info.items()}

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The policy and its optimiser."""
        return {"policy": self.policy, "optimizer": self.optimizer}
