"""HDPO: the exact pathwise gradient of the return through known dynamics (Alvo et al. 2023).

In hindsight all disturbances of an episode are known. The return of a deterministic policy in a batch of recorded or
drawn scenarios is differentiated through every step of the dynamics by backpropagation. This needs no critic and no
likelihood ratio, and compares all policies on the same scenarios. `evaluation` on separate scenarios stops early and
keeps the best policy.

Use it where the dynamics are known and smooth almost everywhere
(`robopolicy.contrib.known_dynamics.dynamics.DifferentiableDynamics`): inventory, kinematics, cart-pole, quadrotors
without contact. Hinges such as `max(0, x)` are allowed. Do not use it for contact, whose jumps have no gradient, or for
chaotic motion over long episodes, whose exploding gradient would only be clipped.

Deviations from the paper: no networks that follow the graph of an inventory network, orders are bounded by the squashed
Gaussian instead of rounded up from a softplus, and all periods of an episode count, including the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.contrib.known_dynamics.pathwise import Pathwise, PathwiseConfig
from robopolicy.contrib.known_dynamics.scenarios import Scenarios, Unrolled, unroll
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class HDPOConfig(PathwiseConfig):
    """Settings of HDPO; the learning rate is the paper's."""


def hdpo_loss(reward: Tensor) -> tuple[Tensor, Info]:
    """Negative mean reward `(B, T)` of a control step."""
    return -reward.mean(), {"return": reward.detach().sum(1).mean()}


class HDPO(Pathwise):
    """Hindsight differentiable policy optimisation."""

    name = "hdpo"
    config_class = HDPOConfig
    data_source = "scenarios"
    heads = ("squashed_gaussian",)
    reference = "alvo2023hdpo"

    def loss(self, batch: Scenarios) -> tuple[Tensor, Unrolled, Info]:
        """Negative mean reward of the mode in `batch`."""
        spec = self.policy.spec
        unrolled = unroll(batch, self.policy.mode, action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon)
        loss, info = hdpo_loss(unrolled.reward)
        return loss, unrolled, info
