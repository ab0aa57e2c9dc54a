"""IDQL: critics of IQL, imitation by a generative policy, and best-of-N acting (Hansen-Estruch et al. 2023).

The policy only models the data, as diffusion and flow heads do well; the improvement is at inference, where the critic
selects the best of N samples. Critic and policy are trained independently, so either can be replaced.

Use it on offline data with an expressive policy, before methods that train the policy by the critic. Every decision
costs N samples, and actions outside the data are never found.

Deviations from the public code: candidates are selected by the ensemble mean or minimum of the target critics (there:
the minimum of two), with a softmax over Q instead of weights derived from V, and chunks replace single actions; the
policy is trained with Adam at a constant rate and gradient norm 1 (there: AdamW and a cosine over two million steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats
from robopolicy.algorithms.common.offline import (
    ImitationConfig,
    ImplicitConfig,
    ImplicitObjective,
    imitation_step,
    require_imitation,
)
from robopolicy.algorithms.common.td_loss import td_loss
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
    reduction: str = "min"  # of the ensemble that selects: mean | min
    ema_decay: Fraction = 0.999  # of the average of the policy, which acts and is saved


class IDQL(OffPolicy):
    """Expectile critics, imitation and best-of-N acting."""

    name = "idql"
    config_class = IDQLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "hansenestruch2023idql"
    supports_rho = True
    config: IDQLConfig

    def __init__(self, config: IDQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place and to act with the best samples of its average."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is active only in its own loss
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
        """Draw the best of N samples."""
        return Sample.unscored(self.acting_policy.act(obs, generator=generator))

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the policy, without the untrained critic."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * V(next_obs)`."""
        return self.objective.target(batch)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of Q to V, and expectile regression of V on the target ensemble."""
        loss, info = td_loss(self.critic, batch, self.target)
        value_loss, more = self.objective.value_loss(batch, self.q_values(batch))
        return loss + value_loss, info | more

    def update(self, batch: Transitions) -> Metrics:
        """Take steps of Q and V on consecutive minibatches, with delayed imitation steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                stats.actor(loss=imitation_step(self, part.obs, part.chunk, mask=part.mask))
                self.ema.update(self.policy)
        return self.finish(batch, stats)

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class, V and averaged policy."""
        return *super().observers(), self.objective, self.ema.module

    def inference_policy(self) -> Policy:
        """The averaged policy with the target critic."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, policy optimiser, V and averaged policy."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer, "rule": self.objective, "ema": self.ema}
