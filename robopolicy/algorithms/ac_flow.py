"""AC-Flow: flow matching with intermediate feedback (S147, Fan et al. 2025), a reconstruction for action chunks.

An intermediate critic V(x_t, t, s) estimates, at points on the way from noise to the chunk, the outcome to come. The
actor repeats the matching loss of pretraining on its own chunks, each stored pair weighted by `exp(A / temperature)`
with `A = outcome - V(x_t, t, s)`. Any function of (x_t, t, s) may be subtracted in the exponent: it scales all targets
that meet in one point alike, so the best velocity there stays the same, while the weights stay near 1. Stability comes
from three sides: outcomes are normalised, A is clipped, and the actor waits until the critic has been trained for some
rollouts. A penalty on the squared velocity distance to the pretrained policy bounds the Wasserstein-2 distance to it
(as in ORW-CFM-W2, of which this is the extension; there V = 0 and the outcome is a reward).

Use it to study intermediate feedback. Weights are positive, so the policy mostly repeats itself: it improves slower
than with signed weights (FPO++, AWM), exploration noise would be cloned, and a sampler of few steps drifts unless the
penalty is strong. Not for heads with learned step lengths.

Reconstructed from the abstract, summaries and the predecessor's code; the paper's own numbers were not seen. Images
become chunks: the outcome is the normalised GAE advantage on V(s), so that the intermediate critic explains what V(s)
cannot. Points lie on the line to the drawn chunk, at the stored pairs, not on the sampler's trajectory. The weights of
an iteration are formed with the intermediate critic as it was before. Loss and penalty are divided by `1 + w2_coef`,
which leaves the optimum and keeps the limit of an infinite penalty finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Metrics, Stateful
from robopolicy.algorithms.frames.matching import MatchingConfig, MatchingTuner, velocity_distance
from robopolicy.algorithms.frames.on_policy import Rows, flatten, normalize
from robopolicy.constraints import Natural, NotNegative, Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.critics.intermediate import IntermediateConfig, IntermediateValue
from robopolicy.critics.q import borrow_statistics
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.path import interpolate


@dataclass(frozen=True)
class ACFlowConfig(MatchingConfig):
    """Settings of AC-Flow; no published values were seen."""

    grad_clip: Positive = 1.0  # largest gradient norm of the actor
    critic_warmup: Natural = 3  # first rollouts that train the critics alone
    temperature: Positive = 0.5  # of the weights
    advantage_clip: Positive = 1.0  # bound on the intermediate advantage; weights lie within exp(+-clip / temperature)
    w2_coef: NotNegative = 10.0  # weight of the squared velocity distance to the pretrained policy; 1 drifted on lift
    intermediate: IntermediateConfig = field(default_factory=IntermediateConfig)  # network of the intermediate critic


def critic_weights(advantage: Tensor, clip: float, temperature: float) -> Tensor:
    """Weights `exp(A / temperature)` of clipped intermediate advantages, in their shape."""
    return (advantage.clamp(-clip, clip) / temperature).exp()


def actor_loss(
    logp: Tensor, logp_old: Tensor, weight: Tensor, distance: Tensor, estimator: Estimator, w2_coef: float
) -> tuple[Tensor, Info]:
    """Weighted matching of the pairs `(B, N)` plus the penalty, as a convex combination of both."""
    loss, info = estimator(Decisions(logp_old), weight, logp)
    share = 1.0 / (1.0 + w2_coef)
    return share * loss + (1.0 - share) * distance, info | {"w2_distance": distance, "weight": weight.mean()}


class ACFlow(MatchingTuner):
    """Critic-weighted matching on own chunks with a pull towards the pretrained policy."""

    name = "ac_flow"
    config_class = ACFlowConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "fan2025acflow"
    config: ACFlowConfig

    def __init__(self, config: ACFlowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        super().__init__(config, policy, title="AC-Flow", total_updates=total_updates)
        # Weights times minus a log-ratio: the gradient is that of the weighted loss.
        self.estimator = Estimator(EstimatorConfig(surrogate="pg"))
        self.intermediate = IntermediateValue(config.intermediate, self.policy.spec)
        borrow_statistics(self.intermediate.encoder, policy)
        self.intermediate_optimizer = torch.optim.Adam(self.intermediate.parameters(), lr=config.critic_lr, fused=True)

    def logp(self, rows: Rows) -> Tensor:
        """Minus the loss `(B, N)` of each pair."""
        return -self.losses(rows)

    def prepare(self, rows: Rows) -> Rows:
        """Normalise the outcomes over the rollout, then draw the pairs."""
        return super().prepare(replace(rows, record=rows.record | {"outcome": normalize(rows.advantage)}))

    def complete(self, rows: Rows) -> Rows:
        """Also the weights of the pairs, from the critic before its update."""
        rows = super().complete(rows)
        advantage = rows.record["outcome"].unsqueeze(1) - self.intermediate_value(rows)
        weight = critic_weights(advantage, self.config.advantage_clip, self.config.temperature)
        return replace(rows, record=rows.record | {"weight": weight})

    def intermediate_value(self, rows: Rows) -> Tensor:
        """Value `(B, N)` at the stored pairs."""
        data, noise, t = rows.record["data"].unsqueeze(1), rows.record["noise"], rows.record["t"]
        return self.intermediate(rows.obs, interpolate(noise, data, t[..., None, None]), t)

    def actor_loss(self, rows: Rows) -> tuple[Tensor, Info]:
        """Weighted matching loss and the distance to the pretrained policy."""
        velocity = self.policy.velocities(self.policy.head, rows.obs, rows.record)
        with torch.no_grad():
            reference = self.policy.velocities(self.base, rows.obs, rows.record)
        distance = velocity_distance(velocity, reference)
        weight = rows.record["weight"]
        return actor_loss(self.logp(rows), rows.logp, weight, distance, self.estimator, self.config.w2_coef)

    def _critic_step(self, rows: Rows) -> Tensor:
        """One step of V(s) and one of the intermediate critic."""
        loss = super()._critic_step(rows)
        value = self.intermediate_value(rows)
        error = nn.functional.mse_loss(value, rows.record["outcome"].unsqueeze(1).expand_as(value))
        self.intermediate_optimizer.zero_grad(set_to_none=True)
        error.backward()
        self.intermediate_optimizer.step()
        return loss

    def update(self, batch: Rollout) -> Metrics:
        """One rollout; then the intermediate critic's normaliser moves."""
        metrics = super().update(batch)
        self.intermediate.observe(flatten(batch.obs))
        return metrics

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts and the intermediate critic with its optimiser."""
        return {
            **super().parts(),
            "intermediate": self.intermediate,
            "intermediate_optimizer": self.intermediate_optimizer,
        }
