"""Mirror descent policy optimisation on rollouts: a linearised objective and a KL to the last policy.

Every rollout takes several epochs of steps on `-t A ratio + KL(new || old)`. Nothing is clipped: the KL pulls back
large changes, and steps shrink as `t` falls to 0 over training. In the limit of many steps the policy is
`old * exp(t A) / Z`. Source: Tomar et al. 2020.

Use it in place of PPO where the policy has a density. It has no clip but a step size, in units of the standard
deviation of the advantage. `mdpo_off` is the variant for replay.

Deviations from the public code: steps take minibatches (the code: ten steps on the whole rollout); the KL is the
estimate `r log r - r + 1` with the ratio r of the executed decisions, exact in expectation for any policy (the code:
the closed form for two Gaussians); the loss is divided by the weight 1 / t of its KL, which is equivalent under Adam.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from robopolicy.algorithms.common.on_policy import ActorCriticConfig
from robopolicy.algorithms.common.rollout_batch import RolloutBatch, normalize
from robopolicy.algorithms.ppo import PPO
from robopolicy.constraints import Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class MDPOConfig(ActorCriticConfig):
    """Settings of MDPO; the schedule is the public code's."""

    step_size: Positive = 1.0  # t of the first rollout, per standard deviation of the advantage; falls linearly to 0
    lr_schedule: str = "linear"  # constant | linear (to 0) | adaptive (keeps the KL of a step near target_kl)


class MDPO(PPO):
    """PPO's epochs with a proximal KL in place of a clip."""

    name = "mdpo"
    config_class = MDPOConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "tomar2020mdpo"
    distributed = True
    config: MDPOConfig

    @cached_property
    def estimator(self) -> Estimator:
        """Linearised objective with the KL and an entropy bonus."""
        return Estimator(EstimatorConfig(surrogate="mirror", entropy_coef=self.config.entropy_coef))

    @property
    def step_size(self) -> float:
        """t_k, which falls linearly from its first value to 0 over the rollouts."""
        return self.config.step_size * (1 - self.progress)

    def loss(self, rows: RolloutBatch, *, log_stats: bool) -> tuple[Tensor, Info]:
        """Linearised objective, KL to the policy of the rollout, and entropy bonus."""
        output = self.policy.decisions(rows.obs, rows.record)
        advantage = self.step_size * normalize(rows.advantage)[:, None]
        return self.estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, log_stats=log_stats)
