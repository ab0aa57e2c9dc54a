"""Flow-SDE: PPO with a critic on the stochastic sampler of a flow policy (Flow-SDE of piRL, arXiv 2510.25889).

Flow-GRPO with the advantage from GAE on V(s) instead of from groups: every decision gets credit of its own, and
episodes need not be restarted from one state. Against ReinFlow, the noise is given by the flow's time instead of
learned, and each denoising step has a ratio of its own instead of one per chain.

Use it for long episodes or simulators that cannot repeat a start, and where ReinFlow's noise network is unwanted. Not
for one-step heads: the noise of a single step is `noise_level` itself.

Reconstructed from the equations of Flow-GRPO and the description of piRL, whose variant that injects noise in one
random step per chunk is not implemented; its published results are on vision-language-action models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.flow_grpo import actor_loss
from robopolicy.algorithms.frames.chain_tuner import ChainTuner, ChainTunerConfig
from robopolicy.algorithms.frames.fine_tuner import FineTuner, FineTunerConfig
from robopolicy.algorithms.frames.on_policy import Rows, normalize
from robopolicy.constraints import NotNegative, Positive
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.chain import require_family
from robopolicy.policies.exploration.flow_chains import SDEChain


@dataclass(frozen=True)
class FlowSDEConfig(ChainTunerConfig, FineTunerConfig):
    """Settings of Flow-SDE."""

    noise_level: Positive = 0.3  # c of the injected noise c sqrt((1 - t) / t)
    clip: Positive = 0.01  # ratio bounds per denoising step
    kl_coef: NotNegative = 0.0  # weight of the KL to the frozen base, per dimension
    lr: Positive = 1e-4  # peak learning rate of the actor


class FlowSDE(ChainTuner, FineTuner):
    """Fine-tunes a flow policy by PPO on its stochastic sampler."""

    name = "flow_sde"
    config_class = FlowSDEConfig
    data_source = "rollout"
    heads = ("flow", "shortcut", "meanflow")
    reference = "chen2025pirl"
    config: FlowSDEConfig
    policy: SDEChain

    def __init__(self, config: FlowSDEConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        head = require_family(policy, ("flow",), "Flow-SDE", "use dppo for diffusion and ppo for a Gaussian")
        super().__init__(config, SDEChain(head, config.noise_level), head, total_updates=total_updates)
        self.reference_policy = SDEChain(self.base, config.noise_level)
        self.estimator = Estimator(EstimatorConfig(bounds=ConstantBounds(config.clip)))

    def deployable(self) -> Policy:
        """The fine-tuned flow, sampled by its ODE."""
        return self.policy.head

    def chain_loss(self, rows: Rows) -> tuple[Tensor, Info]:
        """Clipped surrogate on GAE advantages, and the KL to the base."""
        advantage = normalize(rows.advantage)
        return actor_loss(self.policy, self.reference_policy, rows, advantage, self.estimator, self.config.kl_coef)
