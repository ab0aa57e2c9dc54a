"""HAMNet's learner (Cho et al. 2025): PPO with a value for every part of the reward.

A simulator may say which parts its reward has (`Step.info["reward.NAME"]`). A modular critic learns the return of each
part by itself, so that a rare one is not drowned by the others, and every part has its advantage. Where parts disagree
about an action, each is clipped by itself. The policy is any with a density; `policy.backbone=modular` makes it
HAMNet's, a small network that the observation mixes from shared modules.

Use it where the reward is a sum of terms of different sizes and rhythms, or over many scenes. With one part it is `ppo`
with a modular critic. `terms` names the parts; what they leave of the reward is one more.

Formulas are those of the public code: advantages in units of the spread of their sum, clipped surrogates of all parts.
Deviations: surrogates are summed (there: averaged, which Adam does not notice). Its scenes, point-cloud patches and
rewards are not rebuilt, and the context is the observation itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.algorithms.ppo import PPOConfig
from robopolicy.contrib.control.multi_reward_critic import MultiRewardCritic
from robopolicy.contrib.control.vector_value import VectorValueConfig, VectorValueNet
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class HAMNetConfig(PPOConfig):
    """Settings of PPO, and the parts of the reward."""

    terms: tuple[str, ...] = ()  # parts of the reward with a value of their own, e.g. [tracking, fall]
    critic: VectorValueConfig = field(default_factory=VectorValueConfig)  # values of the parts and of the rest

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.terms)) < len(self.terms):
            raise UserError(f"algorithm.terms names a part twice: {list(self.terms)}.")


def normalized(advantage: Tensor) -> Tensor:
    """Advantages `(B, R)` with means of 0, in units of the root of the sum of their variances."""
    if len(advantage) < 2:
        return advantage
    return (advantage - advantage.mean(0)) / (advantage.var(0).sum().sqrt() + 1e-8)


class HAMNet(MultiRewardCritic):
    """PPO on vectors of rewards; a `RolloutBatch` holds `(B, R)` advantages, values and targets."""

    name = "hamnet"
    config_class = HAMNetConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "cho2025hamnet"
    distributed = False
    config: HAMNetConfig
    critic: VectorValueNet

    def make_critic(self) -> VectorValueNet:
        """One value per part and one for the rest."""
        return VectorValueNet(self.config.critic, self.policy.spec, terms=len(self.config.terms) + 1)

    def named_terms(self) -> tuple[str, ...]:
        """`algorithm.terms`."""
        return self.config.terms

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Sum of the clipped surrogates of all parts, minus the entropy bonus."""
        output = self.policy.decisions(rows.obs, rows.record)
        advantage, shape = normalized(rows.advantage), rows.advantage.shape
        entropy = output.entropy.sum(1, keepdim=True).expand(shape)
        old, new = (logp.sum(1, keepdim=True).expand(shape) for logp in (rows.logp, output.logp))
        return self.estimator(Decisions(old), advantage * shape[1], new, entropy, log_stats=log_stats)
