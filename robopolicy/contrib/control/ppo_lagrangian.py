"""PPO under constraints, by Lagrange multipliers; with a guarded world model it is OGSRL (Yan et al. 2025).

Parts of the reward that punish (`Step.info["reward.NAME"]`, never above 0) leave the reward and become costs
c = -part >= 0, each with a limit on what an episode may cost on average:

    maximise J   so that   J_c <= limit_c   for every cost c

Every cost has a value and an advantage of its own. A multiplier rises by `multiplier_lr` times (J_c - limit_c) per
rollout, never below 0, and the policy climbs the clipped surrogate of (A - sum multiplier_c A_c) / (1 + sum
multiplier_c), which is the textbook surrogate of the constraint (Ray et al. 2019). J_c is measured: the mean cost of
the episodes that ended in the rollout, added up without discount.

Use it where a penalty has a meaning of its own (falls, joules, leaving the data) and weighing it against the reward
would be guesswork: a limit has a unit. The limits hold on average and after a while, not in every episode, nor during
learning. Without costs it is `ppo`. In a world model that is guarded (`worldmodel.support`), the part `outside` is the
price of leaving the data's support, so `algorithm.costs=[outside]` bounds how often episodes do.

Deviations from OGSRL: a Lagrangian (there: a CPO step with conjugate gradients); leaving the support ends the episode
(there: the state freezes and the cost goes on). Its code records costs as -1 and compares normalised advantages with
the limit, so that its constraint hardly ever holds the policy back; ours is the textbook form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.algorithms.ppo import PPOConfig
from robopolicy.constraints import NonNegative, Positive
from robopolicy.contrib.control.multi_reward_critic import MultiRewardCritic
from robopolicy.contrib.control.vector_value import TermValues
from robopolicy.core.regularizers import Dual
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy


@dataclass(frozen=True)
class PPOLagrangianConfig(PPOConfig):
    """Settings of PPO, and the constraints."""

    costs: tuple[str, ...] = ()  # parts of the reward that become costs, e.g. [outside] or [fall, energy]
    limits: tuple[NonNegative, ...] = ()  # largest mean cost of an episode, one per cost, in its unit
    multiplier_lr: Positive = 0.05  # rise of a multiplier per rollout and unit of excess
    multiplier_init: NonNegative = 0.0  # multipliers at the start

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.costs)) < len(self.costs) or len(self.limits) != len(self.costs):
            raise UserError(
                "algorithm.costs needs different parts of the reward and algorithm.limits as many numbers, got "
                f"{list(self.costs)} and {list(self.limits)}."
            )


def lagrangian(advantage: Tensor, multipliers: Tensor) -> Tensor:
    """Advantage `(B,)` under the constraints.

    Args:
        advantage: (B, C + 1) of the parts of the reward: those that are minus a cost, and the rest of the reward last.
        multipliers: (C,) not negative.
    """
    return (advantage[:, -1] + advantage[:, :-1] @ multipliers) / (1.0 + multipliers.sum())


class EpisodeCosts:
    """What episodes cost until they end, without discount; they run on from rollout to rollout."""

    def __init__(self) -> None:
        self.running: Tensor | None = None  # (N, C) of the episodes that are being played

    def reset_episodes(self) -> None:
        """Forget the running episodes, of which the rest will not be played."""
        self.running = None

    def update(self, costs: Tensor, done: Tensor) -> Tensor | None:
        """Add `costs` `(T, N, C)`; the mean `(C,)` over episodes that ended, `done` `(T, N)`; None without any."""
        start = torch.zeros_like(costs[0])
        running = start if self.running is None else self.running.to(start.device)
        ended: list[Tensor] = []
        for cost, end in zip(costs, done, strict=True):
            running = running + cost
            ended.append(running[end])
            running = torch.where(end[:, None], 0.0, running)
        self.running = running
        whole = torch.cat(ended)  # (E, C)
        return whole.mean(0) if len(whole) else None

    def state_dict(self) -> dict[str, Any]:
        """Costs of the running episodes."""
        return {"running": self.running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.running = state["running"]


class PPOLagrangian(MultiRewardCritic):
    """PPO on reward minus multipliers times costs."""

    name = "ppo_lagrangian"
    config_class = PPOLagrangianConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "ray2019safety"
    distributed = False
    config: PPOLagrangianConfig

    def __init__(self, config: PPOLagrangianConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        start, rate = config.multiplier_init, config.multiplier_lr
        self.multipliers = {n: Dual(start, limit, rate) for n, limit in zip(config.costs, config.limits, strict=True)}
        self.episode_costs = EpisodeCosts()
        self.constrained = bool(config.costs)

    def make_critic(self) -> TermValues:
        """One value per cost and one for the rest of the reward."""
        return TermValues(self.config.critic, self.policy.spec, terms=len(self.config.costs) + 1)

    def named_terms(self) -> tuple[str, ...]:
        """`algorithm.costs`."""
        return self.config.costs

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Advantages of the Lagrangian `(B,)`; values and targets `(B, C + 1)` of all parts."""
        rows = super().process_rollout(batch)
        multipliers = rows.advantage.new_tensor([dual.value for dual in self.multipliers.values()])
        return replace(rows, advantage=lagrangian(rows.advantage, multipliers))

    def update(self, batch: Rollout) -> Metrics:
        """Measure the costs, move the multipliers, and learn from the rollout.

        Raises:
            UserError: A cost is not a part of the reward, or rewards instead of punishing.
        """
        costs = self.costs(batch)
        if bool((costs < 0).any()):
            worst = self.config.costs[int(costs.flatten(0, 1).min(0).values.argmin())]
            raise UserError(f"A cost must be a part of the reward that never exceeds 0, but '{worst}' does; drop it.")
        mean = self.episode_costs.update(costs, batch.terminated | batch.truncated)
        metrics: Metrics = {}
        for number, (name, dual) in enumerate(self.multipliers.items()):
            if mean is not None:
                dual.update(float(mean[number]))
                metrics[f"cost/{name}"] = float(mean[number])
            metrics[f"multiplier/{name}"] = dual.value
        return metrics | super().update(batch)

    def costs(self, batch: Rollout) -> Tensor:
        """What the decisions cost `(T, N, C)`, without discount within a chunk either."""
        self.rewards(batch)  # refuses costs that are not there
        earned = batch.terms | batch.undiscounted  # the same where a chunk is one action
        none = batch.reward.new_zeros(*batch.shape, 0)
        return torch.cat(
            [none, *(-earned[name].nan_to_num(0.0, 0.0, 0.0)[..., None] for name in self.config.costs)], -1
        )

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """PPO's parts, the multipliers and what the running episodes have cost."""
        duals = {f"multiplier_{name}": dual for name, dual in self.multipliers.items()}
        return {**super().checkpoint_items(), **duals, "episode_costs": self.episode_costs}
