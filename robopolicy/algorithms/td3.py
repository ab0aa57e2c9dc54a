"""TD3: twin critics, delayed deterministic actor, smoothed targets (Fujimoto et al. 2018), and FastTD3 by its settings.

The actor is the mode of a squashed Gaussian; its standard deviation is unused. Exploration adds Gaussian noise, targets
add clipped noise, and the actor and both target networks step once per `policy_delay` critic steps. FastTD3 (Seo et al.
2025) is for simulators on a GPU: batches of tens of thousands of rows, a distributional critic
(`critic.histogram=c51`), different noise scales per environment (`exploration_noise_max`), no target policy
(`policy_tau=1`), a target critic that follows every critic step (`critic_target_interval=1`) and weight decay.

With goals in hindsight, `action_l2=1` penalises large actions (HER, Andrychowicz et al. 2017). In episodes that move no
object, every action has the same value; without the penalty the arm then drifts away from the objects.

Use it from scratch with dense rewards, for a deterministic policy, especially with thousands of environments. For one
environment SAC learns its exploration noise. It does not support pretrained diffusion or flow policies.

Deviations from the papers: the target is the minimum of the ensemble, which may have more than two members; FastTD3's
noise scales are spread evenly over the environments instead of drawn per episode, its target follows the member with
the least mean before instead of after the projection, and actions are clipped to their bounds; actions are chunks as in
SAC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.off_policy import (
    OffPolicy,
    OffPolicyConfig,
    UpdateStats,
    make_adam,
    optimizer_step,
    require_squashed,
)
from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, PositiveInt
from robopolicy.critics.q import C51, CriticConfig, QEnsemble, TargetUpdate
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness, normal

VALUE_REDUCTIONS = ("first", "min", "mean")


@dataclass(frozen=True)
class TD3Config(OffPolicyConfig):
    """Settings of TD3; defaults as in the authors' later code."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    policy_delay: PositiveInt = 2  # critic steps per actor step
    critic_target_interval: NonNegativeInt = 0  # critic steps per update of the target critic; 0: policy_delay
    noise: NonNegative = 0.1  # standard deviation of the exploration noise, normalised actions
    exploration_noise_max: NonNegative = 0.0  # of the last environment, with interpolation in between; 0: all equal
    target_noise: NonNegative = 0.2  # standard deviation of the target's action noise, normalised
    target_noise_clip: NonNegative = 0.5  # largest magnitude of that noise
    policy_tau: Fraction = 0.0  # weight of the policy in the update of its target; 1: no target policy; 0: equal to tau
    action_l2: NonNegative = 0.0  # weight of the mean squared normalised action in the actor's loss (HER: 1)
    value_reduction: str = "first"  # of the members, for the actor: first | min (FastTD3) | mean, also in the target

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_reduction not in VALUE_REDUCTIONS:
            raise unknown_name("value_reduction", self.value_reduction, VALUE_REDUCTIONS)

    @property
    def target_policy_tau(self) -> float:
        """Weight of the policy in the update of its target."""
        return self.policy_tau or self.tau


def add_noise(policy: GaussianPolicy, chunk: Tensor, noise: Tensor) -> Tensor:
    """Add normalised `noise` to `chunk` `(B, H, A)`, within the action bounds."""
    normalizer = policy.action_normalizer
    return normalizer.denormalize((normalizer.normalize(chunk) + noise).clamp(-1, 1))


def noisy_chunk(policy: GaussianPolicy, obs: Observation, config: TD3Config, generator: Randomness) -> Tensor:
    """The policy's chunk `(B, H, A)` with exploration noise, whose scale grows from the first row to the last."""
    mode = policy.mode(obs)
    if config.exploration_noise_max and len(mode) == 1:
        raise UserError(
            "algorithm.exploration_noise_max spreads the noise over the environments of a process, and there is one; "
            "set sim.num_envs to at least 2, or drop it."
        )
    std = torch.linspace(config.noise, config.exploration_noise_max or config.noise, len(mode), device=mode.device)
    return add_noise(policy, mode, std.view(-1, 1, 1) * normal(mode.shape, generator, mode.device))


def smoothed_chunk(policy: GaussianPolicy, obs: Observation, config: TD3Config, generator: Randomness) -> Tensor:
    """The policy's chunk `(B, H, A)` with clipped noise, for target policy smoothing."""
    mode = policy.mode(obs)
    limit = config.target_noise_clip
    noise = (config.target_noise * normal(mode.shape, generator, mode.device)).clamp(-limit, limit)
    return add_noise(policy, mode, noise)


def q1(critic: QEnsemble, obs: Observation, chunk: Tensor) -> Tensor:
    """Values `(B,)` of the first critic, which the actor maximises."""
    return critic(obs, chunk, torch.zeros(1, dtype=torch.int64, device=chunk.device))[0]


def actor_loss(
    policy: GaussianPolicy, critic: QEnsemble, obs: Observation, reduction: str = "first", action_l2: float = 0.0
) -> Tensor:
    """Negative value at the policy's chunks (of the first member, the least or the mean), and a penalty of actions."""
    chunk = policy.mode(obs)
    if reduction == "first":
        loss = -q1(critic, obs, chunk).mean()
    else:
        loss = -(critic.min_q(obs, chunk) if reduction == "min" else critic(obs, chunk)).mean()
    if action_l2:
        loss = loss + action_l2 * policy.action_normalizer.normalize(chunk).square().mean()
    return loss


class TD3(OffPolicy):
    """Deterministic actor-critic."""

    name = "td3"
    config_class = TD3Config
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "fujimoto2018td3"
    config: TD3Config
    policy: GaussianPolicy

    def __init__(self, config: TD3Config, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train the mode of a squashed Gaussian `policy`."""
        super().__init__(config, require_squashed(policy, self.name), total_updates=total_updates)
        self.target_policy: GaussianPolicy = frozen_copy(policy)
        self._policy_update = TargetUpdate(self.target_policy, policy)
        self.optimizer = make_adam(policy, config.lr, config.weight_decay)

    @property
    def averages_members(self) -> bool:
        """With `value_reduction=mean`."""
        return self.config.value_reduction == "mean"

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw the mode with exploration noise."""
        return Sample.unscored(noisy_chunk(self.policy, obs, self.config, generator))

    def target(self, batch: Transitions) -> Tensor:
        """Value of the target policy's next chunk with clipped noise."""
        chunk = smoothed_chunk(self.target_policy, batch.next_obs, self.config, self.generator)
        distributional = isinstance(self.critic.histogram, C51)
        return self.distributional_target(batch, chunk) if distributional else self.bootstrap(batch, chunk)

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Loss of the actor, and further metrics; a hook."""
        config = self.config
        return actor_loss(self.policy, self.critic, batch.obs, config.value_reduction, config.action_l2), {}

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed actor steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))  # TD loss towards `target`, Adam, delayed Polyak
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                self._policy_update.step(self.config.target_policy_tau)
                self._policy_update.copy_buffers()
                stats.actor(loss=loss, **info)
        return self.finish(batch, stats)  # TD errors, normalisers, counter

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, target policy and actor optimiser."""
        return {**super().checkpoint_items(), "target_policy": self.target_policy, "optimizer": self.optimizer}
