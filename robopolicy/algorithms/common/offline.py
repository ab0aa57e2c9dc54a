"""Shared code of algorithms with a dataset: imitation, critic objectives for offline data, and Q-chunking.

A `CriticObjective` defines the regression target of a critic and further terms of its loss. `ImplicitObjective` (IQL,
Kostrikov et al. 2021) never evaluates an action outside the data: V is an expectile of Q over the data's actions, and Q
regresses on V. `ConservativeObjective` (Cal-QL, Nakamoto et al. 2023, on CQL) bootstraps from the policy and lowers the
values of sampled chunks towards, but not below, the returns in the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.off_policy import OffPolicyConfig, optimizer_step
from robopolicy.algorithms.common.td_loss import td_loss
from robopolicy.constraints import NonNegative, OpenFraction, Positive, PositiveInt, Validated
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.critics.value import ValueConfig, ValueNet, conservative_penalty, expectile_loss
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.nets.module_state import training_mode
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.noise import uniform
from robopolicy.policies.wrappers.best_of_n import BestOfNPolicy
from robopolicy.policies.wrappers.zero_noise import without_zero_noise

# Imitation.


@dataclass(frozen=True)
class ImitationConfig(OffPolicyConfig):
    """Settings of algorithms with a critic whose policy is trained by imitation."""

    grad_clip: Positive = 1.0  # largest gradient norm of the policy


def require_imitation(policy: Policy, algorithm: str) -> Policy:
    """Return the policy to train by imitation, without best-of-N selection and zero noise, or raise `UserError`."""
    policy = without_zero_noise(policy)
    while isinstance(policy, BestOfNPolicy):
        policy = without_zero_noise(policy.base)
    if type(policy).imitation_loss is Policy.imitation_loss:
        raise UserError(
            f"Algorithm '{algorithm}' trains by imitation_loss, which policy '{policy.name}' lacks; use a flow, "
            "diffusion, autoregressive or Gaussian policy."
        )
    return policy


def imitation_loss(
    policy: Policy,
    obs: Observation,
    chunk: Tensor,
    weight: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator,
    progress: float,
) -> Tensor:
    """Imitation loss `(B,)` of `chunk` `(B, H, A)`, times `weight` `(B,)`; `mask` `(B, H)` is 0 on padded steps.

    `progress` in [0, 1] is the fraction of training done, for schedules such as a consistency head's grid. Dropout and
    augmentation are active only in this loss.
    """
    policy.set_progress(progress)
    policy.train()
    loss, _ = policy.imitation_loss(obs, chunk, weight, mask=mask, generator=generator)
    policy.eval()
    return loss


def imitation_step(
    algorithm: Any, obs: Observation, chunk: Tensor, weight: Tensor | None = None, *, mask: Tensor
) -> Tensor:
    """Take a step of `algorithm.optimizer` on `imitation_loss` of `algorithm.policy`; returns the mean loss."""
    generator, progress = algorithm.generator, algorithm.progress
    losses = imitation_loss(algorithm.policy, obs, chunk, weight, mask=mask, generator=generator, progress=progress)
    loss = losses.mean()
    optimizer_step(algorithm.optimizer, loss, algorithm.policy, algorithm.config.grad_clip)
    return loss


# Critic objectives.


@dataclass(frozen=True)
class ImplicitConfig(Validated):
    """Settings of `ImplicitObjective`."""

    expectile: OpenFraction = 0.7  # 0.5: mean over the data's actions; towards 1: their best; 0.9 for stitching
    value: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256), activation="relu"))


@dataclass(frozen=True)
class ConservativeConfig(Validated):
    """Settings of `ConservativeObjective`."""

    weight: NonNegative = 5.0  # of the penalty, relative to the TD loss; .005 with HL-Gauss (PA-RL)
    samples: PositiveInt = 10  # uniform chunks from the action space per row


class CriticObjective(nn.Module, ABC):
    """Regression target of a critic and further terms of its loss."""

    @abstractmethod
    def target(self, batch: Transitions, bootstrap: Callable[[], Tensor]) -> Tensor:
        """Regression target `(B,)`; `bootstrap()` returns the target from chunks of the policy."""

    @abstractmethod
    def extra_loss(
        self,
        batch: Transitions,
        critic: QEnsemble,
        q_values: Callable[[], Tensor],
        sample_candidates: Callable[[], Tensor],
    ) -> tuple[Tensor, Info]:
        """Loss in addition to the temporal-difference loss of the online `critic`, and metrics.

        `q_values()` are values `(B,)` of the batch's chunks under the target ensemble, `sample_candidates()` chunks
        `(B, C, H, A)` of the policy at the batch's observations.
        """

    def update_stats(self, obs: Observation) -> None:
        """Update running statistics with `obs`, if there are any."""


class ImplicitObjective(CriticObjective):
    """Implicit Q-learning: bootstraps from a learned V, without actions of the policy."""

    def __init__(self, config: ImplicitConfig, policy: Policy) -> None:
        super().__init__()
        self.expectile = config.expectile
        self.value = ValueNet.for_policy(config.value, policy)

    def target(self, batch: Transitions, bootstrap: Callable[[], Tensor] | None = None) -> Tensor:
        """`reward + discount * V(next_obs)`."""
        return batch.reward + batch.discount * self.value(batch.next_obs)

    def value_loss(self, batch: Transitions, q: Tensor) -> tuple[Tensor, Info]:
        """Expectile regression of V on the values `q` `(B,)` of the data's chunks."""
        value = self.value(batch.obs)
        loss = (expectile_loss(q - value, self.expectile) * batch.weight).mean()
        return loss, {"state_value": value.detach().mean(), "advantage": (q - value.detach()).mean()}

    def extra_loss(
        self,
        batch: Transitions,
        critic: QEnsemble,
        q_values: Callable[[], Tensor],
        sample_candidates: Callable[[], Tensor],
    ) -> tuple[Tensor, Info]:
        """Loss of V."""
        return self.value_loss(batch, q_values())

    def update_stats(self, obs: Observation) -> None:
        """Update the normaliser of V with `obs`."""
        self.value.update_stats(obs)


