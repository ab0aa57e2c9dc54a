"""SRL: an actor that produces action sequences for slow decisions, trained through a model (Patel and Siegelmann 2024).

The actor receives one observation and produces a sequence of primitive actions. The critic evaluates single actions, as
in SAC. A model, trained at the same time, predicts the observations in between, so that every action of the sequence is
evaluated in its own state ("temporal recall"). Critic and model are not needed at run time.
`robopolicy eval --action-repeats` reports the score over the number of repeats.

Use it from scratch where the policy can decide only every few control steps, with `chunk.horizon` at the longest
interval and `chunk.action_horizon` at the usual one. Where a decision in every step is possible, sac is cheaper.
Observations must be vectors. Gradients do not flow through the model, so small errors are tolerated; contacts far from
its data mislead it.

The formulas follow the public code. Deviations: the first action of a sequence does not depend on the previous executed
one, because policies here take observations only, and rollouts decide every `chunk.action_horizon` steps instead of in
every step; the model predicts the normalised change of the observation (the code: the next one), from the batch of the
critic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.max_entropy import MaxEntropyConfig, Temperature, target_entropy
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, make_adam, optimizer_step
from robopolicy.algorithms.common.td_loss import td_loss
from robopolicy.algorithms.sac import soft_target
from robopolicy.constraints import Finite, PositiveInt
from robopolicy.contrib.control.model_based_q import ModelBasedQ
from robopolicy.contrib.control.sequence import SequencePolicy
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class SRLConfig(MaxEntropyConfig):
    """Settings of SRL: settings of SAC and of the model."""

    model_hidden: tuple[PositiveInt, ...] = (400, 300)  # layers of the model
    target_entropy: Finite | None = None  # nats of a single action; None is minus its dimensions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_step > 1:
            raise UserError(f"SRL evaluates single actions; drop algorithm.n_step={self.n_step}.")


def actor_loss(
    policy: SequencePolicy,
    critic: ModelBasedQ,
    slow_critic: ModelBasedQ,
    obs: Observation,
    alpha: Tensor,
    generator: Randomness = None,
) -> tuple[Tensor, Tensor]:
    """Sum over the sequence of `alpha log pi_j - min Q(s_j, a_j)` at states s_j of the slow model, and log pi `(B, H)`.

    Later actions have a gradient for the actions that are fed back to them; imagined observations have none.
    """
    chunk, logp = policy.rsample(obs, generator=generator)
    actions = chunk.split(1, 1)  # (B, 1, A) each
    places = [obs]
    for action in actions[:-1]:
        places.append(slow_critic.imagine(places[-1], action.detach()))
    along = {key: torch.cat([place[key] for place in places]) for key in places[-1]}  # (H B, To, ...)
    value = critic.min_q(along, torch.cat(actions)).view(len(actions), -1)
    return alpha * logp.mean(0).sum() - value.mean(1).sum(), logp


class SRL(OffPolicy):
    """Soft actor-critic on sequences."""

    name = "srl"
    config_class = SRLConfig
    data_source = "replay"
    heads = ("sequence",)
    reference = "patel2024srl"
    config: SRLConfig
    policy: SequencePolicy
    critic: ModelBasedQ
    target_critic: ModelBasedQ

    def __init__(self, config: SRLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a sequence `policy`."""
        if not isinstance(policy, SequencePolicy):
            raise UserError(f"SRL trains a recurrent sequence of actions, got '{policy.name}'; pass policy=sequence.")
        super().__init__(config, policy, total_updates=total_updates)
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        self.target_entropy = target_entropy(config, policy.spec.action_dim)  # of a single action
        self.optimizer = make_adam(policy, config.lr, config.weight_decay)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk uniformly from the action bounds."""
        return self.policy.sample_uniform(obs, generator=generator)

    def make_critic(self) -> ModelBasedQ:
        """Build the critic of single actions with the model."""
        return ModelBasedQ(self.config.critic, self.policy, model_hidden=self.config.model_hidden)

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Single control steps, independent of the policy's action horizon."""
        return replace(super().sample_spec, horizon=1, steps=1)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation at the first action of a sequence that begins there."""
        action, logp = self.policy.rsample(batch.next_obs, steps=1, generator=self.generator)
        value = self.next_value(batch, action)
        return soft_target(batch, value, logp.squeeze(1), self.temperature.value, self.config)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of single actions plus the loss of the model; they share no weights."""
        loss, info = td_loss(self.critic, batch, self.target)
        errors = self.critic.model_loss(batch.obs, batch.chunk, batch.next_obs)
        model = (errors * batch.next_obs_valid).sum() / batch.next_obs_valid.sum().clamp(min=1)
        return loss + model, {**info, "model_loss": model}

    def update(self, batch: Transitions) -> Metrics:
        """Take steps of critic and model on consecutive minibatches, with steps of actor and temperature in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                alpha = self.temperature.value
                loss, logp = actor_loss(self.policy, self.critic, self.target_critic, part.obs, alpha, self.generator)
                logp = logp.mean(1)  # over the actions of the sequence
                optimizer_step(self.optimizer, loss)
                self.temperature.step(logp, self.target_entropy)
                stats.actor(loss=loss, logp=logp, temperature=alpha)
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, temperature and actor optimiser."""
        return {**super().checkpoint_items(), **self.temperature.checkpoint_items(), "optimizer": self.optimizer}
