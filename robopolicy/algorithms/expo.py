"""EXPO: an expressive base policy, a small edit policy, and the best of their candidates (Dong et al. 2025).

The base policy is trained only by imitation, on dataset and collected steps. A Gaussian edit policy e(d | s, a) shifts
its samples by at most beta and is trained to raise Q, with entropy. Acting and bootstrapping use the candidate of
highest Q among N samples and their edits, so no gradient of Q passes through the denoising chain.

Use it to fine-tune a pretrained policy online with demonstrations and sparse rewards. Tune beta: .05 refines, .7
explores. Every decision and critic step costs N samples. With a Gaussian base SAC or RLPD is cheaper.

Deviations from the public forks of the code (the official repository is unavailable): candidates are selected by the
mean of the target ensemble instead of the minimum of a random pair, so acting is deterministic given the samples; the
entropy of an edit is in units of beta, as in the flow variant of Li et al., since a target of -dims/2 is otherwise out
of reach for small beta; edits respect the action bounds; the entropy bonus of the softmax variant is relative to a
uniform choice, so equal values get none; the temperature starts at 0.01 (there: 1, which outweighs a return of at most
1 for thousands of steps) and its gradient is with respect to its logarithm, as in Stable-Baselines3; the gradient of
the base is clipped to norm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.max_entropy import Temperature
from robopolicy.algorithms.common.off_policy import OffPolicy, OffPolicyConfig, UpdateStats, optimizer_step
from robopolicy.algorithms.common.offline import imitation_step, require_imitation
from robopolicy.constraints import Finite, Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt, Ratio
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.critics.value import softmax_weights
from robopolicy.data.batches import Transitions
from robopolicy.errors import unknown_name
from robopolicy.nets.module_state import EMA
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.residual_edit import EditConfig, EditNet, ResidualEditPolicy, make_residual_edit

BACKUPS = ("best", "base")


@dataclass(frozen=True)
class EXPOConfig(OffPolicyConfig):
    """Settings of EXPO; defaults are a public fork's unless noted."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(members=10, hidden=(256, 256, 256), activation="relu")
    )
    utd: Ratio = 20.0  # critic steps per decision of one environment
    policy_delay: PositiveInt = 20  # critic steps per step of base, edit policy and temperature
    candidates: PositiveInt = 8  # N, samples of the base policy per decision (fork: 32)
    edits: NonNegativeInt = 8  # number of samples that are also edited; 0: best-of-N
    edit: EditConfig = field(default_factory=EditConfig)  # edit policy, including beta, the largest edit
    selection: str = "argmax"  # argmax | softmax with an entropy bonus, for small datasets
    selection_temperature: Positive = 1.0  # of the softmax, in units of Q
    backup: str = "best"  # best | base: bootstrap from one sample of the base policy (SARSA-like ablation)
    edit_lr: Positive = 3e-4  # learning rate of the edit policy
    temperature: Positive = 0.01  # initial weight of the edit policy's entropy (fork: 1), for sparse rewards
    temperature_lr: NonNegative = 3e-4  # 0 keeps it fixed
    target_entropy: Finite | None = None  # [nats] in units of beta; None: minus half the executed action dimensions
    ema_decay: Fraction = 0.999  # of the average of the base policy, which acts and is saved
    grad_clip: Positive = 1.0  # largest gradient norm of the base policy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backup not in BACKUPS:
            raise unknown_name("backup", self.backup, BACKUPS)


def edit_loss(
    edit: EditNet, critic: QEnsemble, obs: Observation, chunk: Tensor, alpha: Tensor, generator: Randomness
) -> tuple[Tensor, Tensor]:
    """`alpha log e(d | s, a) - mean Q(s, a + d)` at the data's `chunk`, and the log-densities `(B,)`."""
    edited, logp = edit.rsample(edit.encode(obs), chunk, generator)
    return (alpha * logp - critic(obs, edited).mean(0)).mean(), logp


def selection_bonus(values: Tensor, index: Tensor, temperature: float) -> Tensor:
    """Entropy bonus `-temperature * log(p * C)` `(B,)` of drawing `index` `(B,)` from the softmax of `values` `(B, C)`.

    It is 0 if all values are equal, and not positive on average.
    """
    p = softmax_weights(values, temperature).gather(1, index[:, None]).squeeze(1)
    return -temperature * (p.log() + math.log(values.shape[1]))


class EXPO(OffPolicy):
    """Imitation of a base policy, learned edits, and selection of the best candidate."""

    name = "expo"
    config_class = EXPOConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "dong2025expo"
    requires_action_bounds = True
    config: EXPOConfig

    def __init__(self, config: EXPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` in place with a new critic and edit policy."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.edit = EditNet(config.edit, policy)
        self.temperature = Temperature(config.temperature, config.temperature_lr)
        dims = policy.spec.action_horizon * policy.spec.action_dim
        self.target_entropy = -0.5 * dims if config.target_entropy is None else config.target_entropy
        self.ema = EMA(policy, config.ema_decay)
        self.acting_policy = self._on_the_fly(self.ema.module)  # acts and is saved
        self.backup_policy = self._on_the_fly(policy)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
        self.edit_optimizer = torch.optim.Adam(self.edit.parameters(), lr=config.edit_lr, fused=True)

    def _on_the_fly(self, base: Policy) -> ResidualEditPolicy:
        return make_residual_edit(
            base,
            self.edit,
            self.target_critic,
            candidates=self.config.candidates,
            edits=self.config.edits,
            selection=self.config.selection,
            temperature=self.config.selection_temperature,
        )

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the on-the-fly policy."""
        return self.acting_policy.sample(obs, generator=generator)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the base policy, without the untrained critic."""
        return Sample.unscored(self.ema.module.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """Bootstrap from the next chunk of the on-the-fly policy."""
        if self.config.backup == "base":
            return self.bootstrap(batch, self.policy.act(batch.next_obs, generator=self.generator))
        found = self.backup_policy.propose(batch.next_obs, generator=self.generator)
        index = self.backup_policy.choose(found.values, generator=self.generator)
        target = self.bootstrap(batch, found.take(index))
        if self.config.selection == "softmax":
            target += batch.discount * selection_bonus(found.values, index, self.config.selection_temperature)
        return target

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed steps of base and edit policy."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                stats.actor(imitation=self.imitation_step(part))
                if self.config.edits:
                    stats.actor(**self.edit_step(part))
        return self.finish(batch, stats)

    def imitation_step(self, batch: Transitions) -> Tensor:
        """Take an imitation step of the base policy; returns the loss."""
        loss = imitation_step(self, batch.obs, batch.chunk, mask=batch.mask)
        self.ema.update(self.policy)
        return loss

    def edit_step(self, batch: Transitions) -> Info:
        """Take a step of the edit policy and its temperature; returns metrics."""
        alpha = self.temperature.value
        loss, logp = edit_loss(self.edit, self.critic, batch.obs, batch.chunk, alpha, self.generator)
        optimizer_step(self.edit_optimizer, loss)
        self.temperature.step(logp, self.target_entropy)
        return {"edit_loss": loss, "entropy": -logp.mean(), "temperature": alpha}

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class, averaged base and edit policy."""
        return *super().observers(), self.ema.module, self.edit.encoder

    def inference_policy(self) -> Policy:
        """The on-the-fly policy with the averaged base."""
        return self.acting_policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, averaged base, edit policy, temperature and optimisers."""
        return {
            **super().checkpoint_items(),
            "ema": self.ema,
            "edit": self.edit,
            **self.temperature.checkpoint_items(),
            "optimizer": self.optimizer,
            "edit_optimizer": self.edit_optimizer,
        }
