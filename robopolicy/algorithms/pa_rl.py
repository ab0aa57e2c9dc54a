"""PA-RL: policy-agnostic RL by imitation of optimised actions (Mark et al. 2024).

Of m samples of the policy the k best by Q stay, each climbs the critic for T gradient steps and keeps the best point it
has seen. The best of them acts and bootstraps; draws from their softmax are what the policy imitates with its own
supervised loss. So any head with `act` and `imitation_loss` can be fine-tuned: diffusion, flow, autoregressive,
Gaussian. The critic follows Cal-QL or IQL.

Use it to fine-tune a pretrained policy of any class with offline data and little play; offline, the critic is learned
first while the policy stays frozen. Not without offline data or rewards, and not where decisions must be fast: every
one costs m samples, and every critic step as many.

Deviations from the public code: the penalty of Cal-QL is put on the k optimised candidates at the observation (there:
on copies of the best one, here and at the next observation); the critic regresses a scalar unless `critic.bins` is set,
as the support of a histogram depends on the rewards; the policy stays frozen for as long as a batch holds no played
step; rewards are the task's (there: with 1 subtracted); candidates are drawn from the policy itself (there, with
diffusion, from a slow average of its weights); the gradient of the policy is cut at norm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step, td_loss
from robopolicy.algorithms.common.offline import (
    ConservativeConfig,
    ConservativeObjective,
    CriticObjective,
    ImitationConfig,
    ImplicitConfig,
    ImplicitObjective,
    imitation_loss,
    require_imitation,
)
from robopolicy.constraints import NonNegativeInt, Positive, PositiveInt
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.action_optimized import make_action_optimized
from robopolicy.policies.wrappers.best_of_n import Candidates, draw_index

OBJECTIVES = ("cal_ql", "iql")


@dataclass(frozen=True)
class PARLConfig(ImitationConfig):
    """Settings of PA-RL; defaults are the public code's unless noted here or in docs/methods/learned_values.md."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(members=10, hidden=(256, 256), activation="relu"))
    critic_objective: str = "cal_ql"  # cal_ql | iql
    conservative: ConservativeConfig = field(default_factory=ConservativeConfig)  # weight .005 beside a histogram
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    candidates: PositiveInt = 32  # m, samples per decision
    top: PositiveInt = 10  # k, candidates kept and improved
    ascent_steps: NonNegativeInt = 10  # T, gradient steps on each
    ascent_rate: Positive = 3e-4  # size of a step, normalised action units per unit of dQ/da
    selection: str = "argmax"  # argmax | softmax, of the candidate that is executed
    temperature: Positive = 1.0  # of the softmax, also of the one that is imitated, in units of Q
    lr: Positive = 5e-5  # learning rate of the policy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_objective not in OBJECTIVES:
            raise unknown_name("critic objective", self.critic_objective, OBJECTIVES)


def imitation_target(
    found: Candidates, batch: Transitions, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Chunk `(B, H, A)` drawn from the softmax over candidates, and its mask `(B, H)`.

    The last candidate descends from the batch's chunk, of which only the steps before the end of the episode count.
    """
    index = draw_index(found.values, temperature, generator)
    own = (index == found.values.shape[1] - 1)[:, None]
    return found.take(index), torch.where(own, batch.mask, 1.0)


class PARL(OffPolicy):
    """Optimised actions to act with, to bootstrap from and to imitate."""

    name = "pa_rl"
    config_class = PARLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "mark2024parl"
    requires_action_bounds = True
    config: PARLConfig

    def __init__(self, config: PARLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` in place."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is on in its own loss alone
        self.objective: CriticObjective
        if config.critic_objective == "iql":
            self.objective = ImplicitObjective(config.implicit, policy)
            self.critic_optimizer.add_param_group({"params": list(self.objective.parameters())})
        else:
            self.objective = ConservativeObjective(config.conservative, self.generator)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
        self.acting_policy = make_action_optimized(
            policy,
            self.critic,
            candidates=config.candidates,
            top=config.top,
            ascent_steps=config.ascent_steps,
            ascent_rate=config.ascent_rate,
            selection=config.selection,
            temperature=config.temperature,
        )

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The best optimised chunk."""
        return Sample.unscored(self.acting_policy.act(obs, generator=generator))

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the bare policy: an untrained critic would only do harm."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def sample_candidates(self, obs: Observation, known: Tensor | None = None) -> Candidates:
        """Optimised chunks with their values; the chunks `known` `(B, H, A)` are optimised as well."""
        return self.acting_policy.propose(obs, generator=self.generator, known=known)

    def target(self, batch: Transitions) -> Tensor:
        """Bootstrap from the best optimised chunk, or from V."""
        return self.objective.target(
            batch, lambda: self.bootstrap(batch, self.sample_candidates(batch.next_obs).best())
        )

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss, and the penalty on optimised chunks or the loss of V."""
        loss, info = td_loss(self.critic, batch, self.target)
        extra, more = self.objective.extra_loss(
            batch, self.critic, lambda: self.q_values(batch), lambda: self.sample_candidates(batch.obs).chunks
        )
        return loss + extra, info | more

    def imitation_step(self, batch: Transitions) -> Info:
        """One step of the policy towards optimised chunks."""
        found = self.sample_candidates(batch.obs, batch.chunk)
        chunk, mask = imitation_target(found, batch, self.config.temperature, self.generator)
        loss = imitation_loss(
            self.policy, batch.obs, chunk, mask=mask, generator=self.generator, progress=self.progress
        ).mean()
        optimizer_step(self.optimizer, loss, self.policy, self.config.grad_clip)
        return {"loss": loss, "best_value": found.values.max(1).values.mean(), "mean_value": found.values.mean()}

    def update(self, batch: Transitions) -> Metrics:
        """Critic steps on consecutive minibatches, imitation in between unless all of a minibatch is offline."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due() and bool(part.online.any()):
                stats.actor(**self.imitation_step(part))
        return self.finish(batch, stats)

    def observe(self, batch: Transitions) -> None:
        """Update running normalisers; those of the policy stay as they are while its weights do."""
        online = bool(batch.online.any())
        for network in self.observers():
            if online or network is not self.policy:
                network.update_stats(batch.obs)

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones and V, if there is one."""
        return *super().observers(), self.objective

    def inference_policy(self) -> Policy:
        """The policy with its critic."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the optimiser of the policy and V, if there is one."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer, "rule": self.objective}
