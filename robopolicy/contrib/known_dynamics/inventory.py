"""Store that orders from a supplier: the paper's test of HDPO (Alvo et al. 2023).

Every day an order is placed, the order of `lead_time` days ago arrives, and demand is served from stock. Remaining
stock and unmet demand have costs; unmet demand is delayed (backlog) or lost. Demand, costs and lead times follow the
source. Everything is a hinge function, so it is differentiable almost everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics, Outcome
from robopolicy.sim.contract import Observation, SimSpec, TensorSpec, VectorSim

DAYS = 50  # control steps of an episode


@dataclass(frozen=True)
class StoreConfig:
    """One store and its customers."""

    task: str  # registered name
    lead_time: int  # days until an order arrives; 0 arrives before the demand of the day
    lost: bool  # unmet demand is lost instead of delayed
    poisson: bool  # Poisson demand, normal otherwise (cut at 0)
    mean: float = 5.0  # [units/day] demand
    std: float = 1.6  # [units/day] of normal demand
    holding: float = 1.0  # [cost/unit/day] of remaining stock
    underage: float = 9.0  # [cost/unit/day] of unmet demand
    max_order: float = 20.0  # [units/day]

    @property
    def demand_std(self) -> float:
        """Standard deviation of a day's demand [units]."""
        return math.sqrt(self.mean) if self.poisson else self.std

    @property
    def base_stock(self) -> float:
        """Stock plus outstanding orders that cover the demand until a new order arrives [units].

        Optimal for normal demand with backlog, and a common heuristic otherwise.
        """
        days = self.lead_time + 1
        safety = NormalDist().inv_cdf(self.underage / (self.underage + self.holding))
        return days * self.mean + safety * math.sqrt(days) * self.demand_std


NEWSVENDOR = StoreConfig("differentiable/newsvendor", lead_time=0, lost=False, poisson=False)
LOST_SALES = StoreConfig("differentiable/lost_sales", lead_time=4, lost=True, poisson=True)


class Store(DifferentiableDynamics):
    """State: stock (negative for delayed demand), then the outstanding orders by arrival."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        names = ("stock [units]", *(f"arrives_in_{day}_days [units]" for day in range(config.lead_time)))
        self.spec = SimSpec(
            task=config.task,
            observation={"inventory": TensorSpec((1 + config.lead_time,), names=names)},
            action_low=torch.zeros(1),
            action_high=torch.full((1,), config.max_order),
            control_dt=86_400.0,
            max_episode_steps=DAYS,
            action_names=("order [units]",),
        )

    def scenario(self, seed: int) -> tuple[Tensor, Tensor]:
        """Initial stock and orders of up to a day's mean demand, and the demand of all days."""
        rng, config = np.random.default_rng(seed), self.config
        state = rng.uniform(0.0, config.mean, 1 + config.lead_time)
        demand = rng.poisson(config.mean, DAYS) if config.poisson else rng.normal(config.mean, config.std, DAYS)
        noise = np.maximum(demand, 0.0)[:, None]
        return torch.tensor(state, dtype=torch.float32), torch.tensor(noise, dtype=torch.float32)

    def observe(self, state: Tensor) -> Observation:
        """Stock and outstanding orders."""
        return {"inventory": state}

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> Outcome:
        """Order `action` `(B, 1)`, receive the due order and serve the demand `noise` `(B, 1)`."""
        pipeline = torch.cat([state[:, 1:], action], 1)  # (B, 1 + lead time)
        stock = state[:, :1] + pipeline[:, :1] - noise
        cost = self.config.holding * stock.relu() + self.config.underage * (-stock).relu()
        if self.config.lost:
            stock = stock.relu()
        return Outcome(torch.cat([stock, pipeline[:, 1:]], 1), -cost[:, 0])


class BaseStock:
    """Expert that orders the difference to the base stock."""

    def __init__(self, config: StoreConfig, level: float | None = None) -> None:
        self.config = config
        self.level = config.base_stock if level is None else level  # [units]

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return orders `(N, 1)`."""
        return self.order(obs["inventory"])

    def order(self, inventory: Tensor) -> Tensor:
        """Orders `(..., 1)` for stock and outstanding orders `(..., 1 + lead time)`."""
        return (self.level - inventory.sum(-1, keepdim=True)).clamp(0.0, self.config.max_order)
