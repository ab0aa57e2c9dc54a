"""HAMNet's algorithm (Cho et al. 2025): PPO with a separate value for every term of the reward.

A simulator may report the terms of its reward (`Step.info["reward.NAME"]`). A critic with one output per term learns
the return of each term, so that a rare term is not hidden by the others, and every term has its own advantage. Each
term is clipped separately. The policy is any policy with a density; `policy.backbone=modular` makes it HAMNet's small
network, whose layers are mixed from shared modules depending on the observation.

Use it where the reward is a sum of terms of different sizes and frequencies, or over many scenes. With one term it is
`ppo` with a modular critic. `terms` names the terms; the rest of the reward is one more term.

The formulas follow the public code: advantages in units of the standard deviation of their sum, clipped surrogates of
all terms. Deviations: surrogates are summed (the code: averaged, equivalent under Adam). The paper's scenes,
point-cloud patches and rewards are not included, and the context is the observation itself.
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
    """Settings of PPO and the terms of the reward."""

    terms: tuple[str, ...] = ()  # reward terms with a value of their own, e.g. [tracking, fall]
    critic: VectorValueConfig = field(default_factory=VectorValueConfig)  # values of the terms and of the rest

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.terms)) < len(self.terms):
            raise UserError(f"algorithm.terms contains duplicates: {list(self.terms)}; name each term once.")


def normalized(advantage: Tensor) -> Tensor:
    """Advantages `(B, R)` with zero means, in units of the root of the sum of their variances."""
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
        """Build a critic with one value per term and one for the rest."""
        return VectorValueNet(self.config.critic, self.policy.spec, terms=len(self.config.terms) + 1)

    def named_terms(self) -> tuple[str, ...]:
        """Reward terms of `algorithm.terms`."""
        return self.config.terms

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Sum of the clipped surrogates of all terms, minus the entropy bonus."""
        output = self.policy.decisions(rows.obs, rows.record)
        advantage, shape = normalized(rows.advantage), rows.advantage.shape
        entropy = output.entropy.sum(1, keepdim=True).expand(shape)
        old, new = (logp.sum(1, keepdim=True).expand(shape) for logp in (rows.logp, output.logp))
        return self.estimator(Decisions(old), advantage * shape[1], new, entropy, log_stats=log_stats)
