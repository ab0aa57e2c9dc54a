"""Two-stage constrained actor-critic: teachers of auxiliary goals, then a main policy near them (Cai et al. 2023).

Stage one trains a separate policy for every auxiliary reward, e.g. low energy. Stage two freezes these teachers and
trains the main policy on the task's reward with a penalty on its distance to all of them. This satisfies the auxiliary
goals without a weighted sum of rewards, whose weights depend on their scales.

Use it where a task's reward omits other goals, and one number, `constraint_coef`, should set the trade-off. Teachers
that contradict each other pull to a point between them. The main policy does not change in stage one, in which the
teachers act in turn.

The auxiliary rewards are functions of stored transitions (`AUX_REWARDS`; add your own), because our simulators return
one reward. Stage two follows the formulas of the public code, for a deterministic actor. Deviations: every learner is a
TD3 (the code: DDPG); values are divided by their mean absolute value, so that `constraint_coef` does not depend on the
scale of the rewards; the weight of a value is the density of the teachers' actions relative to its peak; distances to
several teachers are summed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.td3 import TD3, TD3Config, q1
from robopolicy.constraints import NonNegative, OpenFraction, Positive
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Info, Observation, Policy, Sample, chunk_mean
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness


def control_cost(batch: Transitions, policy: GaussianPolicy) -> Tensor:
    """Negative mean square `(B,)` of the executed actions, normalised."""
    steps = policy.spec.action_horizon
    action = policy.action_normalizer.normalize(batch.chunk[:, :steps])
    return -chunk_mean(action.square().mean(-1), batch.mask[:, :steps])


def velocity_cost(batch: Transitions, policy: GaussianPolicy) -> Tensor:
    """Negative mean square `(B,)` of the change of the observed vectors, normalised; 0 where it was not observed."""
    encoder = policy.encoder
    after, before = (encoder.normalizer.normalize(encoder.vectors(obs)[:, -1]) for obs in (batch.next_obs, batch.obs))
    return -(after - before).square().mean(1) * batch.next_obs_valid


AUX_REWARDS: dict[str, Callable[[Transitions, GaussianPolicy], Tensor]] = {
    "control_cost": control_cost,
    "velocity_cost": velocity_cost,
}
"""Name -> auxiliary reward `(B,)` of transitions."""


@dataclass(frozen=True)
class TSCACConfig(TD3Config):
    """Settings of the two stages: settings of TD3, the teachers and the weight of their distance."""

    aux_rewards: tuple[str, ...] = ("control_cost",)  # auxiliary rewards, one teacher each
    stage1_fraction: OpenFraction = 0.3  # fraction of the updates that train the teachers
    constraint_coef: NonNegative = 0.3  # weight of the squared distance to the teachers' actions; 0 ignores them
    data_coef: NonNegative = 0.0  # weight of the squared distance to the actions of the data; for offline learning
    spread: Positive = 30.0  # normalised standard deviation of the density that weights values

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused("tscac", self, "action_l2", "value_reduction")
        if self.n_step:
            raise UserError(f"TSCAC's rewards evaluate single chunks; leave algorithm.n_step=0, got {self.n_step}.")
        for name in self.aux_rewards:
            if name not in AUX_REWARDS:
                raise unknown_name("auxiliary reward", name, AUX_REWARDS)
        if not self.aux_rewards or len(set(self.aux_rewards)) < len(self.aux_rewards):
            raise UserError(f"algorithm.aux_rewards needs one or more distinct names, got {list(self.aux_rewards)}.")


def main_loss(value: Tensor, distance: Tensor, data_distance: Tensor, config: TSCACConfig) -> Tensor:
    """Loss of the main actor.

    Args:
        value: (B,) of its actions under the task's critic.
        distance: (K, B) mean squared distance of its actions to the actions of each teacher, normalised.
        data_distance: (B,) the same to the actions in the data.
        config: Weights.
    """
    weight = (-distance.detach().sum(0) / (2 * config.spread**2)).exp()
    climb = (weight * value).mean() / value.detach().abs().mean().clamp(min=1e-6)
    return config.constraint_coef * distance.mean(1).sum() + config.data_coef * data_distance.mean() - climb


class TSCAC(TD3):
    """TD3 with a penalty on the distance to teachers, which are TD3 agents as well."""

    name = "tscac"
    config_class = TSCACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "cai2023tscac"
    config: TSCACConfig

    def __init__(self, config: TSCACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`; the teachers start as copies of it."""
        super().__init__(config, policy, total_updates=total_updates)
        self.stage1_updates = max(round(config.stage1_fraction * total_updates), 1)  # updates
        shared: dict[str, Any] = {entry.name: getattr(config, entry.name) for entry in fields(TD3Config)}
        self.teachers: dict[str, TD3] = {}
        for number, reward in enumerate(config.aux_rewards):
            own = replace(TD3Config(**shared), seed=config.seed + number + 1)
            self.teachers[reward] = TD3(own, copy.deepcopy(self.policy), total_updates=self.stage1_updates)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Act with the main policy and noise; in stage one with the teachers, each in its part of the environments."""
        if self.updates >= self.stage1_updates:
            return super().act(obs, generator=generator)
        chunks = torch.stack([teacher.act(obs, generator=generator).chunk for teacher in self.teachers.values()])
        rows = torch.arange(chunks.shape[1], device=chunks.device)
        return Sample.unscored(chunks[rows % len(chunks), rows])

    def update(self, batch: Transitions) -> Metrics:
        """Train the teachers on their rewards, or the main policy on the task."""
        if self.updates >= self.stage1_updates:
            return super().update(batch)
        metrics: Metrics = {}
        for reward, teacher in self.teachers.items():
            own = replace(batch, reward=AUX_REWARDS[reward](batch, self.policy))
            metrics |= {f"{reward}/{key}": value for key, value in teacher.update(own).items()}
        errors = [teacher.td_errors for teacher in self.teachers.values() if teacher.td_errors is not None]
        self.td_errors = torch.stack(errors).mean(0)
        self.observe(batch)
        self._target_update.copy_buffers()
        self._policy_update.copy_buffers()
        self.updates += 1
        return metrics

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Loss of the main actor, and its distance to the teachers."""
        chunk = self.policy.mode(batch.obs)
        with torch.no_grad():
            teachers = [teacher.policy.mode(batch.obs) for teacher in self.teachers.values()]
        distance = torch.stack([self._distance(chunk, teacher).mean(1) for teacher in teachers])
        to_data = chunk_mean(self._distance(chunk, batch.chunk), batch.mask[:, : self.policy.spec.action_horizon])
        loss = main_loss(q1(self.critic, batch.obs, chunk), distance, to_data, self.config)
        return loss, {"distance": distance.mean()}

    def _distance(self, chunk: Tensor, other: Tensor) -> Tensor:
        """Mean squared difference `(B, Ta)` of the executed actions, normalised."""
        normalizer, executed = self.policy.action_normalizer, slice(self.policy.spec.action_horizon)
        difference = normalizer.normalize(chunk[:, executed]) - normalizer.normalize(other[:, executed])
        return difference.square().mean(-1)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of TD3 and every teacher."""
        return {
            **super().checkpoint_items(),
            **{f"teacher_{reward}": teacher for reward, teacher in self.teachers.items()},
        }
