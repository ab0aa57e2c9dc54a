"""A simulator wrapper that adds the stock to the observations, i.e. the reward collected so far (Pires et al. 2025).

The best action may depend on the collected reward: to reach a total, or to avoid the worst episodes. The *stock* after
t steps is `c_t = (c_0 + r_0 + gamma r_1 + ... + gamma^(t-1) r_(t-1)) / gamma^t`, or step by step
`c_(t+1) = (c_t + r_t) / gamma`. The policy chooses c_0, so the observation `stock.<gamma>` `(2,)` contains two parts:
the collected reward (the stock for c_0 = 0) and the growth `1 / gamma^t`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import OpenFraction, Validated
from robopolicy.contrib.control.stock_encoder import STOCK_PREFIX
from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.wrappers.base import SimWrapper, single_key

LARGEST_GROWTH = 1e6  # maximum growth for the precision of float32


@dataclass(frozen=True)
class StockWrapperConfig(Validated):
    """Options of the wrapper `stock`."""

    discount: OpenFraction = 0.99  # gamma, equal to algorithm.gamma of stock_ac


class StockSim(SimWrapper):
    """Adds the observation `stock.<gamma>` to another simulator."""

    name = "stock"
    config_class = StockWrapperConfig
    order: ClassVar[int] = 20  # after the wrapper of skills, to include its bonus

    def __init__(self, sim: VectorSim, config: StockWrapperConfig) -> None:
        """Wrap `sim`.

        Raises:
            UserError: The discount is too small for the length of the episodes.
        """
        gamma = config.discount
        if gamma**-sim.spec.max_episode_steps > LARGEST_GROWTH:
            raise UserError(
                f"The wrapper 'stock' needs a discount closer to 1 for {sim.spec.max_episode_steps} steps, "
                f"got {gamma:g}; choose e.g. {1 - 5 / max(sim.spec.max_episode_steps, 10):g}."
            )
        super().__init__(sim, config)
        (self.key,) = self.observation(sim.spec, config)
        self.gamma = gamma
        self._stock = self._fresh()

    @classmethod
    def observation(cls, spec: SimSpec, config: StockWrapperConfig) -> dict[str, TensorSpec]:
        """`stock.<gamma>` `(2,)`: collected reward and growth."""
        return {f"{STOCK_PREFIX}{config.discount:g}": TensorSpec((2,), names=("earned [reward]", "growth"))}

    @classmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        """The discount in the name of the observation."""
        key = single_key(observation, STOCK_PREFIX)
        return None if key is None else {"discount": float(key.removeprefix(STOCK_PREFIX))}

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start all environments with a stock of 0."""
        self._stock = self._fresh()
        return self._with(self.sim.reset(seed), self._stock)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator and update the stock."""
        step = self.sim.step(action, active)
        moved = advanced(self._stock, step.reward, self.gamma)
        if active is not None:
            moved = torch.where(active[:, None], moved, self._stock)
        self._stock = torch.where(step.done[:, None], self._fresh(), moved)
        return replace(step, obs=self._with(step.obs, self._stock), final_obs=self._with(step.final_obs, moved))

    def state_dict(self) -> dict[str, Any]:
        """State of the simulator and stocks of the running episodes."""
        return {**super().state_dict(), "stock": self._stock}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._stock = state["stock"].to(self.device, copy=True)
        return self._with(super().load_state_dict(state), self._stock)

    def _fresh(self) -> Tensor:
        return torch.tensor([0.0, 1.0], device=self.device).repeat(self.num_envs, 1)

    def _with(self, obs: Observation, stock: Tensor) -> Observation:
        return {**obs, self.key: stock.clone()}


def advanced(stock: Tensor, reward: Tensor, gamma: float) -> Tensor:
    """Collected reward and growth `(N, 2)` after a reward `(N,)`."""
    return torch.stack([stock[:, 0] + reward, stock[:, 1]], 1) / gamma
