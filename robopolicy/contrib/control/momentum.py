"""Policy gradients with an unbiased momentum: the base of N-PG-IGT and HARPG.

Each rollout gives one gradient, without ratios. The algorithms differ in the correction that keeps the average over
rollouts of different policies an unbiased gradient at the current weights. The step length is set separately.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.on_policy import OnPolicy, OnPolicyConfig
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, flatten, minibatches, normalize
from robopolicy.constraints import Positive, PositiveFraction, PositiveInt
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Policy


@dataclass(frozen=True)
class MomentumConfig(OnPolicyConfig):
    """Settings of both algorithms; minibatches are used by the critic only."""

    step_size: Positive = 0.1  # first step; falls with 2 / (2 + t), or its square root where steps are not normalised
    momentum: PositiveFraction = 1.0  # first weight of a new gradient; falls with 2 / (2 + t)
    normalize_step: bool = True  # steps have length step_size, independent of the gradient's norm
    critic_lr: Positive = 1e-3  # Adam learning rate of the value network, the baseline
    critic_epochs: PositiveInt = 10  # passes of the critic over each rollout


class MomentumState(nn.Module):
    """Current weights `(P,)`, previous weights and averaged gradient."""

    weights: Tensor
    previous: Tensor
    direction: Tensor

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights.clone())
        self.register_buffer("previous", weights.clone())
        self.register_buffer("direction", torch.zeros_like(weights))

    def move(self, direction: Tensor, length: float, *, normalized: bool) -> None:
        """Step along `direction` `(P,)` by `length`, or by `length` times its norm."""
        self.direction.copy_(direction)
        self.previous.copy_(self.weights)
        unit = direction / direction.norm().clamp(min=1e-12) if normalized else direction
        self.weights.add_(unit, alpha=length)


class MomentumGradient(OnPolicy):
    """One gradient step per rollout; `policy` acts with exploration weights, `current` holds the learned ones."""

    supports_overlap = False  # its estimate of the gradient needs rollouts of present weights
    config: MomentumConfig

    def __init__(self, config: MomentumConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        self.learned = [p for p in policy.parameters() if p.requires_grad]
        self.trace = MomentumState(parameters_to_vector(self.learned).detach())
        self.current: Policy = frozen_copy(policy)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_lr, fused=True)

    @abstractmethod
    def averaged(self, rows: RolloutBatch, shape: tuple[int, int]) -> Tensor:
        """The averaged gradient `(P,)` after the rows of a rollout of `shape` (T, N)."""

    @abstractmethod
    def sampling_weights(self) -> Tensor:
        """Weights `(P,)` that act in the next rollout."""

    @property
    def share(self) -> float:
        """eta_t: weight of the gradient of the next rollout in the average."""
        return self.config.momentum * 2 / (2 + self.updates)

    @property
    def length(self) -> float:
        """gamma_t: size of the next step."""
        decay = 2 / (2 + self.updates)
        return self.config.step_size * (decay if self.config.normalize_step else decay**0.5)

    def update(self, batch: Rollout) -> Metrics:
        """Take one step of the policy and several of its critic; then load the weights for the next rollout."""
        self.update_reward_scale(batch)
        rows = self.process_rollout(batch)
        direction, length = self.averaged(rows, batch.shape), self.length
        self.trace.move(direction, length, normalized=self.config.normalize_step)
        loss = self._fit_critic(rows)
        stats = {"actor/gradient_norm": direction.norm(), "actor/step_size": length, "critic/loss": loss}
        metrics = self.finish(batch, rows, stats)
        self.current.update_stats(flatten(batch.obs))
        self._load(self.current, self.trace.weights)
        self._load(self.policy, self.sampling_weights())
        return metrics

    def log_probabilities(self, rows: RolloutBatch) -> Tensor:
        """Log-probability `(B,)` of each decision under the weights that `policy` has."""
        return self.policy.decisions(rows.obs, rows.record).logp.sum(1)

    def gradient(self, rows: RolloutBatch) -> Tensor:
        """Policy gradient `(P,)` of the return at the weights of `policy`, which must have produced the rows."""
        objective = (normalize(rows.advantage) * self.log_probabilities(rows)).mean()
        return parameters_to_vector(torch.autograd.grad(objective, self.learned))

    def inference_policy(self) -> Policy:
        """The learned weights, without the offset of exploration."""
        return self.current

    def _fit_critic(self, rows: RolloutBatch) -> float:
        loss = torch.zeros(())
        for _ in range(self.config.critic_epochs):
            for minibatch, _ in minibatches(rows, self.config.batch_size, self.generator):
                loss = self.critic_step(minibatch)
        return float(loss)

    def _load(self, policy: Policy, weights: Tensor) -> None:
        learned = [
            p for p, mine in zip(policy.parameters(), self.policy.parameters(), strict=True) if mine.requires_grad
        ]
        with torch.no_grad():
            vector_to_parameters(weights, learned)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared items, the learned policy, the momentum state and the critic's optimiser."""
        own = {"current": self.current, "trace": self.trace, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own}
