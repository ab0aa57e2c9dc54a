"""Parts shared by the algorithms that learn from a replay memory: SAC, RLPD, DSRL, PA-RL, EXPO, Q-chunking, ...

Each algorithm keeps its own losses; what is the same in all of them lives here once: how often critic and actor step,
the target network, priorities, and the request for windows of the memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Algorithm, Metrics, Observer, Stateful, frozen_copy
from robopolicy.constraints import Count, Natural, Positive, PositiveShare, Ranged, Ratio, Share
from robopolicy.core.gradients import clip_gradients
from robopolicy.critics.q import CriticConfig, QEnsemble, TargetUpdate, random_members
from robopolicy.data.batches import Request, Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.module_state import training_mode
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class OffPolicyConfig(Ranged):
    """Settings that every algorithm with a replay memory and a Q ensemble has."""

    gamma: Share = 0.99  # discount per control step
    batch_size: Count = 256  # windows per gradient step
    utd: Ratio = 1.0  # critic steps per decision of one environment
    actor_delay: Count = 1  # critic steps per actor step
    n_step: Natural = 0  # control steps until the bootstrap; 0 is the executed part of one chunk
    lr: Positive = 3e-4  # learning rate of the actor
    critic_lr: Positive = 3e-4  # learning rate of the critic
    tau: PositiveShare = 0.005  # share of the online critic that enters its target after every step
    critic: CriticConfig = field(default_factory=CriticConfig)  # Q ensemble
    target_members: Count = 2  # members of the ensemble, drawn at random, whose minimum is the target
    decisions: Count = 1  # chunk decisions per environment between updates
    precision: str = "float32"  # float32 | bfloat16, of the matrix products: faster where the processor has them
    seed: Natural = 0  # of everything the updates draw


class OffPolicy(Algorithm):
    """Alternates critic steps towards `target` with actor steps; subclasses define both."""

    may_fall = True  # an actor follows its critic out of what the base knew before the critic knows better
    config: OffPolicyConfig
    decisions_only: ClassVar[bool] = False  # sample only where a chunk was chosen, for what was noted there
    whole_ensemble: ClassVar[bool] = False  # the target asks all members, so that `target_members` says nothing
    needs_reward: ClassVar[bool] = True  # a dataset must say what its steps earned

    def __init__(self, config: OffPolicyConfig, policy: Policy, *, total_updates: int) -> None:
        """Build critic, target and the critic's optimiser around `policy`."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        if config.precision not in PRECISIONS:
            raise unknown_name("precision", config.precision, PRECISIONS)
        if self.whole_ensemble and config.target_members != OffPolicyConfig.target_members:
            raise UserError(
                f"Algorithm '{self.name}' bootstraps from all members, so algorithm.target_members does nothing, got "
                f"{config.target_members}; leave it out and set algorithm.critic.members."
            )
        self.config = config
        self.critic = self.make_critic()
        if 0 < config.n_step < min(self.critic.steps, policy.spec.execute):
            raise UserError(
                f"The critic judges the {policy.spec.execute}-step-long chunk that is executed, so that a window of "
                f"algorithm.n_step={config.n_step} ends too soon; set it to 0 for exactly that chunk, or higher."
            )
        self.target_critic: QEnsemble = frozen_copy(self.critic)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_lr, fused=True)
        self.critic_steps = 0
        self._target_update = TargetUpdate(self.target_critic, self.critic)
        self.errors: Tensor | None = None  # absolute errors of the last batch, for prioritised sampling

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Refuse settings of a run that contradict what the algorithm learns from; a dataset is optional."""
        if cls.needs_dataset:
            super().check_settings(dataset=dataset, env_steps=env_steps, offline_updates=offline_updates)
        elif dataset and cls.decisions_only:
            raise UserError(
                f"Algorithm '{cls.name}' learns from what it noted when it chose a chunk, which a dataset does not "
                "hold; drop dataset=."
            )
        elif not dataset and offline_updates:
            raise UserError("replay.offline_updates learns from a dataset; pass dataset=FOLDER or set it to 0.")

    def make_critic(self) -> QEnsemble:
        """Values of the executed actions; an algorithm whose critic sees something else builds its own."""
        return QEnsemble(self.config.critic, self.policy)

    @property
    def request(self) -> Request:
        """What to sample from the memory."""
        spec = self.policy.spec
        return Request(
            batch_size=self.config.batch_size,
            horizon=spec.horizon,
            steps=self.config.n_step or spec.execute,
            gamma=self.config.gamma,
            obs_horizon=spec.obs_horizon,
            decisions_only=self.decisions_only,
        )

    def use_dataset(self, episodes: Episodes) -> None:
        """See the whole dataset once, before the first update; most algorithms are content with batches of it."""

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk before learning starts."""
        return self.act(obs, generator=generator)

    @abstractmethod
    def target(self, batch: Transitions) -> Tensor:
        """Regression target `(B,)` of the critic; called without gradients."""

    @abstractmethod
    def actor_step(self, batch: Transitions) -> Info:
        """One gradient step of everything but the critic."""

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Weighted temporal-difference loss, summed over the members and averaged over the batch."""
        with training_mode(self.critic):
            output = self.critic.output(self.critic.encode(batch.obs), batch.chunk)
        with torch.no_grad():
            target = self.target(batch)
        loss = (self.critic.regression(output, target) * batch.weight).mean(1).sum()
        value = self.critic.value(output.detach())
        info = {"value": value.mean(), "target": target.mean(), "errors": (value - target).abs().mean(0)}
        return loss, info

    def bootstrap(self, batch: Transitions, chunk: Tensor) -> Tensor:
        """`reward + discount * min Q'(next_obs, chunk)` over a random subset of the target ensemble `(B,)`."""
        critic, obs = self.target_critic, batch.next_obs
        members = random_members(self.config.critic.members, self.config.target_members, self.generator)
        values = critic(obs, chunk) if members is None else critic(obs, chunk, members.to(chunk.device))
        return batch.reward + batch.discount * values.amin(0)

    def update(self, batch: Transitions) -> Metrics:
        """Critic steps on consecutive minibatches of `batch`, actor steps in between."""
        info: Info = {}
        errors: list[Tensor] = []
        for minibatch in batch.split(self.config.batch_size):
            with self._precision(batch.reward.device):
                parts = self._critic_step(minibatch)
                errors.append(parts.pop("errors"))
                info |= {f"critic/{key}": value for key, value in parts.items()}
                if self.critic_steps % self.config.actor_delay == 0:
                    info |= {f"actor/{key}": value for key, value in self.actor_step(minibatch).items()}
        self.errors = torch.cat(errors)
        self.observe(batch)
        self._target_update.copy_buffers()
        self.updates += 1
        return {key: float(value.detach()) for key, value in info.items()}

    def observers(self) -> tuple[Observer, ...]:
        """Networks whose running normalisers follow what is learned from."""
        return self.policy, self.critic.encoder

    def observe(self, batch: Transitions) -> None:
        """Merge the observations of `batch` into running normalisers."""
        for network in self.observers():
            network.observe(batch.obs)

    def _precision(self, device: torch.device) -> torch.autocast:
        # Weights change within the context, so casts of them must not be kept.
        enabled = self.config.precision == "bfloat16"
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _critic_step(self, batch: Transitions) -> Info:
        loss, info = self.critic_loss(batch)
        descend(self.critic_optimizer, loss)
        self._target_update.step(self.config.tau)
        self.critic_steps += 1
        return {"loss": loss, **info}

    def parts(self) -> Mapping[str, Stateful]:
        """Policy, critic, target and the critic's optimiser; subclasses add theirs."""
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


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, module: nn.Module | None = None, clip: float = 0.0) -> None:
    """One step of `optimizer` down `loss`, the gradient of `module` clipped to norm `clip` where given.

    Only what `optimizer` moves gets gradients: the critic in the loss of an actor costs no more than it must.
    """
    learned: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in learned:
        parameter.grad = None
    torch.autograd.backward(loss, inputs=learned)
    if module is not None and clip:
        clip_gradients(module.parameters(), clip)
    optimizer.step()
