"""The frame of the on-policy fine-tuners of generative policies: ReinFlow, DPPO, FPO, AWM, PolicyFlow and relatives.

Each of them is a policy that can be sampled, an actor loss on minibatches of decisions, and this frame: scale rewards,
GAE on V(s), several epochs of actor steps with the critic's steps beside them, stop when the KL grows too large.
`ActorTuner` is the part without rewards and critic, for those that compare rollouts with each other instead.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Algorithm, Metrics, Stateful, frozen_copy
from robopolicy.algorithms.frames.on_policy import (
    Beside,
    ReturnScale,
    Rows,
    explained_variance,
    minibatches,
    rows_with_advantages,
)
from robopolicy.constraints import Count, Natural, NotNegative, Positive, Ranged, Share, UpTo
from robopolicy.core.gradients import clip_gradients
from robopolicy.core.returns import DISCOUNT_UNITS
from robopolicy.critics.q import borrow_statistics
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import Rollout
from robopolicy.errors import unknown_name
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class ActorTunerConfig(Ranged):
    """Settings of the actor's steps."""

    epochs: Count = 5  # passes over each rollout
    batch_size: Count = 1024  # chunk decisions per minibatch
    lr: Positive = 4.5e-5  # peak learning rate of the actor
    lr_final: Annotated[NotNegative, UpTo("lr")] = 2e-5  # learning rate at the last update (cosine)
    grad_clip: Positive = 25.0  # largest gradient norm of the actor
    target_kl: Positive | None = 0.01  # stop the epochs when the approximate KL exceeds this
    seed: Natural = 0  # order of the minibatches