class ConservativeObjective(CriticObjective):
    """Calibrated conservative Q-learning: bootstraps from the policy and lowers the values of other chunks."""

    def __init__(self, config: ConservativeConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.generator = generator

    def target(self, batch: Transitions, bootstrap: Callable[[], Tensor]) -> Tensor:
        """Bootstrap from the policy."""
        return bootstrap()

    def extra_loss(
        self,
        batch: Transitions,
        critic: QEnsemble,
        q_values: Callable[[], Tensor],
        sample_candidates: Callable[[], Tensor],
    ) -> tuple[Tensor, Info]:
        """Penalty on candidates of the policy."""
        return self.penalty(batch, critic, sample_candidates())

    def penalty(self, batch: Transitions, critic: QEnsemble, candidates: Tensor) -> tuple[Tensor, Info]:
        """Calibrated penalty on chunks `(B, C, H, A)`, summed over the members like the temporal-difference loss."""
        chunks = candidates[:, :, : critic.steps]
        shape = (len(chunks), self.config.samples, *chunks.shape[2:])
        drawn = critic.action_normalizer.half_range * (2 * uniform(shape, self.generator, chunks.device) - 1)
        uniform_chunks = critic.action_normalizer.denormalize(drawn)
        candidates = torch.cat([batch.chunk[:, None, : critic.steps], chunks, uniform_chunks], 1)
        with training_mode(critic):
            values = critic.candidate_values(batch.obs, candidates)  # (M, B, 1 + C + U)
        data, policy, others = values.split([1, chunks.shape[1], self.config.samples], -1)
        penalty = conservative_penalty(data.squeeze(-1), policy, others, batch.returns)  # (M, B)
        penalty = (penalty * batch.weight).mean(1)
        info = {
            "penalty": penalty.detach().mean(),
            "calibrated": (policy.detach() < batch.returns[:, None]).float().mean(),
            "policy_value": policy.detach().mean(),
            "uniform_value": others.detach().mean(),
        }
        return self.config.weight * penalty.sum(), info


# Q-chunking.


@dataclass(frozen=True)
class QChunkingConfig(ImitationConfig):
    """Settings of QC, FQL and DQC, with smaller networks than the published 4 x 512."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(activation="gelu"))


def known_errors(errors: Tensor, known: Tensor) -> Tensor:
    """Replace unknown errors `(B,)` by the mean of the `known` `(B,)` ones.

    Rows without a loss would otherwise keep a large error, and thus a high replay priority.
    """
    mean = torch.where(known, errors, 0.0).sum() / known.sum().clamp(min=1)
    return torch.where(known, errors, mean)


def complete_chunk_loss(
    critic: QEnsemble, batch: Transitions, target: Callable[[Transitions], Tensor], steps: int
) -> tuple[Tensor, Info]:
    """`td_loss` over windows of `steps` control steps; windows cut short by the end of an episode have no loss.

    The tail of a chunk that was cut short is unknown, so its value is not learned.
    """
    complete = (batch.steps == steps).to(batch.weight.dtype)
    loss, info = td_loss(critic, replace(batch, weight=batch.weight * complete), target)
    errors = known_errors(info["td_errors"].abs().mean(0), complete > 0)
    return loss, info | {"complete": complete.mean(), "td_errors": errors}
