"""Decoupled Q-chunking: a critic over long chunks teaches one over the short prefix that is really played.

Source: Li et al. 2025, DQC. Long chunks make value learning fast, but policies over long chunks are hard to learn and
react late. So Q_h judges the long chunk and bootstraps from V after h steps; Q_p judges the prefix of p actions and
regresses on Q_h, member by member, by an expectile, optimistic about the unseen tail; V regresses on Q_p at the data's
prefixes by a quantile, so that no target evaluates an action outside the data. Acting takes the best of N cloned
prefixes by Q_p. Values are probabilities of success, discounted by the time it takes, and critics learn them as logits
by cross-entropy.

Use it with large play-like data, long horizons and a sparse success reward in [0, 1] that ends the episode. Not for
dense rewards, whose returns leave [0, 1] (refused while learning), nor with little data: nothing is tried that was not
played.

Deviations from the public code: goals are part of the observation rather than relabelled, so the cloned policy sees
them; long chunks that end in success count although they are shorter, because no tail can change their value; the
prefixes are chosen by the mean of the logits, and targets take the least of the ensemble (there a setting: the least
for cubes, the mean for puzzles and humanoids); V has no LayerNorm; the gradient of the policy is cut at norm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step
from robopolicy.algorithms.common.offline import QChunkingConfig, imitation_loss, known_errors, require_imitation
from robopolicy.constraints import Fraction, NonNegativeInt, OpenFraction, PositiveInt
from robopolicy.critics.q import QEnsemble
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import ReplaySampleSpec, Transitions
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
    expectile: OpenFraction = (
        0.8  # of the regression of Q_p on Q_h; .5 averages over tails, towards 1 takes the best one
    )
    quantile: OpenFraction = 0.9  # of the regression of V on Q_p over the data's prefixes
    candidates: PositiveInt = 32  # N, samples of the policy per decision
    value: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256, 256), activation="gelu"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic.bins:
            raise UserError("DQC's critics learn logits of success and have no histogram; set algorithm.critic.bins=0.")


def optimistic_loss(logit: Tensor, target: Tensor, expectile: float) -> Tensor:
    """Cross-entropy `(...)`, weighted `expectile` where the target probability exceeds the prediction, else the rest.

    At its minimum the prediction is the expectile of the targets, as for the weighted squared error.
    """
    weight = torch.where(target >= logit.detach().sigmoid(), expectile, 1 - expectile)
    return weight * F.binary_cross_entropy_with_logits(logit, target, reduction="none")


def quantile_loss(logit: Tensor, target: Tensor, quantile: float) -> Tensor:
    """Weighted absolute error `(...)` between logits; at its minimum `logit` is the quantile of the target logits.

    It needs no bound: no difference, however large, pulls more than any other.
    """
    difference = target - logit
    return torch.where(difference > 0, quantile, 1 - quantile) * difference.abs()


class DQC(OffPolicy):
    """Long-chunk critic, prefix critic, implicit values, best-of-N prefixes."""

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
        self.critic.eval()  # dropout is on in its own loss alone
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
        return replace(spec, horizon=max(spec.horizon, spec.steps))

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The best of N chunks by Q_p."""
        return self.acting_policy.sample(obs, generator=generator)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the cloned policy: an untrained critic would only do harm."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """Probability `(B,)` that Q_h regresses on: `reward + discount * V(next_obs)`, within [0, 1]."""
        value = batch.reward + batch.discount * self.value(batch.next_obs).sigmoid()
        if float(batch.reward.max()) > 1 or float(batch.reward.min()) < 0:
            raise UserError(
                "DQC learns probabilities of success: it needs rewards in [0, 1], and found "
                f"{float(batch.reward.min()):.3g} to {float(batch.reward.max()):.3g}; take a sparse reward or another "
                "algorithm, e.g. qc."
            )
        return value.clamp(0.0, 1.0)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Losses of Q_h, Q_p and V on the chunks that they can judge; each member of Q_p learns from its own of Q_h."""
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
        """Steps of all critics on consecutive minibatches, imitation in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                steps = self.policy.spec.horizon  # windows may be longer
                loss = imitation_loss(
                    self.policy,
                    part.obs,
                    part.chunk[:, :steps],
                    mask=part.mask[:, :steps],
                    generator=self.generator,
                    progress=self.progress,
                ).mean()
                optimizer_step(self.optimizer, loss, self.policy, self.config.grad_clip)
                stats.actor(imitation=loss)
        return self.finish(batch, stats)

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones and the long critic and V."""
        return *super().observers(), self.long_critic.encoder, self.value

    def inference_policy(self) -> Policy:
        """The policy with the critic of prefixes."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared parts, the optimiser of the policy, the long critic and V."""
        own = {"optimizer": self.optimizer, "long_critic": self.long_critic, "value": self.value}
        return {**super().checkpoint_items(), **own}
