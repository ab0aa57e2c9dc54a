"""Critics that can be learned from data which does not try every action, and the frame around them: IQL, IDQL, PA-RL.

A rule says what the critic regresses on and what else its loss contains. `ImplicitRule` (IQL, Kostrikov et al. 2021)
never evaluates an action outside the data: V is an expectile of Q over the data's actions, Q regresses on V.
`ConservativeRule` (Cal-QL, Nakamoto et al. 2023, on CQL) bootstraps from the policy and pushes the values of sampled
chunks down towards, but not below, the returns that the data has shown.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Observer, Stateful
from robopolicy.algorithms.frames.imitation import imitation_loss, require_imitation
from robopolicy.algorithms.frames.off_policy import OffPolicy, OffPolicyConfig, descend
from robopolicy.constraints import Count, InnerShare, NotNegative, Positive, Ranged
from robopolicy.critics.q import QEnsemble, random_subset_min
from robopolicy.critics.value import ValueConfig, ValueNet, conservative_penalty, expectile_loss
from robopolicy.data.batches import Transitions
from robopolicy.nets.module_state import training_mode
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness, uniform


@dataclass(frozen=True)
class ImplicitConfig(Ranged):
    """Settings of `ImplicitRule`."""

    expectile: InnerShare = 0.7  # 0.5 is the mean over the data's actions, towards 1 the best; 0.9 for stitching
    value: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256), activation="relu"))


@dataclass(frozen=True)
class ConservativeConfig(Ranged):
    """Settings of `ConservativeRule`."""

    weight: NotNegative = 5.0  # of the penalty beside the temporal-difference loss; .005 beside HL-Gauss (PA-RL)
    samples: Count = 10  # chunks drawn uniformly from the action space for every row


class CriticRule(nn.Module, ABC):
    """What a critic regresses on, and what its loss contains besides."""

    @abstractmethod
    def target(self, batch: Transitions, greedy: Callable[[], Tensor]) -> Tensor:
        """Regression target `(B,)`; `greedy()` bootstraps from the policy."""

    @abstractmethod
    def extra_loss(
        self, batch: Transitions, critic: QEnsemble, judge: Callable[[], Tensor], propose: Callable[[], Tensor]
    ) -> tuple[Tensor, Info]:
        """What is added to the temporal-difference loss.

        Args:
            batch: Windows of the memory.
            critic: The online ensemble.
            judge: Values `(B,)` of the batch's chunks by the target ensemble.
            propose: Chunks `(B, C, H, A)` that the policy might play at the batch's observations.
        """

    def observe(self, obs: Observation) -> None:
        """Merge `obs` into running statistics, if there are any."""


class ImplicitRule(CriticRule):
    """Implicit Q-learning: bootstraps from a learned V and asks the policy for nothing."""

    def __init__(self, config: ImplicitConfig, policy: Policy) -> None:
        super().__init__()
        self.expectile = config.expectile
        self.value = ValueNet.beside(config.value, policy)

    def target(self, batch: Transitions, greedy: Callable[[], Tensor]) -> Tensor:
        """`reward + discount * V(next_obs)`."""
        return batch.reward + batch.discount * self.value(batch.next_obs)

    def extra_loss(
        self, batch: Transitions, critic: QEnsemble, judge: Callable[[], Tensor], propose: Callable[[], Tensor]
    ) -> tuple[Tensor, Info]:
        """Expectile regression of V on the target ensemble at the data's chunks."""
        with torch.no_grad():
            q = judge()
        value = self.value(batch.obs)
        loss = (expectile_loss(q - value, self.expectile) * batch.weight).mean()
        return loss, {"state_value": value.detach().mean(), "advantage": (q - value.detach()).mean()}

    def observe(self, obs: Observation) -> None:
        """Those of V."""
        self.value.observe(obs)


