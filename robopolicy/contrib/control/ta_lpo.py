"""Temporally-aware learned policy optimisation: a drift instead of a clip, which narrows over training.

Every rollout takes several epochs of steps on `-A ratio + drift(ratio, A)`. The drift penalises a step away from the
old policy: by nothing nearby, by the whole gain of the step far away. Its widths and the entropy bonus decrease with
the fraction of completed updates, so that early updates are large and the last ones small. Any drift that is never
negative, and flat at ratio 1, preserves the guarantee of a mirror step that the policy does not get worse. Source:
Jackson et al. 2024.

Use it in place of PPO where the budget is known in advance. Do not use it for runs that may be shortened or extended,
because its steps shrink over the budget, as in `mdpo`.

Deviations from the paper, whose drift is a network, found by evolution and not published: here it is a closed form
(discovered policy optimisation, Lu et al. 2022), and the linear schedule is our own. It follows the paper's report of
the schedules that were found: the clipping of ratios tightens, and entropy is annealed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.on_policy import ActorCriticConfig
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, normalize
from robopolicy.algorithms.ppo import PPO
from robopolicy.constraints import Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.regularizers import Anneal
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class TALPOConfig(ActorCriticConfig):
    """Settings of TA-LPO; the initial widths follow discovered policy optimisation."""

    alpha: Positive = 2.0  # initial width of the drift at positive advantages, in standard deviations of the advantage
    beta: Positive = 0.6  # initial width of the drift at negative advantages, times nats
    final: Positive = 0.1  # final fraction of the widths and of the entropy bonus; 1 keeps them constant


class TALPO(PPO):
    """PPO's epochs with a drift whose width depends on the training progress."""

    name = "ta_lpo"
    config_class = TALPOConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "jackson2024talpg"
    distributed = True
    config: TALPOConfig

    @cached_property
    def estimator(self) -> Estimator:
        """Importance-weighted objective minus the drift, and an entropy bonus, on their schedules."""
        config, total = self.config, self.total_updates
        start = {"alpha": config.alpha, "beta": config.beta, "entropy": config.entropy_coef}
        schedule = {name: Anneal(value, config.final * value, total) for name, value in start.items()}
        return Estimator(EstimatorConfig(surrogate="drift"), schedule)

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Importance-weighted objective minus the drift, and entropy bonus."""
        output = self.policy.decisions(rows.obs, rows.record)
        advantage = normalize(rows.advantage)[:, None]
        return self.estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, log_stats=log_stats)

    def update(self, batch: Rollout) -> Metrics:
        """Run several epochs on one rollout, then narrow the widths."""
        metrics = super().update(batch)
        metrics["actor/drift_width"] = self.estimator.controllers["alpha"].value
        self.estimator.observe({"entropy": torch.tensor(metrics["actor/entropy"])})
        return metrics

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of PPO and the schedule."""
        return {**super().checkpoint_items(), "estimator": self.estimator}
