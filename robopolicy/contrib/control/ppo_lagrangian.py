"""PPO with constraints by Lagrange multipliers; with support termination of a world model OGSRL (Yan et al. 2025).

Punishing reward terms (`Step.info["reward.NAME"]`, never above 0) are removed from the reward and become costs
`c = -term >= 0`, each with a limit on its mean over episodes:

    maximise J   so that   J_c <= limit_c   for every cost c

Every cost has its own value and advantage. A multiplier rises by `multiplier_lr` times (J_c - limit_c) per rollout and
is never below 0. The policy maximises the clipped surrogate of (A - sum multiplier_c A_c) / (1 + sum multiplier_c), the
textbook surrogate of the constraint (Ray et al. 2019). J_c is measured: the mean undiscounted cost of the episodes that
ended in the rollout.

Use it where a penalty has a meaning of its own (falls, joules, leaving the data) and its weight in the reward would be
a guess: a limit has a unit. The limits hold on average after convergence, not in every episode, nor during learning.
Without costs it is `ppo`. In a world model with `worldmodel.support`, the term `outside` is the penalty for leaving the
data's support, so `algorithm.costs=[outside]` limits how often episodes do.

Deviations from OGSRL: a Lagrangian (the paper: a CPO step with conjugate gradients); leaving the support ends the
episode (the paper: the state freezes and the cost accumulates). Its code records costs as -1 and compares normalised
advantages with the limit, so that its constraint is rarely active; ours is the textbook form.
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
    """Settings of PPO and of the constraints."""

    costs: tuple[str, ...] = ()  # reward terms that become costs, e.g. [outside] or [fall, energy]
    limits: tuple[NonNegative, ...] = ()  # maximum mean cost of an episode, one per cost, in its unit
    multiplier_lr: Positive = 0.05  # rise of a multiplier per rollout and unit of excess
    multiplier_init: NonNegative = 0.0  # initial multipliers

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.costs)) < len(self.costs) or len(self.limits) != len(self.costs):
            raise UserError(
                "algorithm.costs needs distinct reward terms and algorithm.limits one number for each, got "
                f"{list(self.costs)} and {list(self.limits)}."
            )


def lagrangian(advantage: Tensor, multipliers: Tensor) -> Tensor:
    """Advantage `(B,)` under the constraints.

    Args:
        advantage: (B, C + 1) of the reward terms: the negative costs, then the rest of the reward.
        multipliers: (C,) not negative.
    """
    return (advantage[:, -1] + advantage[:, :-1] @ multipliers) / (1.0 + multipliers.sum())


class EpisodeCosts:
    """Undiscounted costs of episodes, accumulated across rollouts."""

    def __init__(self) -> None:
        self.running: Tensor | None = None  # (N, C) of the running episodes

    def reset_episodes(self) -> None:
        """Discard the running episodes, which will not be finished."""
        self.running = None

    def update(self, costs: Tensor, done: Tensor) -> Tensor | None:
        """Add `costs` `(T, N, C)`; return the mean `(C,)` over episodes that ended, `done` `(T, N)`, or None."""
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
    """PPO on the reward minus multipliers times costs."""

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
        """Build a critic with one value per cost and one for the rest of the reward."""
        return TermValues(self.config.critic, self.policy.spec, terms=len(self.config.costs) + 1)

    def named_terms(self) -> tuple[str, ...]:
        """Reward terms of `algorithm.costs`."""
        return self.config.costs

    def process_rollout(self, batch: Rollout) -> RolloutBatch:
        """Advantages of the Lagrangian `(B,)`; values and targets `(B, C + 1)` of all terms."""
        rows = super().process_rollout(batch)
        multipliers = rows.advantage.new_tensor([dual.value for dual in self.multipliers.values()])
        return replace(rows, advantage=lagrangian(rows.advantage, multipliers))

    def update(self, batch: Rollout) -> Metrics:
        """Measure the costs, update the multipliers, and learn from the rollout.

        Raises:
            UserError: A cost is not a reward term, or is positive as a reward.
        """
        costs = self.costs(batch)
        if bool((costs < 0).any()):
            worst = self.config.costs[int(costs.flatten(0, 1).min(0).values.argmin())]
            raise UserError(f"A cost must be a reward term that never exceeds 0, but '{worst}' does; drop it.")
        mean = self.episode_costs.update(costs, batch.terminated | batch.truncated)
        metrics: Metrics = {}
        for number, (name, dual) in enumerate(self.multipliers.items()):
            if mean is not None:
                dual.update(float(mean[number]))
                metrics[f"cost/{name}"] = float(mean[number])
            metrics[f"multiplier/{name}"] = dual.value
        return metrics | super().update(batch)

    def costs(self, batch: Rollout) -> Tensor:
        """Undiscounted costs of the decisions `(T, N, C)`, also undiscounted within a chunk."""
        self.rewards(batch)  # raises for unknown terms
        undiscounted = batch.terms | batch.undiscounted  # identical where a chunk is one action
        none = batch.reward.new_zeros(*batch.shape, 0)
        return torch.cat(
            [none, *(-undiscounted[name].nan_to_num(0.0, 0.0, 0.0)[..., None] for name in self.config.costs)], -1
        )

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of PPO, the multipliers and the costs of the running episodes."""
        duals = {f"multiplier_{name}": dual for name, dual in self.multipliers.items()}
        return {**super().checkpoint_items(), **duals, "episode_costs": self.episode_costs}
