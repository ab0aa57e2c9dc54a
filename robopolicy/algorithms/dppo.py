"""DPPO: online RL fine-tuning of a diffusion policy, PPO on its denoising steps (Ren et al. 2024).

Each of the last K' denoising steps is a Gaussian decision; a frozen copy of the pretrained policy takes the steps
before. All steps of a chunk share its advantage, GAE on V(s) with a critic that does not depend on the denoising state,
discounted by `gamma_denoise` per remaining step. The clip range grows from `clip_base` at the noisiest trained step to
`clip` at the last.

Evaluation leaves out exploration noise (all noise with the sampler ddim), so success in evaluation can lag behind
success in rollouts; with the sampler ddpm it runs nearly the trained chain.

Use it with the weights of a diffusion policy that sometimes succeeds, and a simulator. For flow heads, whose steps have
no Gaussian noise, use reinflow. It does not support black-box policies, nor bases that never succeed under sparse
reward. Fewer than about ten trained steps learn less; more cost time.

A minibatch has whole chains, where the published code shuffles (decision, step) pairs: observations are encoded once
per decision instead of K' times, and the gradient has the same expectation. A published batch of 50000 pairs with K' =
10 is `batch_size` 5000.

Deviations from the public code: truncated episodes bootstrap from their last observation and cut the trace; `std_min`
applies to sampling and density (the published furniture runs use two values); the sampler ddpm evaluates without a
minimum (there: 1e-3); the last iterate is scored as drawn and clipped afterwards (there: clipped and then scored, with
a density that is not the one of the clipped action); the epochs stop before the step whose minibatch exceeds
`target_kl` (there: after it), so that no step starts beyond it; K' = 1 clips at `clip` instead of dividing 0 by 0; the
entropy bonus uses the entropy of the steps, not eta, and has an effect only if eta is learned; the imitation of
`bc_coef` scores only the executed actions (there: the whole chunk); the fraction of clamped log-densities, which have
no gradient, is logged as `actor/clamped`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.fine_tuning import (
    ChainConfig,
    ChainRecorder,
    FineTuningConfig,
    actor_adam,
    clipped_step,
    cosine_rate,
    critic_adam,
)
from robopolicy.algorithms.common.on_policy import OnPolicy
from robopolicy.algorithms.common.rollout_batch import Epochs, RolloutBatch, normalize
from robopolicy.constraints import AtMost, Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt, Range
from robopolicy.core.advantage import DepthDiscount
from robopolicy.core.decisions import Decisions
from robopolicy.core.distributed import all_gather
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import DepthBounds
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.exploration.chain import require_family
from robopolicy.policies.exploration.diffusion_chain import LOGP_BOUNDS, DiffusionChain
from robopolicy.policies.heads.diffusion import DiffusionPolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.staged import StagedDiffusion, make_staged

Tail = Annotated[float, Range(0, 0.5, exclusive_maximum=True)]  # fraction clipped at either end


@dataclass(frozen=True)
class DPPOConfig(ChainConfig, FineTuningConfig):
    """Settings of DPPO; defaults are the paper's for locomotion, except as noted here or in docs/methods."""

    trained_steps: NonNegativeInt = 0  # K', last sampler steps that are trained (paper: 10 of 20); 0: newest network's
    gamma_denoise: Fraction = 0.99  # discount per remaining denoising step; 0 trains only the last step
    clip: Positive = 0.01  # half-width of the ratio bounds at the last step
    clip_base: Positive = 0.001  # half-width at the first trained step
    clip_rate: Positive = 3.0  # exponent of the schedule between them
    advantage_quantile: Tail = 0.0  # advantages are clipped at this quantile and 1 minus it; 0 disables
    std_min: Positive = 0.1  # smallest standard deviation of a training step, normalised actions
    noise_clip: NonNegative = 3.0  # noise is clipped to this many standard deviations; 0 disables
    eta: Fraction = 1.0  # fraction of DDPM's noise in training with the sampler ddim; 0 in evaluation
    eta_min: Fraction = 1.0  # if below eta, the fraction is learned between the two
    entropy_coef: NonNegative = 0.0  # weight of the mean entropy of the steps; has an effect only if eta is learned
    bc_coef: NonNegative = 0.0  # weight of the negative log-probability of chains from the base
    lr: Positive = 1e-4  # peak learning rate of the actor
    lr_final: Annotated[NonNegative, AtMost("lr")] = 1e-4  # learning rate at the last update (cosine)
    critic_lr: Positive = 1e-3  # learning rate of the critic
    batch_size: PositiveInt = 5000  # whole chains per minibatch
    target_kl: Positive | None = 1.0  # stop the epochs when the approximate KL exceeds this
    critic: ValueConfig = field(
        default_factory=lambda: ValueConfig(hidden=(256, 256, 256), residual=True, activation="mish")
    )