@dataclass(frozen=True)
class FineTunerConfig(ActorTunerConfig):
    """Settings that every on-policy fine-tuner with a critic has."""

    decisions: Count = 50  # T, chunk decisions per environment and rollout
    gamma: Share = 0.99  # discount, see discount_unit
    discount_unit: str = "step"  # step: gamma per control step inside chunks too | chunk: once per chunk (papers)
    lam: Share = 0.95  # GAE lambda
    critic_lr: Positive = 6.5e-4  # learning rate of the critic
    critic_warmup: Natural = 0  # first rollouts that train the critic alone
    normalize_reward: bool = True  # divide rewards by the running standard deviation of the return
    critic: ValueConfig = field(default_factory=lambda: ValueConfig(hidden=(256, 256, 256), activation="silu"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.discount_unit not in DISCOUNT_UNITS:
            raise unknown_name("discount unit", self.discount_unit, DISCOUNT_UNITS)


class ActorTuner(Algorithm):
    """Epochs of clipped policy gradients; subclasses define `update` and `actor_loss`."""

    config: ActorTunerConfig

    def __init__(self, config: ActorTunerConfig, policy: Policy, base: Policy, *, total_updates: int) -> None:
        """Get ready.

        Args:
            config: Settings.
            policy: What is sampled and trained.
            base: Pretrained policy; a frozen copy is kept as reference.
            total_updates: Rollouts to come.
        """
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        policy.eval()  # no dropout: what was sampled must be scored by the same network
        self.config = config
        self.base = frozen_copy(base)
        self.actor_parameters = [p for p in policy.parameters() if p.requires_grad]
        self.actor_optimizer = torch.optim.Adam(self.actor_parameters, lr=config.lr, fused=True)

    @abstractmethod
    def actor_loss(self, rows: Any) -> tuple[Tensor, Info]:
        """Loss on one minibatch (`Rows`, or what `_epochs` takes) and what to log; a large `approx_kl` ends them."""

    def prepare(self, rows: Rows) -> Rows:
        """Add to the rows what must be fixed before the first gradient step; called without gradients."""
        return rows

    def _set_lr(self) -> float:
        share = 0.5 * (1 + math.cos(math.pi * self.updates / self.total_updates))
        rate = self.config.lr_final + (self.config.lr - self.config.lr_final) * share
        self.actor_optimizer.param_groups[0]["lr"] = rate
        return rate

    def _epochs(self, rows: Rows) -> tuple[Info, int]:
        """Steps on shuffled minibatches; what the last one logged, and the epochs before the KL became too large."""
        info: Info = {}
        for epoch in range(self.config.epochs):
            for minibatch, _ in minibatches(rows, self.config.batch_size, self.generator):
                parts = self._actor_step(minibatch)
                if parts is None:
                    return info, epoch
                info |= parts
        return info, self.config.epochs

    def _actor_step(self, rows: Any) -> Info | None:
        """One gradient step; None, and no step, once the KL is too large."""
        limit = self.config.target_kl
        loss, info = self.actor_loss(rows)
        if limit is not None and float(info["approx_kl"]) > limit:
            return None
        self.actor_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        info["grad_norm"] = clip_gradients(self.actor_parameters, self.config.grad_clip)
        self.actor_optimizer.step()
        return {f"actor/{key}": value.detach() for key, value in info.items()}

    def parts(self) -> Mapping[str, Stateful]:
        """Networks, the frozen base too, and the optimiser."""
        return {"policy": self.policy, "base": self.base, "actor_optimizer": self.actor_optimizer}


class FineTuner(ActorTuner):
    """Clipped policy gradients on one rollout after the other; subclasses define `actor_loss`."""

    config: FineTunerConfig

    def __init__(self, config: FineTunerConfig, policy: Policy, base: Policy, *, total_updates: int) -> None:
        """As `ActorTuner`, with a critic beside the actor."""
        super().__init__(config, policy, base, total_updates=total_updates)
        self.step_discount = config.gamma if config.discount_unit == "step" else 1.0
        self.critic = ValueNet(config.critic, policy.spec)
        borrow_statistics(self.critic.encoder, policy)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_lr, fused=True)
        self.scale = ReturnScale()
        self._beside = Beside([self.critic])

    def update(self, batch: Rollout) -> Metrics:
        """Several epochs of clipped updates on one rollout."""
        config = self.config
        if config.normalize_reward:
            self.scale.observe(batch, config.gamma, config.discount_unit)
        rows = rows_with_advantages(
            batch,
            self.critic,
            gamma=config.gamma,
            lam=config.lam,
            discount_unit=config.discount_unit,
            scale=self.scale,
        )
        with torch.no_grad():
            rows = self.prepare(rows)
        rate = self._set_lr()
        info, epochs = self._epochs(rows)
        self.policy.observe(rows.obs)
        self.critic.observe(rows.obs)
        self.updates += 1
        metrics = {key: float(value) for key, value in info.items()}
        metrics["critic/explained_variance"] = explained_variance(rows)
        return metrics | {"actor/epochs": float(epochs), "actor/lr": rate}

    def _epochs(self, rows: Rows) -> tuple[Info, int]:
        """As without a critic, whose steps run beside the actor's and alone during its warm-up."""
        train_actor = self.updates >= self.config.critic_warmup
        info: Info = {}
        for epoch in range(self.config.epochs):
            for minibatch, _ in minibatches(rows, self.config.batch_size, self.generator):
                self._beside.start(self._critic_step, minibatch)
                parts = self._actor_step(minibatch) if train_actor else {}
                info["critic/loss"] = self._beside.wait()
                if parts is None:
                    return info, epoch
                info |= parts
        return info, self.config.epochs

    def _critic_step(self, rows: Rows) -> Tensor:
        loss = nn.functional.mse_loss(self.critic(rows.obs), rows.value_target)
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()
        return loss.detach()

    def parts(self) -> Mapping[str, Stateful]:
        """Those of the actor, the critic's and the running scale of the rewards."""
        return {
            **super().parts(),
            "critic": self.critic,
            "critic_optimizer": self.critic_optimizer,
            "scale": self.scale,
        }
