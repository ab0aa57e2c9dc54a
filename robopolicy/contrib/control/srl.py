"""SRL: an actor that plays sequences for slow decisions, judged through a model (Patel and Siegelmann 2025, S166).

The actor sees one observation and plays a sequence of primitive actions. Its critic judges single actions, as in SAC;
a model, learned beside it, imagines the observations in between, so that every action of the sequence is judged where
it will be played ("temporal recall"). Neither is needed at run time. `robopolicy eval --holds` shows what it is for:
the score over the length of the hold.

Use it from scratch where the policy can decide only every few control steps, with `chunk.horizon` at the longest hold
and `chunk.execute` at the usual one. Where a decision in every step is possible sac is cheaper. Observations must be
vectors. Gradients do not flow through the model, so it may be rough; contacts far from its data mislead it.

Formulas are those of the public code. Deviations: the first action of a sequence does not see the one played before it,
as policies here see observations alone, and play decides every `chunk.execute` steps instead of in every step; the
model predicts the normalised change of the observation (there: the next one), from the batch of the critic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.frames.soft import SoftConfig, SoftOffPolicy
from robopolicy.constraints import Count, Finite
from robopolicy.contrib.control.model_based_q import ModelledQ
from robopolicy.contrib.control.sequence import SequencePolicy
from robopolicy.data.batches import Request, Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class SRLConfig(SoftConfig):
    """Settings of SRL: those of SAC, and the model."""

    model_hidden: tuple[Count, ...] = (400, 300)  # layers of the model
    target_entropy: Finite | None = None  # nats of a single action; None is minus its dimensions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_step > 1:
            raise UserError(f"SRL judges single actions; drop algorithm.n_step={self.n_step}.")


def actor_loss(
    policy: SequencePolicy,
    critic: ModelledQ,
    slow_critic: ModelledQ,
    obs: Observation,
    alpha: Tensor,
    generator: Randomness = None,
) -> tuple[Tensor, Tensor]:
    """Sum over the sequence of `alpha log pi_j - min Q(s_j, a_j)` where the slow model puts s_j; and log pi `(B, H)`.

    Later actions have a gradient for what is fed back to them, but imagined observations have none for actions.
    """
    chunk, logp = policy.rsample(obs, generator=generator)
    actions = chunk.split(1, 1)  # (B, 1, A) each
    places = [obs]
    for action in actions[:-1]:
        places.append(slow_critic.imagine(places[-1], action.detach()))
    along = {key: torch.cat([place[key] for place in places]) for key in places[-1]}  # (H B, To, ...)
    value = critic.lowest(along, torch.cat(actions)).view(len(actions), -1)
    return alpha.detach() * logp.mean(0).sum() - value.mean(1).sum(), logp


class SRL(SoftOffPolicy):
    """Soft actor-critic on sequences."""

    name = "srl"
    config_class = SRLConfig
    data_source = "replay"
    heads = ("sequence",)
    reference = "patel2024srl"
    policy: SequencePolicy
    critic: ModelledQ
    target_critic: ModelledQ

    def __init__(self, config: SRLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a sequence `policy`."""
        if not isinstance(policy, SequencePolicy):
            raise UserError(f"SRL trains a recurrent sequence of actions, got '{policy.name}'; pass policy=sequence.")
        super().__init__(config, policy, total_updates=total_updates)
        self.config: SRLConfig = config

    @property
    def entropy_dims(self) -> int:
        """Those of a single action."""
        return self.policy.spec.action_dim

    def make_critic(self) -> ModelledQ:
        """Values of single actions, and the model."""
        return ModelledQ(self.config.critic, self.policy, model_hidden=self.config.model_hidden)

    @property
    def request(self) -> Request:
        """Single control steps, whatever the policy executes."""
        return replace(super().request, horizon=1, steps=1)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation at the first action of a sequence that begins there."""
        action, logp = self.policy.rsample(batch.next_obs, steps=1, generator=self.generator)
        return self.soft(batch, self.bootstrap(batch, action), logp.squeeze(1))

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of single actions, and the loss of the model; they share no weights."""
        loss, info = super().critic_loss(batch)
        errors = self.critic.model_loss(batch.obs, batch.chunk, batch.next_obs)
        model = (errors * batch.followed).sum() / batch.followed.sum().clamp(min=1)
        return loss + model, {**info, "model_loss": model}

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """That of the whole sequence; and the mean over its actions of their log-probabilities."""
        loss, logp = actor_loss(self.policy, self.critic, self.target_critic, batch.obs, alpha, self.generator)
        return loss, logp.mean(1), {}