def step_advantage(advantage: Tensor, decisions: Decisions, config: DPPOConfig) -> Tensor:
    """Advantage `(B, K')` of each step from the advantage `(B,)` of the chunk: normalise, clip, discount."""
    advantage = normalize(advantage)
    if config.advantage_quantile:
        edges = torch.tensor([config.advantage_quantile, 1 - config.advantage_quantile], device=advantage.device)
        low, high = all_gather(advantage).quantile(edges)
        advantage = advantage.clamp(low, high)
    return advantage[:, None] * DepthDiscount(config.gamma_denoise, decisions.shape[1])(decisions)


def dppo_loss(
    policy: DiffusionChain, rows: RolloutBatch, estimator: Estimator, config: DPPOConfig
) -> tuple[Tensor, Info]:
    """Clipped surrogate with one ratio per denoising step, minus the entropy bonus."""
    mean, log_std = policy.transitions(rows.obs, rows.record)
    output = policy.score(rows.record, mean, log_std)
    decisions = Decisions(logp_old=rows.logp)
    advantage = step_advantage(rows.advantage, decisions, config)
    loss, info = estimator(decisions, advantage, output.logp, output.entropy)
    with torch.no_grad():
        density = policy.dimension_logp(rows.record["chain"][:, 1:].float(), mean, log_std)
        info["clamped"] = ((density <= LOGP_BOUNDS[0]) | (density >= LOGP_BOUNDS[1])).float().mean()
        info["eta"] = torch.as_tensor(policy.eta)
    return loss, info


def bc_loss(policy: DiffusionChain, teacher: DiffusionChain, obs: Observation, generator: torch.Generator) -> Tensor:
    """Negative mean log-probability of the trained steps in chains sampled from the base."""
    return -policy.decisions(obs, teacher.sample(obs, generator=generator).record).logp.mean()


