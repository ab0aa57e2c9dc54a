"""Proximal policy optimisation (Schulman et al. 2017) for policies with a density, chunked or not.

Clipped surrogate on one ratio per decision, GAE, value regression, several epochs of minibatches. The defaults and the
order of operations follow Stable-Baselines3, so that returns compare at equal hyper-parameters; the differences are:

* time limits bootstrap from the value of the true last observation, and cut the trace;
* rewards may be divided by a running standard deviation of the return (`normalize_reward`), observations by the
  policy's own running normaliser, which is updated after the epochs so that the first ratio is exactly 1.

Use it for control from scratch. For a diffusion or flow policy use ReinFlow, which scores the denoising chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.frames.actor_critic import ActorCritic, ActorCriticConfig
from robopolicy.algorithms.frames.on_policy import Rows, normalize
from robopolicy.constraints import Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Settings of PPO."""

    clip: Positive = 0.2  # ratio bounds 1 - clip, 1 + clip


def actor_loss(policy: Policy, rows: Rows, estimator: Estimator, *, diagnose: bool = True) -> tuple[Tensor, Info]:
    """Clipped surrogate minus the entropy bonus on one minibatch; advantages are normalised within it."""
    output = policy.decisions(rows.obs, rows.record)
    advantage = normalize(rows.advantage)[:, None]
    return estimator(Decisions(rows.logp), advantage, output.logp, output.entropy, diagnose=diagnose)


class PPO(ActorCritic):
    """PPO with a separate value network."""

    name = "ppo"
    config_class = PPOConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "schulman2017ppo"
    distributed = True
    config: PPOConfig

    def __init__(self, config: PPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(config, policy, total_updates=total_updates)
        self.estimator = Estimator(
            EstimatorConfig(bounds=ConstantBounds(config.clip), entropy_coef=config.entropy_coef)
        )

    def actor_loss(self, rows: Rows, *, diagnose: bool) -> tuple[Tensor, Info]:
        """Clipped surrogate and entropy bonus."""
        return actor_loss(self.policy, rows, self.estimator, diagnose=diagnose)
