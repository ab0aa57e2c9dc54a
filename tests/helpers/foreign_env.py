"""A Gymnasium environment with configurable observations, and checks of the observations."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from robopolicy.errors import UserError
from robopolicy.sim.backends.gymnasium import GymnasiumSim


class Foreign(gymnasium.Env[Any, Any]):
    """Observes `shown`, in episodes of five steps."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space: spaces.Space[Any] = spaces.Box(-9, 9, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Box(-1, 1, (1,), np.float32)
    shown: Any = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.shown, 1.0, False, self.count == 5, {}


def foreign(**attributes: Any) -> type[Foreign]:
    """An environment that differs from `Foreign` in some attributes."""
    return type("Other", (Foreign,), attributes)


def check_refuses_a_reserved_name(name: str) -> None:
    """An observation with the name of another episode field is refused."""
    space = spaces.Dict({"state": spaces.Box(-1, 1, (2,)), name: spaces.Box(-1, 1, (1,))})
    with pytest.raises(UserError, match=f"Observation '{name}' .* rename it"):
        GymnasiumSim(foreign(observation_space=space), 1)


def check_keeps_its_shape(name: str) -> None:
    """Inputs of a modality encoder keep their shape; vectors are flattened."""
    space = spaces.Dict({name: spaces.Box(-1, 1, (5, 3)), "state": spaces.Box(-1, 1, (5, 3))})
    value = np.arange(15).reshape(5, 3)
    obs = GymnasiumSim(foreign(observation_space=space, shown={name: value, "state": value}), 2).reset(0)
    assert torch.equal(obs[name][1], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(obs["state"][1], torch.arange(15.0))