class DPPO(OnPolicy):
    """PPO on the last denoising steps of a diffusion policy."""

    name = "dppo"
    config_class = DPPOConfig
    data_source = "rollout"
    heads = ("diffusion",)
    reference = "ren2024dppo"
    distributed = True
    config: DPPOConfig
    policy: DiffusionChain
    base: StagedDiffusion

    def __init__(self, config: DPPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        starts, heads = _stages(policy)
        steps = heads[-1].config.steps
        first = _first_trained(config, starts, steps)
        base = make_staged(starts, [frozen_copy(head) for head in heads])
        super().__init__(config, _chain(config, heads[-1], base, first), total_updates=total_updates)
        self.recorder = ChainRecorder(self.policy, config)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.critic_optimizer = critic_adam(self.critic, config)
        self._set_base(base)
        bounds = DepthBounds(config.clip_base, config.clip, steps - first, config.clip_rate)
        self.estimator = Estimator(EstimatorConfig(bounds=bounds, entropy_coef=config.entropy_coef))

    def _set_base(self, base: StagedDiffusion) -> None:
        """Set the frozen part of chain, teacher and deployed policy."""
        head, first, starts = self.policy.head, self.policy.first_trained_step, base.config.starts
        self.base = self.policy.base = base
        self.teacher = _chain(self.config, base.heads[-1], base, first).requires_grad_(False)
        kept = sum(start < first for start in starts)
        self._deployed = make_staged([*starts[:kept], first], [*base.heads[:kept], head]) if kept else head

    def inference_policy(self) -> Policy:
        """The fine-tuned head after the frozen steps of the base, if any."""
        return self._deployed

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration and record its chain."""
        return self.recorder.sample(obs, generator=generator)

    def loss(self, rows: RolloutBatch) -> tuple[Tensor, Info]:
        """Clipped surrogate on one ratio per step, entropy bonus and imitation of the base, and metrics."""
        loss, info = dppo_loss(self.policy, rows, self.estimator, self.config)
        if self.config.bc_coef:
            info["bc_loss"] = bc = bc_loss(self.policy, self.teacher, rows.obs, self.generator)
            loss = loss + self.config.bc_coef * bc
        return loss, info

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs of clipped updates on a rollout."""
        config = self.config
        self.update_reward_scale(batch)  # running standard deviation of the return
        rows = self.process_rollout(batch)  # scaled rewards, GAE on V(s), rows (B, ...)
        self.recorder.snapshot()  # weights of the rollout, if only seeds were recorded
        rate = cosine_rate(self.actor_optimizer, config, self.updates, self.total_updates)
        stats: dict[str, Any] = {"actor/lr": rate}
        epochs = Epochs(partial(self.minibatches, rows, batch.shape), config.epochs, self.actor_optimizer)
        for part, _ in epochs:
            with self.critic_in_background(part, stats):
                if self.updates < config.critic_warmup:
                    continue
                loss, info = self.loss(self.recorder.resample(part))
                if epochs.stop(info, config.target_kl):
                    break
                stats |= clipped_step(self.actor_optimizer, loss, info, config.grad_clip)
        return self.finish(batch, rows, stats | epochs.stats())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Networks, optimisers and reward scale; the base is part of the chain."""
        own = {"actor_optimizer": self.actor_optimizer, "critic_optimizer": self.critic_optimizer}
        return {**super().checkpoint_items(), **own}

    def state_dict(self) -> dict[str, Any]:
        """States of all items, and the first steps of the networks of the base."""
        return {**super().state_dict(), "starts": list(self.base.config.starts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, also from a policy with more stages than the base of the run."""
        starts = tuple(state["starts"])
        if starts != self.base.config.starts:
            self._set_base(make_staged(starts, [frozen_copy(self.policy.head) for _ in starts]))
        super().load_state_dict(state)


def _chain(config: DPPOConfig, head: DiffusionPolicy, base: StagedDiffusion, first: int) -> DiffusionChain:
    eta = (min(config.eta_min, config.eta), config.eta)
    return DiffusionChain(head, base, first=first, std_min=config.std_min, noise_clip=config.noise_clip, eta=eta)


def _stages(policy: Policy) -> tuple[tuple[int, ...], list[DiffusionPolicy]]:
    """First steps and heads of a pretrained or fine-tuned diffusion policy."""
    if isinstance(policy, StagedDiffusion):
        return policy.config.starts, policy.heads
    instead = "use reinflow for a flow and ppo for a Gaussian"
    head = require_family(policy, ("diffusion",), "DPPO scores Gaussian denoising steps and", instead)
    assert isinstance(head, DiffusionPolicy)
    return (0,), [head]


def _first_trained(config: DPPOConfig, starts: tuple[int, ...], steps: int) -> int:
    """Index of the first trained step, K - K'."""
    if not 0 <= config.trained_steps <= steps:
        raise UserError(f"trained_steps must be in 0..{steps}, the policy's sampler steps; got {config.trained_steps}.")
    first = steps - config.trained_steps if config.trained_steps else starts[-1]
    if first < starts[-1]:
        last = steps - starts[-1]
        raise UserError(f"trained_steps must be at most the newest network's {last} steps; got {config.trained_steps}.")
    return first
