"""Two reservoirs in series and a year of uncertain inflow: a small hydrothermal dispatch (Rosemberg et al. 2024).

Every month a policy sets target volumes; a quadratic program controls turbines and spillways. Water through a turbine
produces energy, and the remaining demand is bought at a price that rises with the amount. Inflow is high in the first
months and low in the last, so emptying the reservoirs early leads to expensive energy later.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from robopolicy.contrib.known_dynamics.linear import Array, LinearDynamics, LinearSystem
from robopolicy.sim.contract import Observation, SimSpec, TensorSpec, VectorSim

MONTHS = 12
VOLUME = np.array([100.0, 60.0])  # [hm^3] of the upper and the lower reservoir
TURBINES = np.array([25.0, 35.0])  # [hm^3/month] through the turbines
YIELD = np.array([1.0, 0.6])  # [GWh/hm^3]
DEMAND = 45.0  # [GWh/month]
PRICE = 0.01  # [cost/GWh^2] buying an amount e costs PRICE * e^2 / 2
PENALTY = 1.0  # [cost/hm^3] of missing a target, more than the value of a hm^3
RAIN = np.array([12.0, 6.0])  # [hm^3/month] mean inflow
SWING, SPREAD = 0.8, 0.4  # relative amplitude of the seasons, standard deviation of the logarithm


class Reservoir(LinearDynamics):
    """Controls: water through both turbines, water spilt by both; the upper reservoir flows into the lower one."""

    def __init__(self) -> None:
        names = ("upper_volume [hm^3]", "lower_volume [hm^3]")
        inflows = ("upper_inflow [hm^3/month]", "lower_inflow [hm^3/month]")
        self.spec = SimSpec(
            task="differentiable/reservoir",
            observation={
                "state": TensorSpec((2,), names=names),
                "disturbance": TensorSpec((2,), names=inflows),
                "clock": TensorSpec((1,), names=("share of the year",)),
            },
            action_low=torch.zeros(2),
            action_high=torch.tensor(VOLUME, dtype=torch.float32),
            control_dt=30 * 86_400.0,
            max_episode_steps=MONTHS,
            action_names=("upper_target [hm^3]", "lower_target [hm^3]"),
        )
        energy = np.array([*YIELD, 0.0, 0.0])  # (m,) [GWh] per unit of each control
        super().__init__(
            LinearSystem(
                a=np.eye(2),
                b=np.array([[-1.0, 0.0, -1.0, 0.0], [1.0, -1.0, 1.0, -1.0]]),
                low=np.zeros(2),
                high=VOLUME,
                control_low=np.zeros(4),
                control_high=np.array([*TURBINES, 500.0, 500.0]),
                control_cost=PRICE * np.outer(energy, energy),
                control_price=-PRICE * DEMAND * energy,
                state_cost=np.zeros((2, 2)),
                goal=np.zeros(2),
                fixed=PRICE * DEMAND**2 / 2,
                penalty=PENALTY,
            )
        )

    def inflow(self, seed: int) -> tuple[Array, Array]:
        """Initial volumes between a fifth and three fifths, and a year of lognormal inflow."""
        rng = np.random.default_rng(seed)
        volume = VOLUME * rng.uniform(0.2, 0.6, 2)
        season = 1 + SWING * np.cos(2 * np.pi * np.arange(MONTHS + 1) / MONTHS - np.pi / 2)
        luck = np.exp(SPREAD * rng.normal(size=(MONTHS + 1, 2)) - SPREAD**2 / 2)
        return volume, RAIN * season[:, None] * luck


class HoldLevel:
    """Expert whose targets are the current volumes."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return targets `(N, 2)`."""
        return obs["state"]
