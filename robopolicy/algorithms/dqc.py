"""Decoupled Q-chunking (DQC, Li et al. 2025): a critic of long chunks trains a critic of the short executed prefix.

Long chunks speed up value learning, but policies over long chunks are hard to learn and react late. Q_h evaluates the
long chunk and bootstraps from V after h steps. Q_p evaluates the prefix of p actions and regresses on Q_h, member by
member, by an optimistic expectile over the unknown tail. V regresses on Q_p at the data's prefixes by a quantile, so no
target evaluates an action outside the data. The policy executes the best of N cloned prefixes by Q_p. Values are
time-discounted success probabilities, learned as logits by cross-entropy.

Use it with large undirected datasets, long horizons and a sparse success reward in [0, 1] that ends the episode. It
does not support dense rewards with returns outside [0, 1], and with little data it explores nothing new. Recordings
without a task get goals in hindsight (`goals.current=.2 goals.trajectory=.5 goals.random=.3`); they need
`achieved_goal`, and the task the observation `goal`.

Deviations from the public code: the cloned policy observes the goal (there: only the critics); long chunks that end in
success count although they are shorter, because their value does not depend on the tail; prefixes are selected by the
mean of the logits, and targets use the ensemble minimum (there a setting: minimum for cubes, mean for puzzles and
humanoids); V has no LayerNorm by default; the gradient of the policy is clipped to norm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats
from robopolicy.algorithms.common.offline import QChunkingConfig, imitation_step, known_errors, require_imitation
from robopolicy.constraints import Fraction, NonNegativeInt, OpenFraction, PositiveInt
from robopolicy.critics.q import QEnsemble
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.goals import GoalConfig
from robopolicy.errors import UserError
from robopolicy.nets.module_state import training_mode
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.best_of_n import make_best_of_n


@dataclass(frozen=True)
class DQCConfig(QChunkingConfig):
    """Settings of DQC."""

    gamma: Fraction = 0.999  # discount per control step
    n_step: NonNegativeInt = 25  # h, actions of the long chunk; the policy's executed actions are the prefix p
    expectile: OpenFraction = 0.8  # of the regression of Q_p on Q_h; .5: mean over tails, towards 1: the best
    quantile: OpenFraction = 0.9  # of the regression of V on Q_p over the data's prefixes
    candidates: PositiveInt = 32  # N, samples of the policy per decision
    value: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256, 256), activation="gelu"))
    goals: GoalConfig = field(default_factory=GoalConfig)  # goals in hindsight for steps of a dataset

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic.bins:
            raise UserError("DQC's critics predict logits and have no histogram; set algorithm.critic.bins=0.")


def optimistic_loss(logit: Tensor, target: Tensor, expectile: float) -> Tensor:
    """Cross-entropy `(...)` weighted `expectile` where the target exceeds the prediction, else 1 - `expectile`.

    Its minimiser is the expectile of the targets, as for the weighted squared error.
    """
    weight = torch.where(target >= logit.detach().sigmoid(), expectile, 1 - expectile)
    return weight * F.binary_cross_entropy_with_logits(logit, target, reduction="none")


def quantile_loss(logit: Tensor, target: Tensor, quantile: float) -> Tensor:
    """Quantile regression loss `(...)` of logits, whose gradient is bounded."""
    difference = target - logit
    return torch.where(difference > 0, quantile, 1 - quantile) * difference.abs()


class DQC(OffPolicy):
    """Critics of long chunks and prefixes, implicit values, and best-of-N prefixes."""

    name = "dqc"
    config_class = DQCConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "li2025dqc"
    uses_full_ensemble = True
    config: DQCConfig

    def __init__(self, config: DQCConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to clone `policy`; `critic` is Q_p, the only one with a target network."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is active only in its own loss
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
        self.long_critic = QEnsemble(config.critic, self.policy, steps=self.sample_spec.steps).eval()
        self.value = ValueNet.for_policy(config.value, self.policy)
        learned = [*self.long_critic.parameters(), *self.value.parameters()]
        self.critic_optimizer.add_param_group({"params": learned})
        self.acting_policy = make_best_of_n(self.policy, self.critic, candidates=config.candidates, reduction="mean")

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows long enough for the long chunk and for the policy's own horizon."""
        spec = super().sample_spec
        return replace(spec, horizon=max(spec.horizon, spec.steps), goals=self.config.goals or None)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw the best of N chunks by Q_p."""
        return self.acting_policy.sample(obs, generator=generator)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the cloned policy, without the untrained critic."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """Target `(B,)` of Q_h: `reward + discount * V(next_obs)`, in [0, 1]."""
        value = batch.reward + batch.discount * self.value(batch.next_obs).sigmoid()
        checked = self.updates > 0 and batch.reward.device.type != "cpu"  # a device would wait in every step
        if not checked and (float(batch.reward.max()) > 1 or float(batch.reward.min()) < 0):
            found = f"{float(batch.reward.min()):.3g} to {float(batch.reward.max()):.3g}"
            raise UserError(f"DQC needs rewards in [0, 1], found {found}; use a sparse reward or e.g. algorithm=qc.")
        return value.clamp(0.0, 1.0)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Losses of Q_h, Q_p and V on complete chunks; each member of Q_p regresses on its member of Q_h."""
        terminated = batch.discount == 0
        whole = (batch.steps == self.sample_spec.steps) | terminated
        prefix = (batch.steps >= self.critic.steps) | terminated
        with training_mode(self.long_critic), training_mode(self.critic):
            long = self.long_critic(batch.obs, batch.chunk)  # (M, B) logits
            short = self.critic(batch.obs, batch.chunk)  # (M, B)
        state = self.value(batch.obs)  # (B,)
        with torch.no_grad():
            target = self.target(batch)
            prefix_value = self.target_critic(batch.obs, batch.chunk).min(0).values  # (B,) logits
            long_value = self.long_critic(batch.obs, batch.chunk) if self.config.critic.dropout else long.detach()
        losses = {
            "long": F.binary_cross_entropy_with_logits(long, target.expand_as(long), reduction="none").sum(0) * whole,
            "prefix": optimistic_loss(short, long_value.sigmoid(), self.config.expectile).sum(0) * whole,
            "state": quantile_loss(state, prefix_value, self.config.quantile) * prefix,
        }
        info = {f"{name}_loss": (batch.weight * loss).mean() for name, loss in losses.items()}
        loss = torch.stack(list(info.values())).sum()
        info |= {
            "value": short.detach().sigmoid().mean(),
            "target": target.mean(),
            "complete": whole.float().mean(),
            "td_errors": known_errors((long.detach().sigmoid() - target).abs().mean(0), whole),
        }
        return loss, info

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed imitation steps."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                steps = self.policy.spec.horizon  # windows may be longer
                stats.actor(imitation=imitation_step(self, part.obs, part.chunk[:, :steps], mask=part.mask[:, :steps]))
        return self.finish(batch, stats)

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class, long critic and V."""
        return *super().observers(), self.long_critic.encoder, self.value

    def inference_policy(self) -> Policy:
        """The policy with the prefix critic."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, policy optimiser, long critic and V."""
        own = {"optimizer": self.optimizer, "long_critic": self.long_critic, "value": self.value}
        return {**super().checkpoint_items(), **own}
