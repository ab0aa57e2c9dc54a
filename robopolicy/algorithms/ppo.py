"""Proximal policy optimisation (Schulman et al. 2017) for Gaussian policies, chunked or not.

Clipped surrogate on one ratio per decision, GAE, value regression, several epochs of minibatches. The defaults and the
order of operations follow Stable-Baselines3, so that returns compare at equal hyper-parameters; the differences are:

* time limits bootstrap from the value of the true last observation, and cut the trace;
* rewards may be divided by a running standard deviation of the return (`normalize_reward`), observations by the
  policy's own running normaliser, which is updated after the epochs so that the first ratio is exactly 1.

Use it for control from scratch. For a diffusion or flow policy use ReinFlow, which scores the denoising chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.frames.base import Algorithm, Metrics, Stateful
from robopolicy.algorithms.frames.on_policy import (
    Beside,
    ReturnScale,
    Rows,
    explained_variance,
    minibatches,
    normalize,
    rows_with_advantages,
)
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.rollout import Rollout
from robopolicy.policies.base import Policy


@dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO."""

    decisions: int = 128  # T, decisions per environment and rollout
    gamma: float = 0.99  # discount per control step
    lam: float = 0.95  # GAE lambda
    epochs: int = 10  # passes over each rollout
    batch_size: int = 256  # decisions per minibatch
    clip: float = 0.2  # ratio bounds 1 - clip, 1 + clip
    lr: float = 3e-4  # Adam learning rate of actor and critic
    lr_decay: bool = False  # linear decay of the learning rate to 0
    entropy_coef: float = 0.0  # weight of the entropy bonus
    value_coef: float = 0.5  # weight of the value loss
    grad_clip: float = 0.5  # largest norm of the joint gradient
    target_kl: float | None = None  # stop the epochs when the approximate KL exceeds 1.5 times this
    normalize_reward: bool = True  # divide rewards by the running standard deviation of the return
    critic: ValueConfig = field(default_factory=ValueConfig)  # value network
    seed: int = 0  # order of the minibatches


def actor_loss(
    policy: Policy, rows: Rows, estimator: Estimator, *, diagnose: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate minus the entropy bonus on one minibatch; advantages are normalised within it."""
    output = policy.decisions(rows.obs, rows.record)
    advantage = normalize(rows.advantage)[:, None]
    return estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, diagnose=diagnose)


class PPO(Algorithm):
    """PPO with a separate value network."""

    name = "ppo"
    experience = "rollout"

    def __init__(self, config: PPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        self.config = config
        self.step_discount = config.gamma
        self.critic = ValueNet(config.critic, policy.spec)
        self.estimator = Estimator(
            EstimatorConfig(bounds=ConstantBounds(config.clip), entropy_coef=config.entropy_coef)
        )
        self.parameters = [p for p in (*policy.parameters(), *self.critic.parameters()) if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.lr, eps=1e-5, fused=True)
        self.scale = ReturnScale()
        self._beside = Beside()

    def update(self, batch: Rollout) -> Metrics:
        """Several epochs of clipped updates on one rollout."""
        config = self.config
        if config.normalize_reward:
            self.scale.observe(batch, config.gamma)
        rows = rows_with_advantages(
            batch, self.critic, gamma=config.gamma, lam=config.lam, reward_scale=self.scale.factor
        )
        self._set_lr()
        info, stopped = self._epochs(rows)
        self.policy.observe(rows.obs)
        self.critic.observe(rows.obs)
        self.updates += 1
        metrics = {key: float(value) for key, value in info.items()}
        metrics["critic/explained_variance"] = explained_variance(rows)
        return metrics | {"actor/epochs": float(stopped), "actor/lr": self.optimizer.param_groups[0]["lr"]}

    def actor_loss(self, rows: Rows, *, diagnose: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss on one minibatch and, with `diagnose`, what to log."""
        return actor_loss(self.policy, rows, self.estimator, diagnose=diagnose)

    def _set_lr(self) -> None:
        share = 1.0 - self.updates / self.total_updates if self.config.lr_decay else 1.0
        self.optimizer.param_groups[0]["lr"] = self.config.lr * share

    def _epochs(self, rows: Rows) -> tuple[dict[str, Tensor], int]:
        info: dict[str, Tensor] = {}
        for epoch in range(self.config.epochs):
            for minibatch, last in minibatches(rows, self.config.batch_size, self.generator):
                if not self._step(minibatch, info, diagnose=last):
                    return info, epoch
        return info, self.config.epochs

    def _step(self, rows: Rows, info: dict[str, Tensor], *, diagnose: bool) -> bool:
        """One joint gradient step; False, and no step, once the KL is too large."""
        config, limit = self.config, self.config.target_kl
        self.optimizer.zero_grad(set_to_none=True)
        self._beside.start(self._critic_gradient, rows)
        loss, parts = self.actor_loss(rows, diagnose=diagnose or limit is not None)
        loss.backward()
        info["critic/loss"] = self._beside.wait()
        info |= {f"actor/{key}": value for key, value in parts.items()}
        if limit is not None and float(parts["approx_kl"]) > 1.5 * limit:
            return False
        nn.utils.clip_grad_norm_(self.parameters, config.grad_clip, foreach=True)
        self.optimizer.step()
        return True

    def _critic_gradient(self, rows: Rows) -> Tensor:
        loss = nn.functional.mse_loss(self.critic(rows.obs), rows.value_target)
        (self.config.value_coef * loss).backward()
        return loss.detach()

    def parts(self) -> Mapping[str, Stateful]:
        """Networks, optimiser and the running scale of the rewards."""
        return {"policy": self.policy, "critic": self.critic, "optimizer": self.optimizer, "scale": self.scale}
