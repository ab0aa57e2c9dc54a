"""Shared code of algorithms with a replay buffer: SAC, RLPD, DSRL, PA-RL, EXPO, Q-chunking, ...

An algorithm defines `target` and `update`. This module has the helpers of `update`: minibatches, the steps of the
critic and its target network, the policy delay, the end of an update, and the windows to sample from the buffer.

Hooks for algorithms of other packages: `critic_loss`, `make_critic`, `attach_dataset`, and `actor_loss` of SAC and TD3.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import (
    Algorithm,
    Checkpointable,
    Metrics,
    Observer,
    decay_learning_rates,
    frozen_copy,
    make_metrics,
)
from robopolicy.algorithms.common.td_loss import td_loss
from robopolicy.constraints import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    Ratio,
    Validated,
)
from robopolicy.core.gradients import backward, clip_gradients
from robopolicy.critics.q import C51, CriticConfig, QEnsemble, TargetUpdate, pessimistic_mean, random_members
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.inverted_residual import batch_norms, keep_unit_norm
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.relative_actions import RelativeActionPolicy

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class OffPolicyConfig(Validated):
    """Settings of algorithms with a replay buffer and a Q ensemble."""

    gamma: Fraction = 0.99  # discount per control step
    batch_size: PositiveInt = 256  # windows per gradient step
    utd: Ratio = 1.0  # critic steps per decision of one environment
    gradient_steps: NonNegativeInt = 0  # critic steps per update, for any number of environments; 0: given by utd
    policy_delay: PositiveInt = 1  # critic steps per actor step
    n_step: NonNegativeInt = 0  # control steps until the bootstrap; 0: the executed part of one chunk
    lr: Positive = 3e-4  # learning rate of the actor
    critic_lr: Positive = 3e-4  # learning rate of the critic
    lr_final_fraction: PositiveFraction = 1.0  # of all learning rates, at the end of their cosine decay; 1: constant
    weight_decay: NonNegative = 0.0  # decoupled (AdamW), of the critic and of the actor of sac and td3
    tau: PositiveFraction = 0.005  # weight of the online critic in the Polyak update of its target
    critic_target_interval: NonNegativeInt = 1  # critic steps per update of the target critic; 0: policy_delay
    critic: CriticConfig = field(default_factory=CriticConfig)  # Q ensemble
    num_min_qs: PositiveInt = 2  # randomly drawn members whose minimum is the target
    rho: NonNegative | None = None  # target: mean of all members minus rho standard deviations; null: as above
    num_steps: PositiveInt = 1  # chunk decisions per environment between updates
    precision: str = "float32"  # of matrix products: float32 | bfloat16 (faster on supported hardware)
    seed: NonNegativeInt = 0  # of all random draws of the updates


class UpdateStats:
    """Metrics of one update, the means of the last values of each, and the TD errors of all rows."""

    def __init__(self) -> None:
        self.values: Info = {}
        self.logp: Tensor | None = None
        self.td_errors: list[Tensor] = []

    def critic(self, info: Info) -> None:
        """Log the result of `critic_step` as `critic/KEY`, and store its `td_errors`, `(M, B)` of members or `(B,)`."""
        self.td_errors.append(torch.atleast_2d(info["td_errors"]))
        self.values |= {f"critic/{key}": value for key, value in info.items() if key != "td_errors"}

    def actor(self, *, logp: Tensor | None = None, **values: Tensor) -> None:
        """Log the means of `values` as `actor/KEY`, and `-logp` as `actor/entropy`."""
        self.values |= {f"actor/{key}": value for key, value in values.items()}
        self.logp = self.logp if logp is None else logp

    def means(self) -> Info:
        """The mean of each value."""
        entropy = {} if self.logp is None else {"actor/entropy": -self.logp.mean()}
        return {key: value.mean() for key, value in self.values.items()} | entropy


class OffPolicy(Algorithm):
    """A critic ensemble with target network and optimiser; subclasses define `target` and `update`."""

    supports_overlap = True
    may_regress = True  # the actor leaves the pretrained behaviour while the critic is still inaccurate
    config: OffPolicyConfig
    chunk_starts_only: ClassVar[bool] = False  # sample only windows that begin with a decision, which have a record
    uses_full_ensemble: ClassVar[bool] = False  # the target uses all members; `num_min_qs` has no effect
    supports_rho: ClassVar[bool] = False  # every target is reduced by `_reduce`
    needs_reward: ClassVar[bool] = True  # a dataset must have rewards
    joint_batches: ClassVar[bool] = False  # supports batch normalisation; set by every class itself, not inherited

    def __init__(self, config: OffPolicyConfig, policy: Policy, *, total_updates: int) -> None:
        """Build the critic, its target network and its optimiser."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        self.config = config
        if config.precision not in PRECISIONS:
            raise unknown_name("precision", config.precision, PRECISIONS)
        if any(isinstance(part, RelativeActionPolicy) for part in policy.modules()):
            raise UserError(
                f"Algorithm '{self.name}' has a critic of absolute actions and does not support a policy of relative "
                "actions; train the base without task.action_representation, or use an on-policy fine-tuner."
            )
        if (self.uses_full_ensemble or self.averages_members) and config.num_min_qs != OffPolicyConfig.num_min_qs:
            raise UserError(
                f"Algorithm '{self.name}' bootstraps from all members, so algorithm.num_min_qs={config.num_min_qs} "
                "has no effect; leave it out and set algorithm.critic.members."
            )
        if config.rho is not None and not self.supports_rho:
            raise UserError(f"Algorithm '{self.name}' has no pessimistic mean; set algorithm.rho=null.")
        self.critic = self.make_critic()
        if batch_norms(self.critic) and not vars(type(self)).get("joint_batches"):
            raise UserError(
                f"Algorithm '{self.name}' does not support critic.backbone={config.critic.backbone}; use mlp."
            )
        if 0 < config.n_step < min(self.critic.steps, policy.spec.action_horizon):
            raise UserError(
                f"algorithm.n_step={config.n_step} is less than the {policy.spec.action_horizon} executed steps of a "
                "chunk; set it to 0 (the length of the chunk) or higher."
            )
        self.target_critic: QEnsemble = frozen_copy(self.critic)
        self.critic_optimizer = make_adam(self.critic, config.critic_lr, config.weight_decay)
        self.critic_steps = 0
        self._target_update = TargetUpdate(self.target_critic, self.critic)
        self.td_errors: Tensor | None = None  # absolute errors of the last batch, for prioritised sampling

    @property
    def averages_members(self) -> bool:
        """Whether every member bootstraps from itself, and the actor maximises the mean; a hook."""
        return False

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Check the settings of a run; a dataset is optional."""
        if cls.needs_dataset:
            super().check_settings(dataset=dataset, env_steps=env_steps, offline_updates=offline_updates)
        elif dataset and cls.chunk_starts_only:
            raise UserError(f"Algorithm '{cls.name}' needs records of decisions, which datasets lack; drop dataset=.")
        elif not dataset and offline_updates:
            raise UserError("replay.offline_updates needs a dataset; pass dataset=FOLDER or set it to 0.")

    def make_critic(self) -> QEnsemble:
        """Build Q(s, executed actions); a hook for other inputs or outputs."""
        return QEnsemble(self.config.critic, self.policy)

    def attach_dataset(self, episodes: Episodes) -> None:
        """Read the whole dataset once before the first update; a hook."""

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk before learning starts."""
        return self.act(obs, generator=generator)

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows to sample from the buffer."""
        spec = self.policy.spec
        return ReplaySampleSpec(
            batch_size=self.config.batch_size,
            horizon=spec.horizon,
            steps=self.config.n_step or spec.action_horizon,
            gamma=self.config.gamma,
            obs_horizon=spec.obs_horizon,
            chunk_starts_only=self.chunk_starts_only,
        )

    @abstractmethod
    def target(self, batch: Transitions) -> Tensor:
        """Regression target `(B,)` of the critic; called without gradients."""

    def bootstrap(self, batch: Transitions, chunk: Tensor) -> Tensor:
        """`reward + discount * next_value` `(B,)`."""
        return torch.addcmul(batch.reward, batch.discount, self.next_value(batch, chunk))

    def next_value(self, batch: Transitions, chunk: Tensor) -> Tensor:
        """`Q'(next_obs, chunk)` `(B,)` of the target ensemble, see `_reduce`; `(M, B)` with `averages_members`."""
        critic, obs = self.target_critic, batch.next_obs
        members = self._drawn_members()
        return self._reduce(critic(obs, chunk) if members is None else critic(obs, chunk, members))

    def distributional_target(self, batch: Transitions, chunk: Tensor, cost: Tensor | None = None) -> Tensor:
        """Target of a C51 critic at the next `chunk`, see `backup_outputs`."""
        critic = self.target_critic
        return self.backup_outputs(batch, critic.output(critic.encode(batch.next_obs), chunk), cost)

    def backup_outputs(self, batch: Transitions, output: Tensor, cost: Tensor | None) -> Tensor:
        """Target from `output` `(M, B, n)` of the target critic at the next chunks, of which it may draw some members.

        It is `(B,)` or per member `(M, B)`. With a C51 critic it has the probabilities `(1 or M, B, bins)` over the
        atoms of the reward plus the discounted return of the member with the least mean, less its `cost` `(B,)`.
        """
        reward = batch.reward if cost is None else torch.addcmul(batch.reward, batch.discount, cost, value=-1)
        histogram, members = self.critic.histogram, self._drawn_members()
        output = output if members is None else output[members]
        if not isinstance(histogram, C51):
            return reward + batch.discount * self._reduce(self.critic.value(output))
        probabilities = output.float().softmax(-1)
        if not self.averages_members:
            least = histogram.expected(probabilities).argmin(0).view(1, -1, 1)
            probabilities = probabilities.gather(0, least.expand(-1, -1, output.shape[-1]))
        atoms = torch.addcmul(reward[:, None], batch.discount[:, None], histogram.centers)
        return histogram.project(probabilities, atoms)

    def _drawn_members(self) -> Tensor | None:
        """Random members for `_reduce`; None stands for all."""
        if self.uses_full_ensemble or self.averages_members or self.config.rho is not None:
            return None
        return random_members(self.config.critic.members, self.config.num_min_qs, self.generator)

    def _reduce(self, values: Tensor) -> Tensor:
        """Value `(B,)` of members `(M, B)`: by `rho`, else their mean or minimum; unchanged with `averages_members`."""
        if self.averages_members:
            return values
        if self.config.rho is None:
            return values.mean(0) if self.uses_full_ensemble else values.amin(0)
        return pessimistic_mean(values, self.config.rho)

    @torch.no_grad()
    def q_values(self, batch: Transitions) -> Tensor:
        """Reduced values `(B,)` of the batch's chunks under the target ensemble, or a random subset of it."""
        values, members = self.target_critic(batch.obs, batch.chunk), self._drawn_members()
        return self._reduce(values if members is None else values[members])

    def minibatches(self, batch: Transitions) -> Iterator[Transitions]:
        """Consecutive minibatches; the loop body runs in the configured precision."""
        for part in batch.split(self.config.batch_size):
            with self.mixed_precision(batch):
                yield part

    def mixed_precision(self, batch: Transitions) -> AbstractContextManager[Any]:
        """Context of the configured precision on the device of `batch`."""
        bfloat16 = self.config.precision == "bfloat16"
        # Weights change within the context, so their casts must not be cached.
        return torch.autocast(batch.reward.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss to `target`; the info has values to average and `td_errors` `(M, B)` or `(B,)`."""
        return td_loss(self.critic, batch, self.target)

    def critic_step(self, batch: Transitions) -> Info:
        """Take a gradient step on `critic_loss`, and update the target network if its interval has passed."""
        loss, info = self.critic_loss(batch)
        optimizer_step(self.critic_optimizer, loss)
        self.critic_steps += 1
        if self.critic_steps % (self.config.critic_target_interval or self.config.policy_delay) == 0:
            self._target_update.step(self.config.tau)
        return {"loss": loss, **info}

    def policy_due(self, ahead: int = 0) -> bool:
        """Whether to step the actor after this critic step, or `ahead` steps later: once every `policy_delay`."""
        return (self.critic_steps + ahead) % self.config.policy_delay == 0

    def finish(self, batch: Transitions, stats: UpdateStats) -> Metrics:
        """Store the TD errors, update running normalisers, count the update; returns the metrics."""
        self.td_errors = torch.cat(stats.td_errors, 1).abs().mean(0)
        self.observe(batch)
        self._target_update.copy_buffers()
        self.updates += 1
        if self.config.lr_final_fraction < 1:
            decay_learning_rates(self, self.config.lr_final_fraction)
        return make_metrics(stats.means())

    def observers(self) -> tuple[Observer, ...]:
        """Networks with running normalisers to update."""
        return self.policy, self.critic.encoder

    def observe(self, batch: Transitions) -> None:
        """Update the running normalisers with the observations of `batch`."""
        for network in self.observers():
            network.update_stats(batch.obs)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Policy, critic, target network and the critic's optimiser."""
        return {
            "policy": self.policy,
            "critic": self.critic,
            "target_critic": self.target_critic,
            "critic_optimizer": self.critic_optimizer,
        }

    def state_dict(self) -> dict[str, object]:
        """States of all parts and the counters."""
        return {**super().state_dict(), "critic_steps": self.critic_steps}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.critic_steps = int(state["critic_steps"])  # type: ignore[call-overload]


def make_adam(network: nn.Module, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Build Adam with decoupled weight decay, which keeps the constrained weights of `network` at their norms."""
    optimizer = torch.optim.Adam(
        network.parameters(), lr=lr, weight_decay=weight_decay, decoupled_weight_decay=weight_decay > 0, fused=True
    )
    keep_unit_norm(optimizer, network)
    return optimizer


def optimizer_step(
    optimizer: torch.optim.Optimizer, loss: Tensor, module: nn.Module | None = None, clip: float = 0.0
) -> None:
    """Take a step of `optimizer` on `loss`, with the gradient of `module` clipped to norm `clip` if given.

    Gradients are computed only for the parameters of `optimizer`, which saves time in actor losses with a critic.
    """
    learned: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in learned:
        parameter.grad = None
    backward(loss, learned)
    if module is not None and clip:
        clip_gradients(module.parameters(), clip)
    optimizer.step()


def require_squashed(policy: Policy, algorithm: str) -> GaussianPolicy:
    """Return `policy` if it is a squashed Gaussian, else raise `UserError`."""
    if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
        raise UserError(f"Algorithm '{algorithm}' needs policy=squashed_gaussian, got '{policy.name}'.")
    return policy
