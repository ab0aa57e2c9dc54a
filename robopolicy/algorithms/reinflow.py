"""ReinFlow: online RL fine-tuning of a flow policy by noise injection (S078, Zhang et al. 2025).

A small network adds Gaussian noise to every Euler step of the pretrained flow, which turns the deterministic sampler
into a Markov chain with exact transition densities. The whole chain is one decision: its log-probabilities are summed,
divided by their number and by the action dimensions, and enter a clipped policy gradient with GAE on V(s). The noise
network is discarded at deployment.

Use it when the weights and a simulator are at hand and the base policy already succeeds sometimes. Not for black-box
policies (steer their noise instead), nor when the base never succeeds under sparse reward.

Deviations from the public code: chains are sampled and scored on the same left grid {0, 1/K, ..., (K-1)/K} (the
published 1-RF head uses two grids, so its first ratio is not 1); truncated episodes bootstrap from the value of their
last observation and cut the trace. There, the density of the initial noise counts as one more transition: it cancels
from every ratio, but the K others are divided by K + 1, so that `clip` and `entropy_coef` bite (K + 1) / K times sooner
here. It also keeps the published clamp on the normalised log-probability (`logp_clamp=1`) away from what the noise
bounds allow; without it that clamp stops the gradient of small noise, so here it is off, and reported as
`actor/clamped` where it is on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Metrics
from robopolicy.algorithms.frames.chain_tuner import ChainTuner, ChainTunerConfig
from robopolicy.algorithms.frames.fine_tuner import FineTuner, FineTunerConfig
from robopolicy.algorithms.frames.on_policy import Rows, normalize
from robopolicy.constraints import NotNegative, Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.exploration.chain import require_family
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.generative import GenerativePolicy


@dataclass(frozen=True)
class ReinFlowConfig(ChainTunerConfig, FineTunerConfig):
    """Settings of ReinFlow; defaults are the paper's for states but for those in docs/methods.md."""

    clip: Positive = 0.01  # ratio bounds on the normalised log-probability
    entropy_coef: NotNegative = 0.03  # weight of the mean entropy of the chain
    bc_coef: NotNegative = 0.0  # weight of the squared distance to the base policy's deterministic chunk ("W2")
    logp_clamp: Positive | None = None  # bound on the normalised log-probability; it stops the gradient of small noise
    noise: NoiseConfig = field(default_factory=NoiseConfig)  # bounds and schedule of the injected noise


def chain_logp(logp: Tensor, dims: int, clamp: float | None) -> Tensor:
    """One log-probability per chain `(B, 1)`: mean over the K transitions `(B, K)` and the D action dimensions."""
    mean = logp.mean(1, keepdim=True) / dims
    return mean if clamp is None else mean.clamp(-clamp, clamp)


def actor_loss(
    policy: StochasticFlow, rows: Rows, estimator: Estimator, config: ReinFlowConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate on whole-chain ratios, minus the entropy bonus."""
    dims = policy.spec.horizon * policy.spec.action_dim
    output = policy.decisions(rows.obs, rows.record)
    new, old = (chain_logp(logp, dims, config.logp_clamp) for logp in (output.logp, rows.logp))
    entropy = output.entropy.mean(1, keepdim=True) / dims
    loss, info = estimator(Decisions(logp_old=old), normalize(rows.advantage)[:, None], new, entropy)
    if config.logp_clamp is not None:
        info["clamped"] = (new.detach().abs() >= config.logp_clamp).float().mean()
    return loss, info


def bc_loss(policy: GenerativePolicy, base: Policy, obs: Observation) -> Tensor:
    """Squared distance of the deterministic chunks of both policies from zero noise, in normalised units."""
    batch = next(iter(obs.values())).shape[0]
    noise = next(policy.parameters()).new_zeros(batch, policy.spec.horizon, policy.spec.action_dim)
    with torch.no_grad():
        target = policy.action_normalizer.normalize(base.decode(obs, noise))
    return nn.functional.mse_loss(policy.action_normalizer.normalize(policy.decode(obs, noise)), target)


class ReinFlow(ChainTuner, FineTuner):
    """Fine-tunes a flow policy by PPO on its noise-injected denoising chain."""

    name = "reinflow"
    config_class = ReinFlowConfig
    data_source = "rollout"
    heads = ("flow", "shortcut", "meanflow")
    reference = "zhang2025reinflow"
    config: ReinFlowConfig
    policy: StochasticFlow

    def __init__(self, config: ReinFlowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_family(policy, ("flow",), "ReinFlow", "use dppo for diffusion and ppo for a Gaussian")
        super().__init__(config, StochasticFlow(head, config.noise), head, total_updates=total_updates)
        self.estimator = Estimator(
            EstimatorConfig(bounds=ConstantBounds(config.clip), entropy_coef=config.entropy_coef)
        )

    def deployable(self) -> Policy:
        """The fine-tuned flow without the noise network."""
        return self.policy.head

    def chain_loss(self, rows: Rows) -> tuple[Tensor, Info]:
        """Clipped surrogate, entropy bonus and distance to the base."""
        loss, info = actor_loss(self.policy, rows, self.estimator, self.config)
        if self.config.bc_coef:
            info["bc_loss"] = bc = bc_loss(self.policy.head, self.base, rows.obs)
            loss = loss + self.config.bc_coef * bc
        return loss, info

    def update(self, batch: Rollout) -> Metrics:
        """One rollout; then the noise schedule advances, as first ratios would not be 1 otherwise."""
        metrics = super().update(batch)
        self.policy.set_progress(self.progress)
        return metrics
