"""PA-RL: policy-agnostic RL by imitation of optimised actions (Mark et al. 2024, S039).

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

from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.frames.offline_critic import (
    ConservativeConfig,
    ConservativeRule,
    CriticRule,
    ImplicitConfig,
    ImplicitRule,
    OfflineCritic,
    OfflineCriticConfig,
)
from robopolicy.constraints import Count, Natural, Positive
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.wrappers.action_optimized import OptimizedPolicy, optimize
from robopolicy.policies.wrappers.best_of_n import Candidates, draw_index

RULES = ("cal_ql", "iql")


@dataclass(frozen=True)
class PARLConfig(OfflineCriticConfig):
    """Settings of PA-RL; defaults are the public code's unless noted here or in docs/methods.md."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(members=10, hidden=(256, 256), activation="relu"))
    critic_rule: str = "cal_ql"  # cal_ql | iql
    conservative: ConservativeConfig = field(default_factory=ConservativeConfig)  # weight .005 beside a histogram
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    candidates: Count = 32  # m, samples per decision
    top: Count = 10  # k, candidates kept and improved
    ascent_steps: Natural = 10  # T, gradient steps on each
    ascent_rate: Positive = 3e-4  # size of a step, normalised action units per unit of dQ/da
    selection: str = "argmax"  # argmax | softmax, of the candidate that is played
    temperature: Positive = 1.0  # of the softmax, also of the one that is imitated, in units of Q
    lr: Positive = 5e-5  # learning rate of the policy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_rule not in RULES:
            raise unknown_name("critic rule", self.critic_rule, RULES)


def imitation_target(
    found: Candidates, batch: Transitions, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Chunk `(B, H, A)` drawn from the softmax over candidates, and its mask `(B, H)`.

    The last candidate descends from the batch's chunk, of which only the steps before the end of the episode count.
    """
    index = draw_index(found.values, temperature, generator)
    own = (index == found.values.shape[1] - 1)[:, None]
    return found.take(index), torch.where(own, batch.mask, 1.0)


class PARL(OfflineCritic):
    """Optimised actions to act with, to bootstrap from and to imitate."""

    name = "pa_rl"
    config_class = PARLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "mark2024parl"
    needs_bounds = True
    config: PARLConfig
    player: OptimizedPolicy

    def __init__(self, config: PARLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` in place."""
        super().__init__(config, policy, total_updates=total_updates)
        self.player = optimize(
            self.policy,
            self.critic,
            candidates=config.candidates,
            top=config.top,
            ascent_steps=config.ascent_steps,
            ascent_rate=config.ascent_rate,
            selection=config.selection,
            temperature=config.temperature,
        )

    def make_rule(self) -> CriticRule:
        """Cal-QL or IQL."""
        if self.config.critic_rule == "iql":
            return ImplicitRule(self.config.implicit, self.policy)
        return ConservativeRule(self.config.conservative, self.generator)

    def greedy(self, batch: Transitions) -> Tensor:
        """Bootstrap `(B,)` from the best optimised chunk."""
        return self.bootstrap(batch, self.player.propose(batch.next_obs, generator=self.generator).best())

    def propose(self, batch: Transitions) -> Tensor:
        """The optimised chunks `(B, k, H, A)`."""
        return self.player.propose(batch.obs, generator=self.generator).chunks

    def observe(self, batch: Transitions) -> None:
        """The policy's normalisers stay as they are while its weights do."""
        online = bool(batch.online.any())
        for network in self.observers():
            if online or network is not self.policy:
                network.observe(batch.obs)

    def actor_step(self, batch: Transitions) -> Info:
        """Imitation of optimised chunks; nothing while offline."""
        if not bool(batch.online.any()):
            return {}
        found = self.player.propose(batch.obs, generator=self.generator, known=batch.chunk)
        chunk, mask = imitation_target(found, batch, self.config.temperature, self.generator)
        loss = self.imitate(batch.obs, chunk, None, mask)
        return {"loss": loss, "best_value": found.values.max(1).values.mean(), "mean_value": found.values.mean()}
