"""Simulator wrapper that adds useless or hostile messages to the observations, to test their effect on learning.

In a *cheap talk* process (Lu et al. 2022) another agent appends `size` numbers to the learner's observation and has no
other influence: the true observation stays visible, dynamics and rewards do not change, and the message is a fixed
function of the observation, like an unauthenticated topic or a useless sensor. Compare training with and without it:

* `constant`: zeros, which must not change anything; * `random`: `2 pi tanh(m(o))` with a random network m with two
hidden layers of 64 units (random features of o); * `high_frequency`: `2 pi sin(w o)` with weights so large that similar
observations get different messages.

The observation is named `message.<kind>`, so that a policy is evaluated with the kind of its training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import PositiveInt, Validated
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.wrappers.base import SimWrapper, single_key

PREFIX = "message."
MESSAGES = ("constant", "random", "high_frequency")
SCALE = 2 * math.pi  # maximum absolute message
FREQUENCY = 100.0  # standard deviation of w
SEED = 171  # of the networks: runs with equal kind, size and observation use the same function


@dataclass(frozen=True)
class MessageConfig(Validated):
    """Options of the wrapper `message`."""

    kind: str = "random"  # constant | random | high_frequency
    size: PositiveInt = 2  # numbers per message

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in MESSAGES:
            raise unknown_name("message", self.kind, MESSAGES)


class MessageSim(SimWrapper):
    """Adds the observation `message.<kind>` to another simulator."""

    name = "message"
    config_class = MessageConfig
    order: ClassVar[int] = 40  # after the other wrappers, to include their observations

    def __init__(self, sim: VectorSim, config: MessageConfig) -> None:
        """Wrap `sim`.

        Raises:
            UserError: It has no vector observation.
        """
        pictures = (IMAGE_PREFIX, CLOUD_PREFIX)
        self._vectors = sorted(key for key in sim.spec.observation if not key.startswith(pictures))
        if not self._vectors:
            raise UserError(f"The wrapper 'message' needs vector observations, but task {sim.spec.task} has none.")
        super().__init__(sim, config)
        (self.key,) = self.observation(sim.spec, config)
        width = sum(math.prod(sim.spec.observation[key].shape) for key in self._vectors)
        self._message = message_function(config.kind, width, config.size, self.device)

    @classmethod
    def observation(cls, spec: SimSpec, config: MessageConfig) -> dict[str, TensorSpec]:
        """`message.<kind>` `(size,)`."""
        names = tuple(f"message {i}" for i in range(config.size))
        return {f"{PREFIX}{config.kind}": TensorSpec((config.size,), names=names)}

    @classmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        """The kind in the name of the observation, and its size."""
        key = single_key(observation, PREFIX)
        return None if key is None else {"kind": key.removeprefix(PREFIX), "size": observation[key][0]}

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset the simulator and add the message."""
        return self._with(self.sim.reset(seed))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator and add the message."""
        step = self.sim.step(action, active)
        return replace(step, obs=self._with(step.obs), final_obs=self._with(step.final_obs))

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        return self._with(super().load_state_dict(state))

    def _with(self, obs: Observation) -> Observation:
        vectors = torch.cat([obs[key].flatten(1).float() for key in self._vectors], 1)
        return {**obs, self.key: self._message(vectors)}


def message_function(kind: str, width: int, size: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Create the function from observations `(N, width)` to messages `(N, size)`; equal arguments give equal functions.

    Products use double precision, because the last digit in single precision may depend on the number of rows.
    """
    if kind == "constant":
        return lambda vectors: vectors.new_zeros(len(vectors), size)
    generator = torch.Generator().manual_seed(SEED)

    def layer(inputs: int, outputs: int, std: float) -> Tensor:
        return std * torch.randn(inputs, outputs, generator=generator).to(device, torch.float64)

    if kind == "high_frequency":
        weight = layer(width, size, FREQUENCY)
        return lambda vectors: SCALE * (vectors.double() @ weight).sin().float()
    sizes = (width, 64, 64, size)
    weights = [layer(a, b, 1 / math.sqrt(a)) for a, b in pairwise(sizes)]

    def message(vectors: Tensor) -> Tensor:
        hidden = vectors.double()
        for weight in weights[:-1]:
            hidden = nn.functional.relu(hidden @ weight)
        return SCALE * (hidden @ weights[-1]).tanh().float()

    return message