class ConservativeRule(CriticRule):
    """Calibrated conservative Q-learning: bootstraps from the policy, holds the values of other chunks down."""

    def __init__(self, config: ConservativeConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.generator = generator

    def target(self, batch: Transitions, greedy: Callable[[], Tensor]) -> Tensor:
        """Whatever the policy bootstraps from."""
        return greedy()

    def extra_loss(
        self, batch: Transitions, critic: QEnsemble, judge: Callable[[], Tensor], propose: Callable[[], Tensor]
    ) -> tuple[Tensor, Info]:
        """The penalty on what the policy proposes."""
        return self.penalty(batch, critic, propose())

    def penalty(self, batch: Transitions, critic: QEnsemble, proposed: Tensor) -> tuple[Tensor, Info]:
        """Calibrated penalty on chunks `(B, C, H, A)`, summed over the members as the temporal-difference loss is."""
        chunks = proposed[:, :, : critic.steps]
        shape = (len(chunks), self.config.samples, *chunks.shape[2:])
        drawn = critic.action_normalizer.reach * (2 * uniform(shape, self.generator, chunks.device) - 1)
        others = critic.action_normalizer.denormalize(drawn)
        everything = torch.cat([batch.chunk[:, None, : critic.steps], chunks, others], 1)
        with training_mode(critic):
            values = critic.of_candidates(batch.obs, everything)  # (M, B, 1 + C + U)
        data, policy, elsewhere = values.split([1, chunks.shape[1], self.config.samples], -1)
        penalty = conservative_penalty(data.squeeze(-1), policy, elsewhere, batch.returns)  # (M, B)
        penalty = (penalty * batch.weight).mean(1)
        info = {
            "penalty": penalty.detach().mean(),
            "calibrated": (policy.detach() < batch.returns[:, None]).float().mean(),
            "policy_value": policy.detach().mean(),
            "uniform_value": elsewhere.detach().mean(),
        }
        return self.config.weight * penalty.sum(), info


@dataclass(frozen=True)
class OfflineCriticConfig(OffPolicyConfig):
    """Settings that every algorithm of this frame has."""

    grad_clip: Positive = 1.0  # largest gradient norm of the policy


class Imitating(OffPolicy):
    """Any policy with `imitation_loss` that imitates chunks of the memory, each as much as a subclass says."""

    config: OfflineCriticConfig

    def __init__(self, config: OfflineCriticConfig, policy: Policy, *, total_updates: int) -> None:
        """Build the critic around `policy`, which is trained in place."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.config: OfflineCriticConfig = config
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the policy."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def imitate(self, obs: Observation, chunk: Tensor, weight: Tensor | None, mask: Tensor) -> Tensor:
        """One step of the policy towards `chunk` `(B, H, A)`; returns the loss."""
        loss = imitation_loss(
            self.policy, obs, chunk, weight, mask=mask, generator=self.generator, progress=self.progress
        ).mean()
        descend(self.optimizer, loss, self.policy, self.config.grad_clip)
        return loss

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts and the optimiser of the policy."""
        return {**super().parts(), "optimizer": self.optimizer}


class OfflineCritic(Imitating):
    """A policy that imitates, a critic that follows a rule, and a player that acts with both."""

    rule: CriticRule
    player: Policy  # what acts and is deployed; the bare policy unless a subclass wraps it

    def __init__(self, config: OfflineCriticConfig, policy: Policy, *, total_updates: int) -> None:
        """Build everything but the rule around `policy`, which is trained in place."""
        super().__init__(config, policy, total_updates=total_updates)
        self.critic.eval()  # dropout is for its own loss: it may also choose what is played
        self.player = self.policy
        self.rule = self.make_rule()
        learned = list(self.rule.parameters())
        if learned:
            self.critic_optimizer.add_param_group({"params": learned})

    @abstractmethod
    def make_rule(self) -> CriticRule:
        """How the critic learns; `policy` and `critic` exist already."""

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the player."""
        return Sample.unscored(self.player.act(obs, generator=generator))

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the bare policy: an untrained critic would only do harm."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def greedy(self, batch: Transitions) -> Tensor:
        """Bootstrap `(B,)` from what the player would do."""
        return self.bootstrap(batch, self.player.act(batch.next_obs, generator=self.generator))

    def propose(self, batch: Transitions) -> Tensor:
        """Chunks `(B, C, H, A)` that the player might play at the batch's observations."""
        return self.player.act(batch.obs, generator=self.generator)[:, None]

    def judge(self, batch: Transitions) -> Tensor:
        """Values `(B,)` of the batch's chunks: minimum over a random subset of the target ensemble."""
        values = self.target_critic(batch.obs, batch.chunk)
        return random_subset_min(values, self.config.target_members, self.generator)

    def target(self, batch: Transitions) -> Tensor:
        """What the rule says."""
        return self.rule.target(batch, lambda: self.greedy(batch))

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss and what the rule adds."""
        loss, info = super().critic_loss(batch)
        extra, more = self.rule.extra_loss(batch, self.critic, lambda: self.judge(batch), lambda: self.propose(batch))
        return loss + extra, info | more

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones and the rule."""
        return *super().observers(), self.rule

    def deployable(self) -> Policy:
        """The player."""
        return self.player

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts and the rule."""
        return {**super().parts(), "rule": self.rule}
