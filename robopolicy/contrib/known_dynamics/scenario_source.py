"""Data sources of scenarios, for algorithms that differentiate through known dynamics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.contrib.known_dynamics.dynamics import DynamicsSim
from robopolicy.contrib.known_dynamics.linear import LinearDynamics
from robopolicy.contrib.known_dynamics.scenarios import Plans, Scenarios
from robopolicy.device import move
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.sim.contract import VectorSim
from robopolicy.training.make_source import DataSource, SourceContext


class ScenarioSource:
    """Scenarios of known dynamics.

    They come in shuffled passes over a fixed set, or are new for every update.
    """

    whole_episodes: ClassVar[bool] = True
    uses_replay: ClassVar[bool] = False
    kind: ClassVar[type[Scenarios]] = Scenarios  # of the batches

    def __init__(
        self, sim: VectorSim, algorithm: Algorithm, device: torch.device, *, scenarios: int, obs_horizon: int, seed: int
    ) -> None:
        """Draw the scenarios.

        Args:
            sim: Simulator of the task; its number of environments is the batch size.
            algorithm: Algorithm that uses the scenarios.
            device: Device of the batches.
            scenarios: Size of the fixed set, whose seeds begin at `seed`; 0 draws new ones for every update.
            obs_horizon: To, observations of the policy.
            seed: First episode seed.

        Raises:
            UserError: The task has no known dynamics, or the set does not fill a batch.
        """
        self.sim = sim
        if not isinstance(sim, DynamicsSim):
            raise UserError(
                f"Algorithm '{algorithm.name}' differentiates through known dynamics, which task {sim.spec.task} does "
                "not have; choose a task of the family differentiable ('robopolicy list tasks')."
            )
        self._check_dynamics(sim, algorithm)
        if 0 < scenarios < sim.num_envs:
            raise UserError(
                f"algorithm.scenarios={scenarios} does not fill a batch of sim.num_envs={sim.num_envs}; raise the one "
                "or lower the other."
            )
        self.dynamics, self.device = sim.dynamics, device
        self.env_steps = 0  # total control steps
        self._next = seed  # seed of the next new scenario
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.zeros(0, dtype=torch.int64)  # rest of the pass
        self._passes = 0
        self._pool = sim.dynamics.scenarios(range(seed, seed + scenarios)) if scenarios else None
        first = sim.dynamics.observe(sim.dynamics.scenarios([seed])[0])
        self._first = {key: value[:, None].repeat_interleave(obs_horizon, 1) for key, value in first.items()}

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Build the source with the configured number of scenarios."""
        return cls(
            context.sim(),
            context.algorithm,
            context.device,
            scenarios=context.settings.scenarios,
            obs_horizon=context.spec.obs_horizon,
            seed=context.seed,
        )

    def _check_dynamics(self, sim: DynamicsSim, algorithm: Algorithm) -> None:
        """Raise `UserError` for dynamics that the algorithm cannot use; the gradient needs nothing in particular."""

    def next(self, algorithm: Algorithm) -> Scenarios:
        """Return the next batch."""
        state, noise = self._draw(self.sim.num_envs)
        self.env_steps += noise.shape[0] * noise.shape[1]
        return self.kind(self.dynamics, state.to(self.device), noise.to(self.device))  # type: ignore[arg-type]

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        if self._pool is None:
            self._next += count
            return self.dynamics.scenarios(range(self._next - count, self._next))
        state, noise = self._pool
        if len(self._order) < count:
            self._order = torch.randperm(len(state), generator=self._generator)
            self._passes += 1
        rows, self._order = self._order[:count], self._order[count:]
        return state[rows], noise[rows]

    def metrics(self) -> dict[str, float]:
        """Number of started passes over the fixed set."""
        return {} if self._pool is None else {"data/epoch": float(self._passes)}

    def observations(self) -> Observation:
        """The first observation of the first scenario."""
        return move(self._first, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Position in the pass, generator and counts; seeds determine the scenarios."""
        state = {"order": self._order, "passes": self._passes, "generator": self._generator.get_state()}
        return state | {"next": self._next, "env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._order, self._passes = state["order"], int(state["passes"])
        self._generator.set_state(state["generator"])
        self._next, self.env_steps = int(state["next"]), int(state["env_steps"])
        return True

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()


class PlanSource(ScenarioSource):
    """Scenarios of known linear dynamics, for planning."""

    kind: ClassVar[type[Scenarios]] = Plans

    def _check_dynamics(self, sim: DynamicsSim, algorithm: Algorithm) -> None:
        if not isinstance(sim.dynamics, LinearDynamics):
            raise UserError(
                f"Algorithm '{algorithm.name}' plans with linear dynamics, which task {sim.spec.task} does not have; "
                "choose e.g. task=reservoir, or algorithm=hdpo."
            )
