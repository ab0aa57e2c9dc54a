"""The frame of on-policy control from scratch: PPO, BPO, MDPO and relatives.

Each of them is an actor loss on minibatches of decisions, and this frame: scale rewards, GAE on V(s), several epochs of
joint steps of actor and critic under one optimiser. `FineTuner` is its counterpart for pretrained policies, where
actor and critic step apart and a warm-up trains the critic alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Metrics, Observer, Stateful
from robopolicy.algorithms.frames.on_policy import Beside, Rows, minibatches, sequences
from robopolicy.algorithms.frames.rollout_learner import RolloutLearner, RolloutLearnerConfig
from robopolicy.algorithms.frames.symmetry import Symmetry, SymmetryConfig
from robopolicy.constraints import Count, NotNegative, Positive
from robopolicy.core.distributed import average_gradients, mean_over_ranks
from robopolicy.core.gradients import clip_gradients
from robopolicy.critics.value import ValueNet
from robopolicy.errors import UserError, unknown_name
from robopolicy.mirror_symmetry import Mirror
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness

LR_SCHEDULES = ("constant", "linear", "adaptive")
LR_RANGE = (1e-5, 1e-2)  # of the adaptive schedule
LR_FACTOR = 1.5
FRESH_KL = 1e-8


@dataclass(frozen=True)
class ActorCriticConfig(RolloutLearnerConfig):
    """Settings that every algorithm of this frame has."""

    epochs: Count = 10  # passes over each rollout
    lr: Positive = 3e-4  # Adam learning rate of actor and critic
    lr_schedule: str = "constant"  # constant | linear (to 0) | adaptive (keeps the KL of a step near target_kl)
    entropy_coef: NotNegative = 0.0  # weight of the entropy bonus
    value_coef: NotNegative = 0.5  # weight of the value loss
    value_clip: NotNegative = 0.0  # largest change of a value that its loss rewards; 0 disables
    grad_clip: Positive = 0.5  # largest norm of the joint gradient
    target_kl: Positive | None = None  # stop the epochs when the approximate KL exceeds 1.5 times this
    symmetry: SymmetryConfig = field(default_factory=SymmetryConfig)  # use of the task's mirror

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_schedule not in LR_SCHEDULES:
            raise unknown_name("learning-rate schedule", self.lr_schedule, LR_SCHEDULES)
        if self.lr_schedule == "adaptive" and not self.target_kl:
            raise UserError("lr_schedule=adaptive needs the KL to keep to; set algorithm.target_kl, e.g. 0.01.")


class ActorCritic(RolloutLearner):
    """Epochs of joint gradient steps on one rollout after the other; subclasses define `actor_loss`."""

    may_remember = True
    config: ActorCriticConfig

    def __init__(self, config: ActorCriticConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        self.parameters = [p for net in (policy, *self.critics().values()) for p in net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lr, eps=1e-5, fused=True)
        self._beside = Beside(self.critics().values())
        self._symmetry: Symmetry | None = None

    def critics(self) -> dict[str, ValueNet]:
        """Networks trained by `critic_loss`, by the name they are saved under."""
        return {"critic": self.critic}

    def attach_symmetry(self, mirror: Mirror | None) -> None:
        """Augment minibatches by mirror images, or add a mirror loss, as the settings say."""
        settings = self.config.symmetry
        if not settings.used:
            return
        if mirror is None:
            raise UserError("The task declares no mirror symmetry; leave algorithm.symmetry at its defaults.")
        if settings.mirror_coef and not isinstance(self.policy, GaussianPolicy):
            raise UserError(f"symmetry.mirror_coef needs a Gaussian policy, got '{self.policy.name}'; use augment.")
        self._symmetry = Symmetry(mirror, self.policy, list(self.critics().values()))

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk and, from a recurrent policy, what it remembers."""
        sample = super().act(obs, generator=generator)
        return replace(sample, memory=self.policy.remember(obs)) if self.policy.spec.memory_dim else sample

    @abstractmethod
    def actor_loss(self, rows: Rows, *, diagnose: bool) -> tuple[Tensor, Info]:
        """Loss on one minibatch and, with `diagnose`, what to log; `approx_kl` (a scalar) among it."""

    def critic_loss(self, rows: Rows) -> Tensor:
        """Regression of the value, to be weighted; runs beside the actor's loss and must not touch the policy."""
        return value_loss(self.critic(rows.obs), rows, self.config.value_clip)

    def observers(self) -> tuple[Observer, ...]:
        """The policy and all critics."""
        return self.policy, *self.critics().values()

    def learn(self, rows: Rows, shape: tuple[int, int]) -> Metrics:
        """Several epochs on one rollout."""
        if self.config.symmetry.used and self._symmetry is None:
            raise UserError("The settings use the task's symmetry: call attach_symmetry first.")
        self._set_lr()
        info, epochs = self._epochs(rows, shape)
        metrics = {key: float(value) for key, value in info.items()}
        return metrics | {"actor/epochs": float(epochs), "actor/lr": self._group["lr"]}

    @property
    def _group(self) -> dict[str, float]:
        return self.optimizer.param_groups[0]

    def _set_lr(self) -> None:
        if self.config.lr_schedule == "linear":
            self._group["lr"] = self.config.lr * (1.0 - self.progress)

    def _adapt_lr(self, kl: float) -> None:
        """Keep the KL of a step within half and twice its target (Schulman et al. 2017, as in rsl_rl).

        On fresh data the KL is rounding, which says nothing about the steps to come.
        """
        target = self.config.target_kl or 0.0
        if kl > 2 * target:
            self._group["lr"] = max(self._group["lr"] / LR_FACTOR, LR_RANGE[0])
        elif FRESH_KL < kl < target / 2:
            self._group["lr"] = min(self._group["lr"] * LR_FACTOR, LR_RANGE[1])

    def _epochs(self, rows: Rows, shape: tuple[int, int]) -> tuple[Info, int]:
        """What the last step logged, and the epochs before the KL became too large."""
        info: Info = {}
        for epoch in range(self.config.epochs):
            for minibatch, last in self._minibatches(rows, shape):
                if not self._step(minibatch, info, steps=shape[0], diagnose=last):
                    return info, epoch
        return info, self.config.epochs

    def _minibatches(self, rows: Rows, shape: tuple[int, int]) -> Iterator[tuple[Rows, bool]]:
        if self.policy.spec.memory_dim:
            return sequences(rows, shape, self.config.batch_size, self.generator)
        return minibatches(rows, self.config.batch_size, self.generator)

    def _step(self, rows: Rows, info: Info, *, steps: int, diagnose: bool) -> bool:
        """One joint gradient step; False, and no step, once the KL is too large."""
        config, limit = self.config, self.config.target_kl
        for parameter in self.parameters:
            parameter.grad = None
        image = self._symmetry.rows(rows) if self._symmetry is not None and config.symmetry.augment else None
        self._beside.start(partial(self._critic_gradient, image=image), rows)
        if isinstance(self.policy, ExplicitPolicy) and self.policy.cell is not None:
            rows = replace(rows, obs=self.policy.unrolled(rows.obs, steps))
        loss, parts = self._actor_loss(rows, image, diagnose=diagnose or limit is not None)
        loss.backward()
        info["critic/loss"] = self._beside.wait()
        info |= {f"actor/{key}": value for key, value in parts.items()}
        kl = float(mean_over_ranks(parts["approx_kl"])) if limit is not None else 0.0
        if config.lr_schedule == "adaptive":
            self._adapt_lr(kl)
        elif limit is not None and kl > 1.5 * limit:
            return False
        average_gradients(self.parameters)
        clip_gradients(self.parameters, config.grad_clip)
        self.optimizer.step()
        return True

    def _actor_loss(self, rows: Rows, image: Rows | None, *, diagnose: bool) -> tuple[Tensor, Info]:
        """The subclass's loss and what symmetry adds; the KL is that of the played decisions alone."""
        loss, parts = self.actor_loss(rows, diagnose=diagnose)
        if image is not None:
            loss = (loss + self.actor_loss(image, diagnose=False)[0]) / 2
        if self._symmetry is not None and self.config.symmetry.mirror_coef:
            asymmetry = self._symmetry.loss(rows.obs)
            loss = loss + self.config.symmetry.mirror_coef * asymmetry
            parts = parts | {"mirror_loss": asymmetry.detach()}
        return loss, parts

    def _critic_gradient(self, rows: Rows, image: Rows | None) -> Tensor:
        loss = self.critic_loss(rows)
        if image is not None:
            loss = (loss + self.critic_loss(image)) / 2
        (self.config.value_coef * loss).backward()
        return loss.detach()

    def parts(self) -> Mapping[str, Stateful]:
        """Networks, optimiser and the running scale of the rewards."""
        return {**super().parts(), **self.critics(), "optimizer": self.optimizer}


def value_loss(value: Tensor, rows: Rows, clip: float = 0.0) -> Tensor:
    """Mean squared error of `value` `(B,)` towards the targets.

    With `clip` each row counts the larger error of the value and of one that moved by at most `clip` since the rollout,
    so that a value that has moved so far in one update is left alone (Schulman et al.'s code).
    """
    error = (value - rows.value_target).square()
    if not clip:
        return error.mean()
    bounded = rows.value + (value - rows.value).clamp(-clip, clip)
    return torch.maximum(error, (bounded - rows.value_target).square()).mean()
