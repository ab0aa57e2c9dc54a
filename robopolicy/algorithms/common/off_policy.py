"""Parts that all algorithms with a replay memory share: SAC, RLPD, DSRL, PA-RL, EXPO, Q-chunking, ...

An algorithm writes its own `target` and `update`; the few lines of `update` show the order of the method. This module
has what these lines call: minibatches, the step of the critic and of its target network, the delay of the actor, the
end of an update, and the windows to sample from the memory.

Hooks for algorithms of other packages: `critic_loss`, `make_critic`, `attach_dataset`, and the `actor_loss` of SAC and
TD3. An algorithm that changes more than these writes its own `update`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, Observer, frozen_copy
from robopolicy.constraints import Fraction, NonNegativeInt, Positive, PositiveFraction, PositiveInt, Ratio, Validated
from robopolicy.core.gradients import clip_gradients
from robopolicy.critics.q import CriticConfig, QEnsemble, TargetUpdate, random_members, random_subset_min
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.module_state import training_mode
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class OffPolicyConfig(Validated):
    """Settings that every algorithm with a replay memory and a Q ensemble has."""

    gamma: Fraction = 0.99  # discount per control step
    batch_size: PositiveInt = 256  # windows per gradient step
    utd: Ratio = 1.0  # critic steps per decision of one environment
    policy_delay: PositiveInt = 1  # critic steps per actor step
    n_step: NonNegativeInt = 0  # control steps until the bootstrap; 0 is the executed part of one chunk
    lr: Positive = 3e-4  # learning rate of the actor
    critic_lr: Positive = 3e-4  # learning rate of the critic
    tau: PositiveFraction = 0.005  # share of the online critic that enters its target after every step
    critic: CriticConfig = field(default_factory=CriticConfig)  # Q ensemble
    num_min_qs: PositiveInt = 2  # members of the ensemble, drawn at random, whose minimum is the target
    num_steps: PositiveInt = 1  # chunk decisions per environment between updates
    precision: str = "float32"  # float32 | bfloat16, of the matrix products: faster where the processor has them
    seed: NonNegativeInt = 0  # of all random draws of the updates


class UpdateStats:
    """Metrics of one update, the last value of each, and the absolute TD errors of all rows."""

    def __init__(self) -> None:
        self.values: Info = {}
        self.td_errors: list[Tensor] = []

    def critic(self, info: Info) -> None:
        """Log what `critic_step` returned as `critic/KEY`, and keep its `td_errors` `(B,)`."""
        self.td_errors.append(info["td_errors"])
        self.values |= {f"critic/{key}": value for key, value in info.items() if key != "td_errors"}

    def actor(self, **values: Tensor) -> None:
        """Log scalars as `actor/KEY`."""
        self.values |= {f"actor/{key}": value for key, value in values.items()}


class OffPolicy(Algorithm):
    """A critic ensemble, its target network and its optimiser; subclasses write `target` and `update`."""

    may_regress = True  # an actor follows its critic out of what the base knew before the critic knows better
    config: OffPolicyConfig
    chunk_starts_only: ClassVar[bool] = False  # sample windows where a chunk was chosen, whose record is known
    uses_full_ensemble: ClassVar[bool] = False  # the target uses all members, so that `num_min_qs` does nothing
    needs_reward: ClassVar[bool] = True  # a dataset must have rewards

    def __init__(self, config: OffPolicyConfig, policy: Policy, *, total_updates: int) -> None:
        """Build the critic, its target network and its optimiser around `policy`."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        if config.precision not in PRECISIONS:
            raise unknown_name("precision", config.precision, PRECISIONS)
        if self.uses_full_ensemble and config.num_min_qs != OffPolicyConfig.num_min_qs:
            raise UserError(
                f"Algorithm '{self.name}' bootstraps from all members, so algorithm.num_min_qs does nothing, got "
                f"{config.num_min_qs}; leave it out and set algorithm.critic.members."
            )
        self.config = config
        self.critic = self.make_critic()
        if 0 < config.n_step < min(self.critic.steps, policy.spec.action_horizon):
            raise UserError(
                f"algorithm.n_step={config.n_step} is less than the {policy.spec.action_horizon} executed steps of a "
                "chunk; set it to 0 (the length of the chunk) or higher."
            )
        self.target_critic: QEnsemble = frozen_copy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_lr, fused=True)
        self.critic_steps = 0
        self._target_update = TargetUpdate(self.target_critic, self.critic)
        self.td_errors: Tensor | None = None  # absolute errors of the last batch, for prioritised sampling

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Refuse settings of a run that contradict what the algorithm learns from; a dataset is optional."""
        if cls.needs_dataset:
            super().check_settings(dataset=dataset, env_steps=env_steps, offline_updates=offline_updates)
        elif dataset and cls.chunk_starts_only:
            raise UserError(
                f"Algorithm '{cls.name}' learns from what it noted when it chose a chunk, which a dataset does not "
                "hold; drop dataset=."
            )
        elif not dataset and offline_updates:
            raise UserError("replay.offline_updates learns from a dataset; pass dataset=FOLDER or set it to 0.")

    def make_critic(self) -> QEnsemble:
        """Build Q(s, executed actions); an algorithm whose critic has other inputs or outputs builds its own."""
        return QEnsemble(self.config.critic, self.policy)

    def attach_dataset(self, episodes: Episodes) -> None:
        """Read the whole dataset once before the first update; most algorithms only see batches of it."""

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk before learning starts."""
        return self.act(obs, generator=generator)

    @property
    def sample_spec(self) -> ReplaySampleSpec:
        """Windows to sample from the memory."""
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
        """`reward + discount * min Q'(next_obs, chunk)` over a random subset of the target ensemble `(B,)`."""
        critic, obs = self.target_critic, batch.next_obs
        members = random_members(self.config.critic.members, self.config.num_min_qs, self.generator)
        values = critic(obs, chunk) if members is None else critic(obs, chunk, members.to(chunk.device))
        return batch.reward + batch.discount * values.amin(0)

    @torch.no_grad()
    def q_values(self, batch: Transitions) -> Tensor:
        """`min Q'(obs, chunk)` of the batch's chunks over a random subset of the target ensemble `(B,)`."""
        values = self.target_critic(batch.obs, batch.chunk)
        return random_subset_min(values, self.config.num_min_qs, self.generator)

    def minibatches(self, batch: Transitions) -> Iterator[Transitions]:
        """Consecutive minibatches; the body of the loop computes in the precision of the settings."""
        bfloat16 = self.config.precision == "bfloat16"
        for part in batch.split(self.config.batch_size):
            # Weights change within the context, so casts of them must not be kept.
            with torch.autocast(batch.reward.device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
                yield part

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss towards `target`; the info has `td_errors` `(B,)` besides scalars."""
        return td_loss(self.critic, batch, self.target)

    def critic_step(self, batch: Transitions) -> Info:
        """One step down `critic_loss`; then the target network follows by `tau`."""
        loss, info = self.critic_loss(batch)
        optimizer_step(self.critic_optimizer, loss)
        self._target_update.step(self.config.tau)
        self.critic_steps += 1
        return {"loss": loss, **info}

    def policy_due(self) -> bool:
        """Whether the actor steps after this critic step: once every `policy_delay`."""
        return self.critic_steps % self.config.policy_delay == 0

    def finish(self, batch: Transitions, stats: UpdateStats) -> Metrics:
        """Keep the TD errors, update running normalisers, count the update; returns the metrics."""
        self.td_errors = torch.cat(stats.td_errors)
        self.observe(batch)
        self._target_update.copy_buffers()
        self.updates += 1
        return {key: float(value.detach()) for key, value in stats.values.items()}

    def observers(self) -> tuple[Observer, ...]:
        """Networks whose running normalisers follow the batches."""
        return self.policy, self.critic.encoder

    def observe(self, batch: Transitions) -> None:
        """Merge the observations of `batch` into running normalisers."""
        for network in self.observers():
            network.update_stats(batch.obs)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Policy, critic, target network and the critic's optimiser; subclasses add theirs."""
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


def td_loss(critic: QEnsemble, batch: Transitions, target: Callable[[Transitions], Tensor]) -> tuple[Tensor, Info]:
    """Weighted temporal-difference loss, summed over the members and averaged over the batch.

    Args:
        critic: Q ensemble; its dropout is on for this loss alone.
        batch: B windows.
        target: Gives the regression target `(B,)`, or `(M, B)` of each member, of the batch; called after the critic
            and without gradients.

    Returns:
        The loss, and `value`, `target` and the absolute `td_errors` `(B,)`.
    """
    with training_mode(critic):
        output = critic.output(critic.encode(batch.obs), batch.chunk)
    with torch.no_grad():
        wanted = target(batch)
    loss = (critic.regression(output, wanted) * batch.weight).mean(1).sum()
    value = critic.value(output.detach())
    return loss, {"value": value.mean(), "target": wanted.mean(), "td_errors": (value - wanted).abs().mean(0)}


def optimizer_step(
    optimizer: torch.optim.Optimizer, loss: Tensor, module: nn.Module | None = None, clip: float = 0.0
) -> None:
    """One step of `optimizer` down `loss`, the gradient of `module` clipped to norm `clip` where given.

    Only the parameters of `optimizer` get gradients, so that a critic in the loss of an actor costs less.
    """
    learned: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in learned:
        parameter.grad = None
    torch.autograd.backward(loss, inputs=learned)
    if module is not None and clip:
        clip_gradients(module.parameters(), clip)
    optimizer.step()


def require_squashed(policy: Policy, algorithm: str) -> GaussianPolicy:
    """`policy` as a squashed Gaussian.

    Raises:
        UserError: It is another policy.
    """
    if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
        raise UserError(
            f"Algorithm '{algorithm}' trains a squashed Gaussian, got '{policy.name}'; pass policy=squashed_gaussian."
        )
    return policy
