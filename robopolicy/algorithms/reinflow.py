"""ReinFlow: online RL fine-tuning of a flow policy by noise injection (S078, Zhang et al. 2025).

A small network adds Gaussian noise to every Euler step of the pretrained flow, which turns the deterministic sampler
into a Markov chain with exact transition densities. The whole chain is one decision: its log-probabilities are summed,
divided by their number and by the action dimensions, and enter a clipped policy gradient with GAE on V(s). The noise
network is discarded at deployment.

Use it when the weights and a simulator are at hand and the base policy already succeeds sometimes. Not for black-box
policies (steer their noise instead), nor when the base never succeeds under sparse reward.

Deviations from the public code: chains are sampled and scored on the same left grid {0, 1/K, ..., (K-1)/K} (the
published 1-RF head uses two grids, so its first ratio is not 1); truncated episodes bootstrap from the value of their
last observation and cut the trace; the clamp on the log-probability, which stops the gradient silently once the noise
is small, is reported as `actor/clamped` and can be switched off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.base import Algorithm, Metrics, Stateful, frozen_copy
from robopolicy.algorithms.on_policy import (
    Beside,
    ReturnScale,
    Rows,
    explained_variance,
    minibatches,
    normalize,
    rows_with_advantages,
)
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.rollout import Rollout
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.chain import require_family
from robopolicy.policies.stochastic_flow import NoiseConfig, StochasticFlow


@dataclass(frozen=True)
class ReinFlowConfig:
    """Settings of ReinFlow; defaults are the paper's for state observations unless noted."""

    decisions: int = 50  # T, chunk decisions per environment and rollout
    gamma: float = 0.99  # discount, see discount_unit
    discount_unit: str = "step"  # step: gamma per control step inside chunks too | chunk: once per chunk (paper)
    lam: float = 0.95  # GAE lambda
    epochs: int = 5  # passes over each rollout
    batch_size: int = 1024  # chunk decisions per minibatch
    clip: float = 0.01  # ratio bounds on the normalised log-probability
    lr: float = 4.5e-5  # peak learning rate of the velocity and noise networks
    lr_final: float = 2e-5  # learning rate at the last update (cosine)
    critic_lr: float = 6.5e-4  # learning rate of the critic
    entropy_coef: float = 0.03  # weight of the mean entropy of the chain
    bc_coef: float = 0.0  # weight of the squared distance to the base policy's deterministic chunk ("W2")
    grad_clip: float = 25.0  # largest gradient norm of the actor
    target_kl: float | None = 0.01  # stop the epochs when the approximate KL exceeds this
    critic_warmup: int = 0  # first rollouts that train the critic alone
    logp_clamp: float | None = 1.0  # bound on the normalised log-probability; None switches it off
    normalize_reward: bool = True  # divide rewards by the running standard deviation of the return
    noise: NoiseConfig = field(default_factory=NoiseConfig)  # bounds and schedule of the injected noise
    critic: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256, 256), activation="silu"))
    seed: int = 0  # order of the minibatches


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


def bc_loss(policy: Policy, base: Policy, obs: Observation) -> Tensor:
    """Squared distance of the deterministic chunks of both policies from zero noise, in action units."""
    batch = next(iter(obs.values())).shape[0]
    noise = next(policy.parameters()).new_zeros(batch, policy.spec.horizon, policy.spec.action_dim)
    with torch.no_grad():
        target = base.decode(obs, noise)
    return nn.functional.mse_loss(policy.decode(obs, noise), target)


class ReinFlow(Algorithm):
    """Fine-tunes a flow policy by PPO on its noise-injected denoising chain."""

    name = "reinflow"
    experience = "rollout"

    def __init__(self, config: ReinFlowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_family(policy, ("flow",), "ReinFlow", "use dppo for diffusion and ppo for a Gaussian")
        chain = StochasticFlow(head, config.noise)
        super().__init__(chain, total_updates=total_updates, seed=config.seed)
        self.config = config
        self.policy: StochasticFlow = chain
        self.base = frozen_copy(head)
        self.step_discount = config.gamma if config.discount_unit == "step" else 1.0
        self.critic = ValueNet(config.critic, policy.spec)
        self.estimator = Estimator(
            EstimatorConfig(bounds=ConstantBounds(config.clip), entropy_coef=config.entropy_coef)
        )
        self.actor_parameters = list(self.policy.parameters())
        self.actor_optimizer = torch.optim.Adam(self.actor_parameters, lr=config.lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_lr, fused=True)
        self.scale = ReturnScale()
        self._beside = Beside()

    def deployable(self) -> Policy:
        """The fine-tuned flow without the noise network."""
        return self.policy.head

    def update(self, batch: Rollout) -> Metrics:
        """Several epochs of clipped updates on one rollout."""
        config = self.config
        if config.normalize_reward:
            self.scale.observe(batch, config.gamma)
        rows = rows_with_advantages(
            batch,
            self.critic,
            gamma=config.gamma,
            lam=config.lam,
            discount_unit=config.discount_unit,
            reward_scale=self.scale.factor,
        )
        self._set_lr()
        info, epochs = self._epochs(rows, train_actor=self.updates >= config.critic_warmup)
        self.critic.observe(rows.obs)
        self.updates += 1
        self.policy.set_progress(self.updates / self.total_updates)  # after the epochs, or first ratios were not 1
        metrics = {key: float(value) for key, value in info.items()}
        metrics["critic/explained_variance"] = explained_variance(rows)
        return metrics | {"actor/epochs": float(epochs), "actor/lr": self.actor_optimizer.param_groups[0]["lr"]}

    def _set_lr(self) -> None:
        config = self.config
        share = 0.5 * (1 + math.cos(math.pi * self.updates / self.total_updates))
        self.actor_optimizer.param_groups[0]["lr"] = config.lr_final + (config.lr - config.lr_final) * share

    def _epochs(self, rows: Rows, *, train_actor: bool) -> tuple[dict[str, Tensor], int]:
        info: dict[str, Tensor] = {}
        for epoch in range(self.config.epochs):
            for minibatch, _ in minibatches(rows, self.config.batch_size, self.generator):
                self._beside.start(self._critic_step, minibatch)
                parts = self._actor_step(minibatch) if train_actor else {}
                info["critic/loss"] = self._beside.wait()
                if parts is None:
                    return info, epoch
                info |= parts
        return info, self.config.epochs

    def _critic_step(self, rows: Rows) -> Tensor:
        loss = nn.functional.mse_loss(self.critic(rows.obs), rows.value_target)
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()
        return loss.detach()

    def _actor_step(self, rows: Rows) -> dict[str, Tensor] | None:
        """One gradient step; None, and no step, once the KL is too large."""
        config = self.config
        loss, info = actor_loss(self.policy, rows, self.estimator, config)
        if config.target_kl is not None and float(info["approx_kl"]) > config.target_kl:
            return None
        if config.bc_coef:
            info["bc_loss"] = bc = bc_loss(self.policy.head, self.base, rows.obs)
            loss = loss + config.bc_coef * bc
        self.actor_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        info["grad_norm"] = nn.utils.clip_grad_norm_(self.actor_parameters, config.grad_clip)
        self.actor_optimizer.step()
        return {f"actor/{key}": value.detach() for key, value in info.items()}

    def parts(self) -> Mapping[str, Stateful]:
        """Networks, the frozen base too, optimisers and the running scale of the rewards."""
        return {
            "policy": self.policy,
            "base": self.base,
            "critic": self.critic,
            "actor_optimizer": self.actor_optimizer,
            "critic_optimizer": self.critic_optimizer,
            "scale": self.scale,
        }
