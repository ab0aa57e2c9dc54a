"""PA-RL: policy-agnostic RL by imitation of optimised actions (Mark et al. 2024).

The k best of m samples by Q take T gradient steps on the critic, and each keeps its best point. The best candidate acts
and bootstraps; samples of the softmax over candidates are the imitation targets of the policy's own supervised loss.
Any head with `act` and `imitation_loss` can be fine-tuned: diffusion, flow, autoregressive, Gaussian. The critic
follows Cal-QL or IQL.

Use it to fine-tune a pretrained policy of any class with offline data and few environment steps; offline, only the
critic is trained. It needs offline data with rewards, and every decision and critic step costs m samples.

Deviations from the public code: the penalty of Cal-QL is on the k optimised candidates at the observation (there: on
copies of the best one, here and at the next observation); the critic is scalar unless `critic.bins` is set, as the
support of a histogram depends on the rewards; the policy is frozen while a batch has no online step; rewards are the
task's (there: minus 1); candidates are sampled from the policy itself (there, with diffusion, from a slow average); the
gradient of the policy is clipped to norm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats
from robopolicy.algorithms.common.offline import (
    ConservativeConfig,
    ConservativeObjective,
    CriticObjective,
    ImitationConfig,
    ImplicitConfig,
    ImplicitObjective,
    imitation_step,
    require_imitation,
)
from robopolicy.algorithms.common.td_loss import td_loss
from robopolicy.constraints import NonNegativeInt, Positive, PositiveInt
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import ReplaySampleSpec, Transitions
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
    conservative: ConservativeConfig = field(default_factory=ConservativeConfig)  # weight .005 with a histogram
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    candidates: PositiveInt = 32  # m, samples per decision
    top: PositiveInt = 10  # k, candidates that are optimised
    ascent_steps: NonNegativeInt = 10  # T, gradient steps on each
    ascent_rate: Positive = 3e-4  # size of a step, normalised action units per unit of dQ/da
    selection: str = "argmax"  # of the executed candidate: argmax | softmax
    temperature: Positive = 1.0  # of the softmax, also for imitation, in units of Q
    lr: Positive = 5e-5  # learning rate of the policy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_objective not in OBJECTIVES:
            raise unknown_name("critic objective", self.critic_objective, OBJECTIVES)


def imitation_target(
    found: Candidates, batch: Transitions, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Chunk `(B, H, A)` drawn from the softmax over candidates, and its mask `(B, H)`.

    The last candidate is the optimised chunk of the batch, which is masked after the end of the episode.
    """
    index = draw_index(found.values, temperature, generator)
    own = (index == found.values.shape[1] - 1)[:, None]
    return found.take(index), torch.where(own, batch.mask, 1.0)


class PARL(OffPolicy):
    """Acting, bootstrapping and imitation with optimised actions."""

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
        self.learns_online = False  # since the first batch with online data, all batches have some
        self.critic.eval()  # dropout is active only in its own loss
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

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows, with returns if they calibrate the penalty."""
        return replace(super().sample_spec, returns=isinstance(self.objective, ConservativeObjective))

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw the best optimised chunk."""
        return Sample.unscored(self.acting_policy.act(obs, generator=generator))

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the policy, without the untrained critic."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def sample_candidates(self, obs: Observation, known: Tensor | None = None) -> Candidates:
        """Sample optimised chunks with their values; `known` chunks `(B, H, A)` are optimised as well."""
        return self.acting_policy.propose(obs, generator=self.generator, known=known)

    def target(self, batch: Transitions) -> Tensor:
        """Bootstrap from the best optimised chunk, or from V."""
        bootstrap = lambda: self.bootstrap(batch, self.sample_candidates(batch.next_obs).best())  # noqa: E731
        return self.objective.target(batch, bootstrap)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss plus the penalty on optimised chunks or the loss of V."""
        loss, info = td_loss(self.critic, batch, self.target)
        extra, more = self.objective.extra_loss(
            batch, self.critic, lambda: self.q_values(batch), lambda: self.sample_candidates(batch.obs).chunks
        )
        return loss + extra, info | more

    def imitation_step(self, batch: Transitions) -> Info:
        """Take an imitation step of the policy on optimised chunks; returns metrics."""
        found = self.sample_candidates(batch.obs, batch.chunk)
        chunk, mask = imitation_target(found, batch, self.config.temperature, self.generator)
        loss = imitation_step(self, batch.obs, chunk, mask=mask)
        return {"loss": loss, "best_value": found.values.max(1).values.mean(), "mean_value": found.values.mean()}

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on minibatches, with delayed imitation steps once there is online data."""
        stats = UpdateStats()
        self.learns_online = self.learns_online or bool(batch.online.any())
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due() and self.learns_online:
                stats.actor(**self.imitation_step(part))
        return self.finish(batch, stats)

    def observe(self, batch: Transitions) -> None:
        """Update running normalisers; the policy's only while it is trained."""
        for network in self.observers():
            if self.learns_online or network is not self.policy:
                network.update_stats(batch.obs)

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class and V, if any."""
        return *super().observers(), self.objective

    def inference_policy(self) -> Policy:
        """The policy with action optimisation by the critic."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, policy optimiser and V, if any."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer, "rule": self.objective}
