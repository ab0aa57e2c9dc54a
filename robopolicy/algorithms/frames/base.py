"""The algorithm contract: `update` on experience, `act` to explore, `deployable` to evaluate and export.

An algorithm never imports a logger, a simulator or the command line. `data_source` names the source of the batches that
its `update` takes (`robopolicy/training/make_source.py`), e.g. "dataset" (a `ChunkBatch`), "rollout" (a `Rollout`),
"group" (a `GroupRollout`) or "replay" (`Transitions`).

Every registered class states `data_source`, `heads` and `reference` as literals in its own body, so that listings and
documents are written without importing it.

Methods of the frames that algorithms of other packages may override: `rows_of` (from a rollout to rows with
advantages), `actor_loss`, `critic_loss`, and in the frame of replay learners `use_dataset` (a look at the whole dataset
before the first update). An algorithm that changes more than these writes its own `update`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import Mirror
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
    data_source: ClassVar[str]  # key in `SOURCES` of what provides the batches of `update`
    heads: ClassVar[tuple[str, ...]]  # policies it trains: names, or a verb (`decisions`) for all policies that have it
    reference: ClassVar[str]  # key of its paper in docs/references.bib
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

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Refuse settings of a run that contradict what the algorithm learns from.

        Args:
            dataset: Folder of demonstrations; empty is none.
            env_steps: Budget of control steps; 0 is none.
            offline_updates: First updates that learn from the dataset alone.

        Raises:
            UserError: Says which setting to change.
        """
        if cls.data_source == "dataset":
            if not dataset:
                raise UserError(
                    f"Algorithm '{cls.name}' learns from demonstrations; pass dataset=FOLDER (see collect)."
                )
            if env_steps:
                raise UserError(f"Algorithm '{cls.name}' plays no steps in training; set budget.updates instead.")
        elif cls.needs_dataset:
            if not dataset:
                raise UserError(
                    f"Algorithm '{cls.name}' learns from demonstrations as well; pass dataset=FOLDER (see collect)."
                )
        elif dataset:
            raise UserError(f"Algorithm '{cls.name}' learns from what it plays alone; drop dataset=.")

    @abstractmethod
    def update(self, batch: Any) -> Metrics:
        """Improve the policy from one batch of experience; returns scalars, keys such as `actor/loss`."""

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration."""
        return self.policy.sample(obs, generator=generator)

    def attach_symmetry(self, mirror: Mirror | None) -> None:  # noqa: B027 - an algorithm without symmetry ignores it
        """Learn from the task's mirror symmetry, where the settings ask for it; most algorithms have no such setting.

        Args:
            mirror: Symmetry that the task declares; None where it declares none.

        Raises:
            UserError: The settings need a mirror and there is none, or it does not fit.
        """

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
