"""Bookkeeping of simulators whose environments are rows on the CPU: seeds, step counts, automatic restarts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, VectorSim
from robopolicy.sim.host import DIVERGED, check_action
from robopolicy.sim.seeds import SeedCounter


class RowSim(VectorSim):
    """A subclass begins episodes in some rows, shows what all look like, and steps them."""

    def __init__(self, spec: SimSpec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.episode_step = torch.zeros(num_envs, dtype=torch.int64)
        self._seeds = SeedCounter(num_envs)

    @abstractmethod
    def begin(self, rows: Tensor, seeds: list[int]) -> None:
        """Start the episodes `seeds` in `rows` `(R,)`, ascending; tensors that were handed out stay as they are."""

    @abstractmethod
    def observe(self) -> Observation:
        """What all environments look like now."""

    @property
    def episode_seed(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(N,) int64, seed of the episode now running."""
        return torch.from_numpy(self._seeds.current.copy())

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every environment anew; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""
        self._seeds.reset(seed)
        self.restart(torch.ones(self.num_envs, dtype=torch.bool))
        return self.observe()

    def restart(self, ended: Tensor) -> None:
        """Begin the next episodes where `ended` `(N,)` bool."""
        rows = ended.nonzero().flatten()
        if len(rows):
            self.begin(rows, self._seeds.take(rows.numpy()))
            self.episode_step = torch.where(ended, 0, self.episode_step)

    def moving(self, active: Tensor | None) -> Tensor:
        """`active` as `(N,)` bool on the CPU; everybody if it is None."""
        return torch.ones(self.num_envs, dtype=torch.bool) if active is None else active.cpu()

    def played(self, action: Tensor) -> Tensor:
        """Actions `(N, A)` on the CPU within the bounds.

        Raises:
            UserError: They have another shape, or are not all finite.
        """
        check_action(action, self.num_envs, self.spec)
        action = action.detach().cpu().float()
        if not bool(action.isfinite().all()):
            raise UserError(DIVERGED)
        return action.clamp(self.spec.action_low.cpu(), self.spec.action_high.cpu())

    def state_dict(self) -> dict[str, Any]:
        """Step counts and seeds; a subclass adds its own."""
        return {"step": self.episode_step, "seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`; a subclass restores its own first."""
        self.episode_step = state["step"].clone()
        self._seeds.load_state_dict(state["seeds"])
        return self.observe()
