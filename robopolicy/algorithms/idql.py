"""IDQL: the critics of IQL, plain imitation by a generative policy, and best-of-N acting (Hansen-Estruch et al. 2023).

The policy only has to model what the data does, which is what diffusion and flow heads are good at; all improvement
happens when acting, where the critic picks the best of N samples. Critic and policy never influence each other's
training, so either can be replaced.

Use it on offline data with an expressive policy, before trying anything that changes the policy by the critic. Not for
tight control budgets, as every decision costs N samples, nor where the data never contains a good action.

Deviations from the public code: the candidate is chosen by the ensemble mean or minimum of the target critics (there:
the minimum of two), a softmax over Q stands in for the weights that follow from V, and chunks replace single actions;
the policy learns with Adam at a constant rate, its gradient cut at norm 1 (there: AdamW and a cosine over two million
steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step, td_loss
from robopolicy.algorithms.common.offline import (
    ImitationConfig,
    ImplicitConfig,
    ImplicitObjective,
    imitation_loss,
    require_imitation,
)
from robopolicy.constraints import Fraction, Positive, PositiveInt
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.nets.module_state import EMA
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.best_of_n import make_best_of_n


@dataclass(frozen=True)
class IDQLConfig(ImitationConfig):
    """Settings of IDQL; defaults are the public code's unless noted."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    candidates: PositiveInt = 64  # N, samples per decision
    selection: str = "argmax"  # argmax | softmax
    temperature: Positive = 1.0  # of the softmax, in units of Q
    reduction: str = "min"  # mean | min of the ensemble that chooses
    ema_decay: Fraction = 0.999  # largest weight of the old average of the policy, which acts and is saved


class IDQL(OffPolicy):
    """Expectile critics, imitation, best-of-N."""

    name = "idql"
    config_class = IDQLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "hansenestruch2023idql"
    config: IDQLConfig

    def __init__(self, config: IDQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place and to act with the best of its averaged weights' samples."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is on in its own loss alone
        self.objective = ImplicitObjective(config.implicit, policy)
        self.critic_optimizer.add_param_group({"params": list(self.objective.parameters())})
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
        self.ema = EMA(policy, config.ema_decay)
        self.acting_policy = make_best_of_n(
            self.ema.module,
            self.target_critic,
            candidates=config.candidates,
            selection=config.selection,
            temperature=config.temperature,
            reduction=config.reduction,
        )

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The best of N samples."""
        return Sample.unscored(self.acting_policy.act(obs, generator=generator))

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the bare policy: an untrained critic would only do harm."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * V(next_obs)`."""
        return self.objective.target(batch)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of Q towards V, and expectile regression of V on the target ensemble."""
        loss, info = td_loss(self.critic, batch, self.target)
        value_loss, more = self.objective.value_loss(batch, self.q_values(batch))
        return loss + value_loss, info | more

    def update(self, batch: Transitions) -> Metrics:
        """Steps of Q and V on consecutive minibatches, imitation in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                loss = imitation_loss(
                    self.policy, part.obs, part.chunk, mask=part.mask, generator=self.generator, progress=self.progress
                ).mean()
                optimizer_step(self.optimizer, loss, self.policy, self.config.grad_clip)
                self.ema.update(self.policy)
                stats.actor(loss=loss)
        return self.finish(batch, stats)

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones, V and the averaged policy."""
        return *super().observers(), self.objective, self.ema.module

    def inference_policy(self) -> Policy:
        """The averaged policy with the target critic."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the optimiser of the policy, V and the averaged policy."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer, "rule": self.objective, "ema": self.ema}
