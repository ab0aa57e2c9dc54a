"""TS-DDR: a policy proposes targets, and the duals of a plan train it (Rosemberg et al. 2024).

The policy says which state every step should reach, from what it may know by then: the target before and the
disturbances so far. A convex program then finds the cheapest feasible controls of the whole episode that come near the
targets. Its multipliers are the exact gradient of the cost in the targets, so one solution is forward and backward
pass alike, and limits hold whatever the network says. Played, the policy sees the true state and the program is solved
step by step (`robopolicy.contrib.known_dynamics.linear.LinearDynamics`).

Use it for linear systems with hard limits and convex costs: reservoirs, storage, networks, trajectories within force
limits. The stage-wise form of the paper, whose gradient also runs through the solutions of the steps, is
`algorithm=hdpo` on the same tasks; it trains exactly what is played, at the price of one program per step.

Deviations from the paper: programs are linear-quadratic, deviation is charged in the 1-norm, feed-forward networks see
a share of time instead of recurrent ones; windowed plans and constraints that are not convex are not built.
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
    """Mean cost of a step, of plans that cost `(B,)` for `steps` steps each."""
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
        supposed = unroll(
            batch,
            self.policy.mode,
            action_horizon=spec.action_horizon,
            obs_horizon=spec.obs_horizon,
            step=dynamics.suppose,
        )
        cost = dynamics.plan(batch.state, supposed.action, batch.noise)
        loss, info = plan_loss(cost, supposed.action.shape[1])
        return loss, supposed, info
