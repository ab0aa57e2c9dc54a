"""PolicyFlow: PPO on flow policies without likelihoods along the path (Yang et al. 2026).

An action is the endpoint of the flow plus Gaussian noise of learned scale. The shift of the endpoint under new weights
is approximated by the change of velocity at random points of the straight line from the initial noise to the old
endpoint. The ratio is of two Gaussians around the old endpoint, one shifted by that change. The loss is PPO's clipped
surrogate, a bonus on the entropy of the Gaussian, and the Brownian regulariser, which regresses `(1 - t) v` on `x_t - t
v_old`: velocities against the score, as in Brownian motion, which keep the policy diverse and multimodal.

Use it to train a flow, diffusion or EDM policy with PPO-sized steps (clip 0.2), from scratch or pretrained, with many
sampler steps. It is unsuitable if added noise fails the task, and for heads with learned step lengths (shortcut,
MeanFlow).

Checked against the authors' code. Deviations: times are drawn once per rollout (published: per minibatch), several may
be averaged, and the final time, where the sampler never evaluates the velocity, is excluded; published policies start
from scratch with a zero-initialised output layer and unit noise, here any head and less noise; the KL ends the epochs
instead of adapting the learning rate; advantages are normalised per minibatch (published: per rollout), values are not
clipped, and the gradient is clipped to norm 25 (published: 1). The paper's regulariser reportedly has the current
velocity on both sides; the code has the old one in the target, as is the default here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fine_tuning import (
    FineTuningConfig,
    MonteCarloFlowLoss,
    actor_adam,
    clipped_step,
    cosine_rate,
    critic_adam,
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.endpoint_noise import EndpointNoiseConfig, EndpointNoisePolicy
from robopolicy.policies.exploration.sampled import require_supported

TARGETS = ("old", "present")


@dataclass(frozen=True)
class PolicyFlowConfig(FineTuningConfig):
    """Settings of PolicyFlow; coefficients are the defaults of the public code."""

    target_kl: Positive | None = 0.02  # stop the epochs when the approximate KL exceeds this
    clip: Positive = 0.2  # ratio bounds
    times: PositiveInt = 1  # M, points of the path per chunk; the ratio is their mean
    entropy_coef: NonNegative = 0.01  # weight of the entropy of the added noise, summed over the executed dimensions
    brownian_coef: NonNegative = 0.01  # weight of the Brownian regulariser; 0.25 to keep many modes
    brownian_target: str = "old"  # velocity in its target: old (code) | present (paper)
    perturbation: EndpointNoiseConfig = field(default_factory=EndpointNoiseConfig)  # noise on the endpoint

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.brownian_target not in TARGETS:
            raise unknown_name("brownian_target", self.brownian_target, TARGETS)


def brownian_loss(velocity: Tensor, old: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Info]:
    """Mean of `((1 - t) v - (x - t v_target))^2` over points `(B, M, H, A)`; times broadcast.

    Along the linear path the score is `-(x - t v) / (1 - t)`; Brownian motion has minus half of it as velocity.
    """
    loss = ((1 - t) * velocity - (x - t * old)).square().mean()
    return loss, {"brownian": loss}


class PolicyFlow(OnPolicy):
    """PPO on the perturbed endpoint of a flow."""

    name = "policyflow"
    config_class = PolicyFlowConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "yang2026policyflow"
    distributed = True
    config: PolicyFlowConfig
    policy: EndpointNoisePolicy

    def __init__(self, config: PolicyFlowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_supported(policy, "PolicyFlow")
        perturbed = EndpointNoisePolicy(head, config.perturbation, times=config.times)
        super().__init__(config, perturbed, total_updates=total_updates)
        self.base: Policy = frozen_copy(head)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        size = config.batch_size
        self.flow_loss = MonteCarloFlowLoss(self.policy, self.logp, batch_size=size, generator=self.generator)
        bounds = ConstantBounds(config.clip)
        self.estimator = Estimator(EstimatorConfig(bounds=bounds, entropy_coef=config.entropy_coef))

    def inference_policy(self) -> Policy:
        """The head without its exploration."""
        return self.policy.head

    def logp(self, rows: RolloutBatch) -> Tensor:
        """Log-density `(B, 1)` of the recorded actions."""
        return self.policy.decisions(rows.obs, rows.record).logp

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Clipped surrogate, entropy bonus and Brownian regulariser, and metrics."""
        velocity = self.policy.velocities(rows.obs, rows.record)
        output = self.policy.score(rows.record, velocity)
        advantage = normalize(rows.advantage)
        loss, info = self.estimator(Decisions(rows.logp), advantage, output.logp, output.entropy)
        info["std"] = self.policy.log_std.exp().mean()
        if self.config.brownian_coef:
            old = rows.record["velocity"] if self.config.brownian_target == "old" else velocity
            executed = slice(self.policy.spec.action_horizon)
            x, t = self.policy.points(rows.record)[:, :, executed], rows.record["t"][..., None, None]
            brownian, extra = brownian_loss(velocity[:, :, executed], old[:, :, executed], x, t)
            loss, info = loss + self.config.brownian_coef * brownian, info | extra
        return loss, info

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs of clipped updates on a rollout."""
        config = self.config
        self.update_reward_scale(batch)  # running standard deviation of the return
        rows = self.flow_loss.complete(self.process_rollout(batch))  # scaled rewards, GAE on V(s), stored points
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
        return self.finish(batch, rows, stats | epochs.stats())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, frozen base, optimisers and reward scale."""
        own = {"base": self.base, "actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own}
