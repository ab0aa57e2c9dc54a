"""Shared code of the on-policy fine-tuners of generative policies: settings, the actor's step, and scores of chunks.

`ChainRecorder` scores a chunk by the density of its denoising chain, `MonteCarloFlowLoss` by training losses or
velocities at stored points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.on_policy import OnPolicyConfig, parameters_of, prefixed
from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.constraints import AtMost, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.core.distributed import average_gradients
from robopolicy.core.gradients import backward, clip_gradients
from robopolicy.core.returns import DISCOUNT_UNITS
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.exploration.chain import RecomputedChain, StochasticSampler, chain_dtype
from robopolicy.policies.exploration.sampled import SampledPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import Randomness

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class PolicyGradientConfig(Validated):
    """Settings of the gradient steps of the actor."""

    epochs: PositiveInt = 5  # passes over each rollout
    batch_size: PositiveInt = 1024  # chunk decisions per minibatch
    lr: Positive = 4.5e-5  # peak learning rate of the actor
    lr_final: Annotated[NonNegative, AtMost("lr")] = 2e-5  # learning rate at the last update (cosine)
    lr_warmup: NonNegativeInt = 5  # first updates of the actor, with a learning rate that increases linearly from 0
    grad_clip: Positive = 25.0  # largest gradient norm of the actor
    target_kl: Positive | None = 0.01  # stop the epochs when the approximate KL exceeds this
    seed: NonNegativeInt = 0  # order of the minibatches


@dataclass(frozen=True)
class FineTuningConfig(PolicyGradientConfig, OnPolicyConfig):
    """Settings of on-policy fine-tuners with a critic."""

    num_steps: PositiveInt = 50  # T, chunk decisions per environment and rollout
    discount_unit: str = "step"  # gamma per control step ("step") or per chunk ("chunk", as in the papers)
    critic_lr: Positive = 6.5e-4  # learning rate of the critic
    critic_warmup: NonNegativeInt = 0  # first rollouts that train only the critic
    critic: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256, 256), activation="silu"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discount_unit not in DISCOUNT_UNITS:
            raise unknown_name("discount unit", self.discount_unit, DISCOUNT_UNITS)


@dataclass(frozen=True)
class ChainConfig(Validated):
    """Storage of the denoising chains of a rollout; see `docs/guide/fine_tune.md` for its size."""

    chain_dtype: str = "float32"  # of recorded chains: float32 | bfloat16 (half the memory, exact ratios)
    recompute_chains: bool = False  # store only seeds and resample chains in the update: slower, little memory


@dataclass(frozen=True)
class FlowLossConfig(FineTuningConfig):
    """Settings of fine-tuners on the training loss of the head."""

    target_kl: Positive | None = None  # stop the epochs when the approximate KL of these ratios exceeds this
    num_mc_samples: PositiveInt = 8  # N, stored pairs of noise and time per chunk
    exploration_std: NonNegative = 0.0  # noise added to sampled chunks, in normalised action units
    reduction: str = "mean"  # of the loss over the executed steps of a chunk: mean | sum

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", self.reduction, REDUCTIONS)


def actor_adam(policy: Policy, config: PolicyGradientConfig) -> torch.optim.Adam:
    """Build the optimiser of the trainable weights of `policy`."""
    return torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=config.lr, fused=True)


def critic_adam(critic: ValueNet, config: FineTuningConfig) -> torch.optim.Adam:
    """Build the optimiser of the critic."""
    return torch.optim.Adam(critic.parameters(), lr=config.critic_lr, fused=True)


def cosine_rate(
    optimizer: torch.optim.Optimizer, config: PolicyGradientConfig, updates: int, total_updates: int
) -> float:
    """Set and return the learning rate after `updates` of `total_updates` rollouts: linear increase, then cosine decay.

    Without the increase the first steps are unbounded: Adam divides the gradient by its own size, every weight moves by
    the whole rate, and no KL is measured before.
    """
    fraction = 0.5 * (1 + math.cos(math.pi * updates / total_updates))
    first = config.critic_warmup if isinstance(config, FineTuningConfig) else 0
    increase = min(1.0, max(0, updates - first + 1) / (config.lr_warmup + 1))
    rate = increase * (config.lr_final + (config.lr - config.lr_final) * fraction)
    optimizer.param_groups[0]["lr"] = rate
    return rate


def clipped_step(optimizer: torch.optim.Optimizer, loss: Tensor, info: Info, grad_clip: float) -> Info:
    """Take a gradient step on `loss`, averaged over processes; returns `info` and the gradient norm under `actor/`."""
    parameters = parameters_of(optimizer)
    optimizer.zero_grad(set_to_none=True)
    backward(loss)
    average_gradients(parameters)
    norm = clip_gradients(parameters, grad_clip)
    optimizer.step()
    return {key: value.detach() for key, value in prefixed("actor", info | {"grad_norm": norm}).items()}


class ChainRecorder:
    """Storage of the denoising chains of a rollout until the update: their iterates, or seeds to resample them."""

    def __init__(self, policy: StochasticSampler, config: ChainConfig) -> None:
        policy.chain_dtype = chain_dtype(config.chain_dtype)
        self._policy = policy
        self._seeds = RecomputedChain(policy) if config.recompute_chains else None

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration and record its chain."""
        source = self._policy if self._seeds is None else self._seeds
        return source.sample(obs, generator=generator)

    def snapshot(self) -> None:
        """Copy the weights of the rollout if chains are resampled; call it before the first gradient step."""
        if self._seeds is not None:
            self._seeds.snapshot()

    @torch.no_grad()
    def resample(self, rows: RolloutBatch) -> RolloutBatch:
        """Rows of a minibatch with their chains, resampled if only seeds were recorded."""
        if self._seeds is None:
            return rows
        record, logp = self._seeds.resample(rows.obs, rows.record)
        return replace(rows, record=record, logp=logp)


