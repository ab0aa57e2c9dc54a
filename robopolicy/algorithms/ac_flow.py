"""AC-Flow: flow matching with intermediate feedback (Fan et al. 2025), a reconstruction for action chunks.

An intermediate critic V(x_t, t, s) predicts the outcome at points between noise and chunk. The actor minimises the
matching loss of pretraining on its own chunks, with each stored pair weighted by `exp(A / temperature)`, where `A =
outcome - V(x_t, t, s)`. Subtracting V scales all targets of a point equally, so the optimal velocity is unchanged while
the weights stay near 1. For stability, outcomes are normalised, A is clipped, and the first rollouts train only the
critics. A penalty on the squared velocity distance to the pretrained policy bounds the Wasserstein-2 distance to it (as
in ORW-CFM-W2, where V = 0 and the outcome is a reward).

Use it to study intermediate feedback. The weights are positive, so it improves more slowly than signed weights (FPO++,
AWM), clones exploration noise, and drifts with few sampler steps unless the penalty is strong. It does not support
heads with learned step lengths.

Reconstructed from the abstract, summaries and the predecessor's code, without the paper's numbers. Images become
chunks: the outcome is the normalised GAE advantage on V(s). Points lie on the line to the drawn chunk, at the stored
pairs, not on the sampler's trajectory. The weights of an iteration use the intermediate critic before its update. Loss
and penalty are divided by `1 + w2_coef`, which keeps the optimum and a finite limit for an infinite penalty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fine_tuning import (
    FlowLossConfig,
    MonteCarloFlowLoss,
    actor_adam,
    clipped_step,
    cosine_rate,
    critic_adam,
    matching_losses,
    sampled_policy,
    velocity_distance,
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, flatten, normalize
from robopolicy.constraints import NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.core.decisions import Decisions
from robopolicy.core.distributed import average_gradients
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.gradients import backward
from robopolicy.critics.q import copy_statistics
from robopolicy.data.batches import Rollout
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.mlp import MLP
from robopolicy.nets.time import SinusoidalEmbedding
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.sampled import SampledPolicy, require_supported
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import interpolate
from robopolicy.spec import PolicySpec

TIME_DIM = 16  # width of the time embedding


@dataclass(frozen=True)
class IntermediateConfig(Validated):
    """Architecture of an `IntermediateValue`."""

    hidden: tuple[PositiveInt, ...] = (256, 256, 256)
    activation: str = "silu"
    normalization: str = "running"  # minmax | meanstd | running | identity
    vision: VisionConfig = field(default_factory=VisionConfig)


class IntermediateValue(nn.Module):
    """V(x_t, t, s): points `(B, N, H, A)` at times `(B, N)` and observations `{key: (B, To, ...)}` -> `(B, N)`."""

    def __init__(self, config: IntermediateConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(spec.observation, normalization=config.normalization, vision=config.vision)
        self.time = SinusoidalEmbedding(TIME_DIM)
        size = spec.obs_horizon * self.encoder.feature_dim + TIME_DIM + spec.horizon * spec.action_dim
        self.head = MLP(size, config.hidden, 1, activation=config.activation)

    def forward(self, obs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        """Predict the outcome at `x`, in normalised action units."""
        features = self.encoder(obs).flatten(1).unsqueeze(1).expand(-1, t.shape[1], -1)
        return self.head(torch.cat([features, self.time(t), x.flatten(2)], -1)).squeeze(-1)

    def update_stats(self, obs: Mapping[str, Tensor]) -> None:
        """Update a running normaliser with `obs`; does nothing in other modes."""
        self.encoder.update_stats(obs)


@dataclass(frozen=True)
class ACFlowConfig(FlowLossConfig):
    """Settings of AC-Flow; published values are unknown."""

    grad_clip: Positive = 1.0  # largest gradient norm of the actor
    critic_warmup: NonNegativeInt = 3  # first rollouts that train only the critics
    temperature: Positive = 0.5  # of the weights
    advantage_clip: Positive = 1.0  # of the intermediate advantage; weights lie within exp(+-clip / temperature)
    w2_coef: NonNegative = 10.0  # weight of the squared velocity distance to the pretrained policy; 1 drifts on lift
    intermediate: IntermediateConfig = field(default_factory=IntermediateConfig)  # network of the intermediate critic


def critic_weights(advantage: Tensor, clip: float, temperature: float) -> Tensor:
    """Weights `exp(A / temperature)` of clipped intermediate advantages, in their shape."""
    return (advantage.clamp(-clip, clip) / temperature).exp()


def ac_flow_loss(
    logp: Tensor, logp_old: Tensor, weight: Tensor, distance: Tensor, estimator: Estimator, w2_coef: float
) -> tuple[Tensor, Info]:
    """Convex combination of the weighted matching loss of pairs `(B, N)` and the penalty."""
    loss, info = estimator(Decisions(logp_old), weight, logp)
    share = 1.0 / (1.0 + w2_coef)
    return share * loss + (1.0 - share) * distance, info | {"w2_distance": distance, "weight": weight.mean()}


class ACFlow(OnPolicy):
    """Critic-weighted matching on the policy's own chunks with a penalty on the distance to the pretrained policy."""

    name = "ac_flow"
    config_class = ACFlowConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "fan2025acflow"
    distributed = True
    config: ACFlowConfig
    policy: SampledPolicy

    def __init__(self, config: ACFlowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_supported(policy, "AC-Flow")
        super().__init__(config, sampled_policy(head, config), total_updates=total_updates)
        self.base: GenerativePolicy = frozen_copy(head)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        size = config.batch_size
        self.flow_loss = MonteCarloFlowLoss(self.policy, self.logp, batch_size=size, generator=self.generator)
        # Weights times minus a log-ratio, whose gradient equals the gradient of the weighted loss.
        self.estimator = Estimator(EstimatorConfig(surrogate="policy_gradient"))
        self.intermediate = IntermediateValue(config.intermediate, self.policy.spec)
        copy_statistics(self.intermediate.encoder, policy)
        self.intermediate_optimizer = torch.optim.Adam(self.intermediate.parameters(), lr=config.critic_lr, fused=True)

    def inference_policy(self) -> Policy:
        """The head without its exploration."""
        return self.policy.head

    def logp(self, rows: RolloutBatch) -> Tensor:
        """Minus the loss `(B, N)` of each pair."""
        return -matching_losses(self.policy, rows, self.config.reduction)

    def intermediate_value(self, rows: RolloutBatch) -> Tensor:
        """Value `(B, N)` at the stored pairs."""
        data, noise, t = rows.record["data"].unsqueeze(1), rows.record["noise"], rows.record["t"]
        return self.intermediate(rows.obs, interpolate(noise, data, t[..., None, None]), t)

    @torch.no_grad()
    def compute_weights(self, rows: RolloutBatch) -> RolloutBatch:
        """Rows with normalised outcomes `(B,)`, stored pairs and their weights `(B, N)`, before the critic's update."""
        rows = replace(rows, record=rows.record | {"outcome": normalize(rows.advantage)})
        rows = self.flow_loss.complete(rows)
        value = torch.cat([self.intermediate_value(part) for part in rows.split(self.config.batch_size)])
        advantage = rows.record["outcome"].unsqueeze(1) - value
        weight = critic_weights(advantage, self.config.advantage_clip, self.config.temperature)
        return replace(rows, record=rows.record | {"weight": weight})

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Weighted matching loss with the distance to the pretrained policy, and metrics."""
        velocity = self.policy.velocities(self.policy.head, rows.obs, rows.record)
        with torch.no_grad():
            reference = self.policy.velocities(self.base, rows.obs, rows.record)
        distance = velocity_distance(velocity, reference)
        weight = rows.record["weight"]
        return ac_flow_loss(self.logp(rows), rows.logp, weight, distance, self.estimator, self.config.w2_coef)

    def critic_step(self, rows: RolloutBatch) -> Tensor:
        """Take a step of V(s) and of the intermediate critic; returns the loss of V(s)."""
        loss = super().critic_step(rows)
        value = self.intermediate_value(rows)
        error = nn.functional.mse_loss(value, rows.record["outcome"].unsqueeze(1).expand_as(value))
        self.intermediate_optimizer.zero_grad(set_to_none=True)
        backward(error)
        average_gradients(list(self.intermediate.parameters()))
        self.intermediate_optimizer.step()
        return loss

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs of weighted matching on a rollout."""
        config = self.config
        self.update_reward_scale(batch)  # running standard deviation of the return
        rows = self.compute_weights(self.process_rollout(batch))  # scaled rewards, GAE on V(s), stored points, weights
        rate = cosine_rate(self.actor_optimizer, config, self.updates, self.total_updates)
        stats: dict[str, Any] = {"actor/lr": rate}
        epochs = Epochs(partial(self.minibatches, rows, batch.shape), config.epochs, self.actor_optimizer)
        for part, _ in epochs:
            with self.critic_in_background(part, stats):
                if self.updates < config.critic_warmup:
                    continue
                loss, info = self.loss(part)
                if epochs.stop(info, config.target_kl):
                    break
                stats |= clipped_step(self.actor_optimizer, loss, info, config.grad_clip)
        metrics = self.finish(batch, rows, stats | epochs.stats())
        self.intermediate.update_stats(flatten(batch.obs))
        return metrics

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, frozen base, optimisers and reward scale."""
        own = {"base": self.base, "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        critic = {"intermediate": self.intermediate, "intermediate_optimizer": self.intermediate_optimizer}
        return {**super().checkpoint_items(), **own, **critic}
