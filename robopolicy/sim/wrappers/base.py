"""What simulators around another simulator have in common: what they do not change is that of the inner one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from robopolicy.sim.contract import Observation, TensorSpec, VectorSim


def innermost(sim: VectorSim) -> VectorSim:
    """The simulator itself, without what is wrapped around it."""
    while isinstance(sim, WrappedSim):
        sim = sim.sim
    return sim


class WrappedSim(VectorSim):
    """Another simulator and one more observation; subclasses define `reset` and `step`."""

    def __init__(self, sim: VectorSim, key: str, shown: TensorSpec) -> None:
        self.sim, self.key = sim, key
        self.spec = replace(sim.spec, observation={**sim.spec.observation, key: shown})
        self.num_envs, self.device = sim.num_envs, sim.device

    @property
    def episode_seed(self) -> Tensor:  # type: ignore[override]
        """(N,) seeds of the episodes now running."""
        return self.sim.episode_seed

    @property
    def episode_step(self) -> Tensor:  # type: ignore[override]
        """(N,) control steps taken in them."""
        return self.sim.episode_step

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Frames of the simulator."""
        return self.sim.render(camera, width=width, height=height, envs=envs)

    def state_dict(self) -> dict[str, Any]:
        """State of the simulator; subclasses add theirs."""
        return {"sim": self.sim.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore the simulator; the observation is that of the inner one."""
        return self.sim.load_state_dict(state["sim"])

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()