class MonteCarloFlowLoss:
    """Scores of chunks at random points of the path from noise to data, drawn once per rollout.

    Ratios compare the network at these points with the network before the first gradient step.

    `policy.complete(obs, record, generator)` adds the points of up to `batch_size` rows to their record, and `logp`
    returns surrogate log-probabilities `(B, N)` of rows.
    """

    def __init__(
        self, policy: Any, logp: Callable[[RolloutBatch], Tensor], *, batch_size: int, generator: torch.Generator
    ) -> None:
        self._policy = policy
        self._logp = logp
        self._batch_size = batch_size
        self._generator = generator

    @torch.no_grad()
    def complete(self, rows: RolloutBatch) -> RolloutBatch:
        """Rows with points in their records and their scores under the current weights."""
        parts = [self._complete(part) for part in rows.split(self._batch_size)]
        record = {key: torch.cat([part.record[key] for part in parts]) for key in parts[0].record}
        return replace(rows, record=record, logp=torch.cat([part.logp for part in parts]))

    def _complete(self, rows: RolloutBatch) -> RolloutBatch:
        rows = replace(rows, record=self._policy.complete(rows.obs, rows.record, self._generator))
        return replace(rows, logp=self._logp(rows))


def sampled_policy(head: GenerativePolicy, config: FlowLossConfig, *, stratified: bool = False) -> SampledPolicy:
    """Wrap `head` with exploration noise and scores at pairs of noise and time, stratified in time if set."""
    samples, std = config.num_mc_samples, config.exploration_std
    return SampledPolicy(head, num_mc_samples=samples, exploration_std=std, stratified=stratified)


def matching_losses(policy: SampledPolicy, rows: RolloutBatch, reduction: str) -> Tensor:
    """Training loss `(B, N)` of the head at each stored pair, reduced over the executed steps."""
    return reduce_steps(policy.losses(rows.obs, rows.record), reduction)


def reduce_steps(loss: Tensor, reduction: str) -> Tensor:
    """Reduce `(B, N, Ta)` over the executed steps."""
    return loss.mean(-1) if reduction == "mean" else loss.sum(-1)


def velocity_distance(velocity: Tensor, other: Tensor) -> Tensor:
    """Mean squared distance of velocities `(B, N, Ta, A)`, a scalar; `other` is detached."""
    return (velocity - other.detach()).square().mean()
