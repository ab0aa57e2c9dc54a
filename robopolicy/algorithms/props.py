"""PROPS: PPO whose play seeks what its data lack, so that kept data stay on-policy (Corrado and Hanna 2025, S134).

A finite sample of the policy's own actions misses some and repeats others. PROPS plays with a behaviour policy instead:
a copy of the policy, pushed away from the actions that the kept rollouts hold, a little and within bounds. What is
played then fills the gaps, and rollouts of earlier policies can be kept and used for one more update.

Use it where few decisions are made per update: a real robot, a handful of environments. With thousands of
environments the error of sampling is small already, and PPO is cheaper.

Deviations from the public code: advantages are computed for every kept rollout (there: for the newest alone); the KL
that keeps the spread of a Gaussian from growing without bound is on by default and estimated from the policy's draws
(there: commented out); the copy is pushed once per rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Metrics, Stateful, frozen_copy
from robopolicy.algorithms.frames.on_policy import Rows, joined, minibatches
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.core.regularizers import k3
from robopolicy.data.rollout import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class BehaviourConfig:
    """How far the behaviour policy is pushed."""

    bound: float = 0.3  # eps: actions are pushed down no further than to the ratio 1 - eps
    target_kl: float = 0.01  # stop when the approximate KL to the policy exceeds this
    kl_coef: float = 0.1  # weight of the KL of the policy to its copy
    lr: float = 1e-3  # Adam learning rate
    epochs: int = 16  # largest number of passes over the kept decisions
    batch_size: int = 256  # decisions per minibatch

    def __post_init__(self) -> None:
        if not 0 < self.bound < 1 or self.target_kl <= 0 or self.kl_coef < 0:
            raise UserError("behaviour needs 0 < bound < 1, target_kl > 0 and kl_coef >= 0.")


@dataclass(frozen=True)
class PROPSConfig(PPOConfig):
    """Settings of PROPS; those of PPO hold for its updates."""

    kept: int = 2  # b, newest rollouts of which an update learns
    behaviour: BehaviourConfig = BehaviourConfig()  # the policy that plays

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept < 1:
            raise UserError(f"kept must be at least 1, got {self.kept}.")


def push_loss(change: Tensor, bound: float) -> Tensor:
    """`max(r, 1 - eps)` of log-ratios `(B,)`: falls with the ratio until it is at its bound."""
    return change.exp().clamp(min=1 - bound)


class PROPS(PPO):
    """PPO on several kept rollouts, which a pushed copy of the policy has played."""

    name = "props"
    distributed = False
    may_remember = False  # rollouts that are kept have no order in time
    config: PROPSConfig

    def __init__(self, config: PROPSConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        self.player: Policy = frozen_copy(policy)
        self.kept: list[Rollout] = []  # earlier rollouts

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk from the behaviour policy."""
        return self.player.sample(obs, generator=generator)

    def rows_of(self, batch: Rollout) -> Rows:
        """All kept decisions, scored anew by the policy and the critic."""
        return self._scored([*self.kept, batch])

    def _scored(self, rollouts: list[Rollout]) -> Rows:
        rows = joined([super(PROPS, self).rows_of(rollout) for rollout in rollouts])
        with torch.no_grad():
            return replace(rows, logp=self.policy.decisions(rows.obs, rows.record).logp)

    def update(self, batch: Rollout) -> Metrics:
        """PPO on the kept rollouts; then the copy is made and pushed for the next one."""
        metrics = super().update(batch)
        self.kept = [*self.kept, batch][-(self.config.kept - 1) :] if self.config.kept > 1 else []
        return metrics | self._push()

    def _push(self) -> Metrics:
        """Copy the policy, and push the copy away from the kept decisions."""
        self.player.load_state_dict(self.policy.state_dict())
        if not self.kept:
            return {}
        config, kl = self.config.behaviour, 0.0
        rows = self._scored(self.kept)
        passes = (minibatches(rows, config.batch_size, self.generator) for _ in range(config.epochs))
        self.player.requires_grad_(True)
        optimizer = torch.optim.Adam(self.player.parameters(), lr=config.lr)
        for minibatch, _ in chain.from_iterable(passes):
            loss, kl = self._push_loss(minibatch)
            if kl > config.target_kl:
                break
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        self.player.requires_grad_(False)
        return {"behaviour/kl": kl}

    def _push_loss(self, rows: Rows) -> tuple[Tensor, float]:
        """Push away from the rows and KL to the policy; and the approximate KL at the rows."""
        config = self.config.behaviour
        with torch.no_grad():
            drawn = self.policy.sample(rows.obs, generator=self.generator)
        change = self.player.decisions(rows.obs, rows.record).logp.sum(1) - rows.logp.sum(1)
        loss = push_loss(change, config.bound).mean()
        if config.kl_coef:
            apart = self.player.decisions(rows.obs, drawn.record).logp.sum(1) - drawn.logp.sum(1)
            loss = loss + config.kl_coef * k3(-apart).mean()
        return loss, float(k3(-change.detach()).mean())

    def parts(self) -> Mapping[str, Stateful]:
        """PPO's parts and the behaviour policy."""
        return {**super().parts(), "player": self.player}

    def state_dict(self) -> dict[str, Any]:
        """States of all parts, and the kept rollouts."""
        return {**super().state_dict(), "kept": [vars(rollout) for rollout in self.kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.kept = [Rollout(**rollout) for rollout in state["kept"]]
