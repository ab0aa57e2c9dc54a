"""Base class of simulator wrappers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, SimSpec, TensorSpec, VectorSim
from robopolicy.sim.physics_state import PhysicsState


def unwrapped(sim: VectorSim) -> VectorSim:
    """Return the innermost simulator, without wrappers."""
    while isinstance(sim, SimWrapper):
        sim = sim.sim
    return sim


class SimWrapper(VectorSim):
    """Wrapper that adds observations; a subclass defines `reset` and `step`, and may change the rewards.

    A wrapper is registered by name in `robopolicy.sim.wrappers.registry.WRAPPERS`, and its observations in
    `WRAPPER_KEYS`, so that a policy that needs them finds the wrapper.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Any]]
    """Frozen dataclass of the options with defaults; types of `robopolicy.constraints` give their ranges."""
    order: ClassVar[int] = 100
    """Position among several wrappers, the innermost first, so that the order is the same as in training."""

    def __init__(self, sim: VectorSim, config: Any) -> None:
        """Wrap `sim`, possibly wrapped already, with options of `config_class`."""
        self.sim = sim
        self.spec = replace(sim.spec, observation={**sim.spec.observation, **self.observation(sim.spec, config)})
        self.num_envs, self.device = sim.num_envs, sim.device

    @classmethod
    @abstractmethod
    def observation(cls, spec: SimSpec, config: Any) -> dict[str, TensorSpec]:
        """Observations that the wrapper adds to `spec`; raise a `UserError` if it does not fit the task."""

    @classmethod
    @abstractmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        """Options of the wrapper for a policy with `observation` `{key: shape per step}`; None if it needs none.

        Raises:
            UserError: No options add all observations of this wrapper that the policy needs.
        """

    @classmethod
    def evaluation_config(cls, config: Any) -> Any | None:
        """Options for the evaluation of a policy trained with `config`; None removes the wrapper."""
        return config

    @property
    def episode_seed(self) -> Tensor:  # type: ignore[override]
        """(N,) seeds of the current episodes."""
        return self.sim.episode_seed

    @property
    def episode_step(self) -> Tensor:  # type: ignore[override]
        """(N,) control steps in the current episodes."""
        return self.sim.episode_step

    def goal_reward(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """Rewards of the simulator."""
        return self.sim.goal_reward(achieved, desired)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Frames of the simulator."""
        return self.sim.render(camera, width=width, height=height, envs=envs)

    def physics_state(self, env: int = 0) -> PhysicsState | None:
        """State of the bodies of environment `env`."""
        return self.sim.physics_state(env)

    def state_dict(self) -> dict[str, Any]:
        """State of the simulator; subclasses add their state."""
        return {"sim": self.sim.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore the simulator and return the observation of the inner simulator."""
        return self.sim.load_state_dict(state["sim"])

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()


def single_key(observation: Mapping[str, tuple[int, ...]], prefix: str) -> str | None:
    """Find the only key of `observation` that starts with `prefix`, or None; several raise a `UserError`."""
    keys = sorted(key for key in observation if key.startswith(prefix))
    if len(keys) > 1:
        raise UserError(f"A simulator has one observation '{prefix}*', but the policy needs {', '.join(keys)}.")
    return keys[0] if keys else None
