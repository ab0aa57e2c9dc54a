"""The algorithm contract: `update` on experience, `act` to explore, `deployable` to evaluate and export.

An algorithm never imports a logger, a simulator or the command line. `experience` names what its `update` wants and
the training loop provides: "dataset" (a `ChunkBatch`), "rollout" (a `Rollout`), "hybrid" (a `HybridRollout`), "group"
(a `GroupRollout`), "vine" (a `VineRollout`), "replay" (`Transitions`), "scenarios" (`Scenarios`), "plans" (`Plans`),
"population" (a `Generation`) or "individuals" (`Individuals`); `robopolicy.text` adds its own.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

Metrics = dict[str, float]


class Stateful(Protocol):
    """Anything that can be saved and restored: networks, optimisers, trackers."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore it."""
        ...


class Observer(Protocol):
    """Anything with running statistics of observations: policies, critics, encoders."""

    def observe(self, obs: Observation) -> None:
        """Merge `obs` into them."""
        ...


@runtime_checkable
class EpisodeTracker(Protocol):
    """A part that adds up episodes from rollout to rollout."""

    def cut(self) -> None:
        """Forget the running episodes, of which the rest will not be played."""
        ...


class Algorithm(ABC):
    """Base class of every algorithm; constructed as `Algorithm(config, policy, total_updates=n)`."""

    name: ClassVar[str]  # key in `ALGORITHMS`
    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings
    experience: ClassVar[str]  # what `update` wants, see above
    may_fall: ClassVar[bool] = False  # success falls for a while when all is well: a collapse shows at the end only
    distributed: ClassVar[bool] = False  # its updates can be shared by several processes (`training/distributed.py`)
    config: Any  # frozen dataclass
    policy: Policy  # the trainable policy, exploration included
    may_remember: ClassVar[bool] = False  # trains recurrent policies through time
    needs_base: ClassVar[bool] = False  # starts from a trained policy and learns nothing useful from a fresh one
    needs_dataset: ClassVar[bool] = False  # plays, and has nothing to learn from play alone
    constrained: bool = False  # gives success up where a constraint asks for it: less of it is no collapse
    needs_bounds: ClassVar[bool] = False  # proposes or judges actions anywhere in the action space
    reach: int = 0  # control steps from an observation of a dataset to the next one that `update` wants; 0 wants none
    step_discount: float = 1.0  # discount per control step inside a chunk, for `ChunkedSim(gamma=...)`

    def __init__(self, policy: Policy, *, total_updates: int, seed: int = 0) -> None:
        """Remember the policy and seed the generator of minibatches and losses."""
        self.policy = policy
        self.total_updates = total_updates
        self.updates = 0  # calls of `update` so far
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def progress(self) -> float:
        """Share of the updates that are done."""
        return self.updates / self.total_updates

    @classmethod
    def wanted_base(cls, config: Any) -> str:
        """What to pass in place of a fresh policy with the settings `config`; empty if it will do."""
        return "init_from=CHECKPOINT" if cls.needs_base else ""

    @abstractmethod
    def update(self, batch: Any) -> Metrics:
        """Improve the policy from one batch of experience; returns scalars, keys such as `actor/loss`."""

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration."""
        return self.policy.sample(obs, generator=generator)

    def deployable(self) -> Policy:
        """The policy to evaluate and to put into a checkpoint (averaged weights, no exploration network)."""
        return self.policy

    @abstractmethod
    def parts(self) -> Mapping[str, Stateful]:
        """Everything besides counter and generator that decides future updates, by name."""

    def state_dict(self) -> dict[str, Any]:
        """States of all parts, the counter and the generator."""
        state: dict[str, Any] = {name: copy.copy(part.state_dict()) for name, part in self.parts().items()}
        return state | {"updates": self.updates, "generator": self.generator.get_state()}

    def cut(self) -> None:
        """Forget the episodes that were being played, which a resumed run cannot go on with."""
        for part in self.parts().values():
            if isinstance(part, EpisodeTracker):
                part.cut()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.updates = int(state["updates"])
        self.generator.set_state(state["generator"])


def frozen_copy(module: Any) -> Any:
    """A copy in evaluation mode that no optimiser touches: bases and references."""
    frozen: nn.Module = copy.deepcopy(module)
    return frozen.eval().requires_grad_(False)
