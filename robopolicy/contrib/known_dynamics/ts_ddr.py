"""TS-DDR: a policy proposes targets, and the duals of a plan train it (Rosemberg et al. 2024).

The policy sets the target state of every step from the information available: the previous target and the disturbances
so far. A convex program then finds the cheapest feasible controls of the whole episode near the targets. Its
multipliers are the exact gradient of the cost in the targets, so one solution gives both forward and backward pass, and
limits hold for any network output. At run time the policy observes the true state, and the program is solved step by
step (`robopolicy.contrib.known_dynamics.linear.LinearDynamics`).

Use it for linear systems with hard limits and convex costs: reservoirs, storage, networks, trajectories within force
limits. The stage-wise form of the paper, whose gradient also passes through the solutions of the steps, is
`algorithm=hdpo` on the same tasks; it trains the executed policy exactly, at the cost of one program per step.

Deviations from the paper: programs are linear-quadratic, deviation is penalised in the 1-norm, feed-forward networks
with the elapsed fraction of time replace recurrent ones; windowed plans and non-convex constraints are not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.constraints import Positive
from robopolicy.contrib.known_dynamics.pathwise import Pathwise, PathwiseConfig
from robopolicy.contrib.known_dynamics.scenarios import Plans, Unrolled, unroll
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class TSDDRConfig(PathwiseConfig):
    """Settings of TS-DDR; the paper's example trains with 1e-3 on batches of 32."""

    lr: Positive = 1e-3  # learning rate of Adam


def plan_loss(cost: Tensor, steps: int) -> tuple[Tensor, Info]:
    """Mean cost of a step for plans with cost `(B,)` over `steps` steps each."""
    return cost.mean() / steps, {"return": -cost.detach().mean()}


class TSDDR(Pathwise):
    """Two-stage deep decision rules, trained on plans of whole episodes."""

    name = "ts_ddr"
    config_class = TSDDRConfig
    data_source = "plans"
    heads = ("squashed_gaussian",)
    reference = "rosemberg2024tsddr"

    def loss(self, batch: Plans) -> tuple[Tensor, Unrolled, Info]:
        """Mean cost of the plans that follow the targets of the mode."""
        spec, dynamics = self.policy.spec, batch.dynamics
        unrolled = unroll(
            batch,
            self.policy.mode,
            action_horizon=spec.action_horizon,
            obs_horizon=spec.obs_horizon,
            step=dynamics.step_to_target,
        )
        cost = dynamics.plan(batch.state, unrolled.action, batch.noise)
        loss, info = plan_loss(cost, unrolled.action.shape[1])
        return loss, unrolled, info
