"""Shared code of on-policy algorithms with a value network.

`OnPolicy` computes rows with advantages from a rollout, trains the critic on a second thread and updates running
statistics. The functions are for a joint optimiser of actor and critic, as in PPO; see `fine_tuning.py` for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, make_metrics
from robopolicy.algorithms.common.rollout_batch import (
    RewardNormalizer,
    RolloutBatch,
    compute_advantages,
    explained_variance,
    flatten,
    minibatches,
    recurrent_minibatches,
)
from robopolicy.algorithms.common.symmetry import SymmetryConfig
from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.core.distributed import average_gradients, world_size
from robopolicy.core.gradients import backward, clip_gradients
from robopolicy.critics.q import copy_statistics
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Info, Policy
from robopolicy.worker_thread import WorkerThread

LR_SCHEDULES = ("constant", "linear", "adaptive")
LR_RANGE = (1e-5, 1e-2)  # of the adaptive schedule
LR_FACTOR = 1.5
KL_EPS = 1e-8  # a KL below this is rounding


@dataclass(frozen=True)
class OnPolicyConfig(Validated):
    """Settings of on-policy algorithms with a value network."""

    num_steps: PositiveInt = 128  # T, chunk decisions per environment and rollout
    gamma: Fraction = 0.99  # discount per control step
    gae_lambda: Fraction = 0.95  # lambda of generalised advantage estimation
    batch_size: PositiveInt = 256  # chunk decisions per minibatch
    normalize_reward: bool = True  # divide rewards by the running standard deviation of the return
    critic: ValueConfig = field(default_factory=ValueConfig)  # value network
    seed: NonNegativeInt = 0  # order of the minibatches
    discount_unit: ClassVar[str] = "step"  # configurable in the fine-tuners


@dataclass(frozen=True)
class ActorCriticConfig(OnPolicyConfig):
    """Settings of algorithms with one optimiser for actor and critic."""

    epochs: PositiveInt = 10  # passes over each rollout
    lr: Positive = 3e-4  # Adam learning rate of actor and critic
    lr_schedule: str = "constant"  # constant | linear (to 0) | adaptive (keeps the KL of a step near target_kl)
    entropy_coef: NonNegative = 0.0  # weight of the entropy bonus
    value_coef: NonNegative = 0.5  # weight of the value loss
    value_clip: NonNegative = 0.0  # PPO's value clipping: largest change of a value per update; 0 disables
    grad_clip: Positive = 0.5  # largest norm of the joint gradient
    target_kl: Positive | None = None  # stop the epochs when the approximate KL exceeds 1.5 times this
    symmetry: SymmetryConfig = field(default_factory=SymmetryConfig)  # use of the task's mirror symmetry

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_schedule not in LR_SCHEDULES:
            raise unknown_name("learning-rate schedule", self.lr_schedule, LR_SCHEDULES)
        if self.lr_schedule == "adaptive" and not self.target_kl:
            raise UserError("lr_schedule=adaptive needs a target KL; set algorithm.target_kl, e.g. 0.01.")


class OnPolicy(Algorithm):
    """Base class with policy and value network; subclasses define `update`.

    Algorithms whose critic has its own optimiser set `critic_optimizer` and use `critic_in_background`.
    """

    supports_overlap = True
    config: OnPolicyConfig
    critic_optimizer: torch.optim.Optimizer

    def __init__(self, config: OnPolicyConfig, policy: Policy, *, total_updates: int) -> None:
        """Build the critic of `policy`, which is trained for `total_updates` rollouts."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        policy.eval()  # no dropout, because sampling and scoring must use the same network
        self.config = config
        self.step_discount = config.gamma if config.discount_unit == "step" else 1.0
        self.critic = self.make_critic()
        copy_statistics(self.critic.encoder, policy)
        self.reward_normalizer = RewardNormalizer()
        self.worker = BackgroundWorker(self.critics().values())

    def make_critic(self) -> ValueNet:
        """Build the value network; a hook."""
        return ValueNet(self.config.critic, self.policy.spec)

    def critics(self) -> dict[str, ValueNet]:
        """Networks trained by `critic_loss`, by their name in checkpoints; a hook."""
        return {"critic": self.critic}

    def update_reward_scale(self, batch: Rollout) -> None:
        """Update the running standard deviation of the return, if `normalize_reward` is set."""
        if self.config.normalize_reward:
            self.reward_normalizer.update(batch, self.config.gamma, self.config.discount_unit)

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Rows to train on, with scaled rewards and GAE on V(s); a hook."""
        return compute_advantages(
            batch,
            self.critic,
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
            discount_unit=self.config.discount_unit,
            reward_scale=self.reward_normalizer,
        )

    def minibatches(self, rows: RolloutBatch, shape: tuple[int, int]) -> Iterator[tuple[RolloutBatch, bool]]:
        """One pass over the rows of a rollout of `shape` (T, N): shuffled, or whole columns if recurrent."""
        if self.policy.spec.hidden_dim:
            return recurrent_minibatches(rows, shape, self.config.batch_size, self.generator)
        return minibatches(rows, self.config.batch_size, self.generator)

    def critic_loss(self, rows: RolloutBatch) -> Tensor:
        """Regression of V(s) on a second thread, which must not use the policy; a hook."""
        return nn.functional.mse_loss(self.critic(rows.obs), rows.value_target)

    def critic_step(self, rows: RolloutBatch) -> Tensor:
        """Take a step of the critic's own optimiser; returns the loss."""
        loss = self.critic_loss(rows)
        self.critic_optimizer.zero_grad(set_to_none=True)
        backward(loss)
        average_gradients(parameters_of(self.critic_optimizer))
        self.critic_optimizer.step()
        return loss.detach()

    @contextmanager
    def critic_in_background(self, rows: RolloutBatch, stats: dict[str, Any]) -> Iterator[None]:
        """Take a critic step on another thread during the body, and add its loss to `stats`."""
        self.worker.start(self.critic_step, rows)
        try:
            yield
        finally:
            stats["critic/loss"] = self.worker.wait()

    def finish(self, batch: Rollout, rows: RolloutBatch, stats: Mapping[str, Any]) -> Metrics:
        """Update the running normalisers, count the update, and return the metrics.

        Normalisers change after the gradient steps, so that the first ratios of the next update are exactly 1.
        """
        obs = flatten(batch.obs)
        for network in (self.policy, *self.critics().values()):
            network.update_stats(obs)
        self.updates += 1
        return make_metrics({**stats, "critic/explained_variance": explained_variance(rows)})

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Policy, critics and the running scale of the rewards."""
        return {"policy": self.policy, **self.critics(), "scale": self.reward_normalizer}


def value_loss(value: Tensor, rows: RolloutBatch, clip: float = 0.0) -> Tensor:
    """Mean squared error of `value` `(B,)` to the targets.

    With `clip` each row has the larger error of the value and of the value clipped to within `clip` of the rollout's
    value, as in PPO's public code.
    """
    error = (value - rows.value_target).square()
    if not clip:
        return error.mean()
    change = (value - rows.value).detach()
    allowed = change.clamp(-clip, clip)
    bounded = (rows.value + allowed - rows.value_target).square()
    clipped = (bounded > error) & (allowed != change)  # a clipped value has no gradient
    return torch.where(clipped, bounded, error).mean()


def prefixed(prefix: str, info: Info) -> Info:
    """Add `prefix/` to the keys of `info`."""
    return {f"{prefix}/{key}": value for key, value in info.items()}


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Learning rate of the first parameter group, as a number from now on."""
    group = optimizer.param_groups[0]
    group["lr"] = float(group["lr"])
    return group["lr"]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters of `optimizer`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def schedule_rate(optimizer: torch.optim.Optimizer, config: ActorCriticConfig, progress: float) -> None:
    """Set the learning rate of an update with the linear schedule; other schedules do not change it here."""
    if config.lr_schedule == "linear":
        optimizer.param_groups[0]["lr"] = config.lr * (1.0 - progress)


def adapt_rate(optimizer: torch.optim.Optimizer, kl: Tensor, target: float) -> None:
    """Adapt the learning rate to keep the KL `()` of a step between half and twice its target, as in rsl_rl.

    A KL below `KL_EPS`, before the first step, is a rounding error and has no effect. On a device the rate becomes a
    tensor there, so that no step waits; `learning_rate` converts it back.
    """
    group = optimizer.param_groups[0]
    if kl.device.type != "cpu":
        bounds, factors = _rate_factors(target, kl.device)
        group["lr"] = (factors.take(torch.bucketize(kl, bounds)) * group["lr"]).clamp(*LR_RANGE)
    elif kl > 2 * target:
        group["lr"] = max(group["lr"] / LR_FACTOR, LR_RANGE[0])
    elif KL_EPS < kl < target / 2:
        group["lr"] = min(group["lr"] * LR_FACTOR, LR_RANGE[1])


@lru_cache
def _rate_factors(target: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bounds `(3,)` between four ranges of the KL, and the factor on the learning rate in each range `(4,)`."""
    bounds = torch.tensor([KL_EPS, target / 2, 2 * target], device=device)
    return bounds, torch.tensor([1.0, LR_FACTOR, 1.0, 1 / LR_FACTOR], device=device)


def joint_step(optimizer: torch.optim.Optimizer, grad_clip: float) -> None:
    """Average the gradients over processes, clip their joint norm, and take the step."""
    parameters = parameters_of(optimizer)
    average_gradients(parameters)
    clip_gradients(parameters, grad_clip)
    optimizer.step()


class BackgroundWorker:
    """Second thread for the gradient of the critic during the actor's; `networks` are trained by the function.

    Actor and critic share no weights, so the result does not depend on timing. The caller computes small minibatches,
    for which the thread would cost more than it saves, and all minibatches on a device, whose kernels it queues faster.
    """

    MIN_PARALLEL_WORK = 2_000_000  # rows times weights; measured with two hidden layers of 64

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        weights = sum(parameter.numel() for network in networks for parameter in network.parameters())
        self._min_rows = self.MIN_PARALLEL_WORK / max(1, weights)
        self._worker = WorkerThread("critic")
        self._inline: Tensor | None = None  # result of a call that the caller has made

    def __deepcopy__(self, memo: dict[int, Any]) -> BackgroundWorker:
        return self  # a copy of an algorithm only acts

    def start(self, function: Callable[..., Tensor], rows: RolloutBatch, *more: Any) -> None:
        """Start `function(rows, *more)`; `wait` must follow."""
        inline = rows.advantage.device.type != "cpu" or world_size() > 1  # collectives need one order in all processes
        if inline or len(rows) < self._min_rows:
            self._inline = function(rows, *more)
        else:
            self._worker.send(partial(function, rows, *more))

    def wait(self) -> Tensor:
        """Return the result of the last call, or raise its exception."""
        result, self._inline = self._inline, None
        return self._worker.receive() if result is None else result
