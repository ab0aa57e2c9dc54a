"""The algorithm contract: `update` on experience, `act` to explore, `inference_policy` to evaluate and export.

An algorithm never imports a logger, a simulator or the command line. `data_source` names the source of the batches that
its `update` takes (`robopolicy/training/make_source.py`), e.g. "dataset" (a `ChunkBatch`), "rollout" (a `Rollout`),
"group" (a `GroupRollout`) or "replay" (`Transitions`).

Every registered class states `data_source`, `heads` and `reference` as literals in its own body, so that listings and
documents are written without importing it. Its `update` shows the order of the method and calls helpers of this
package. Methods that heirs in other packages may override say "hook" in their docstring: `process_rollout`, `loss` and
`critic_loss` of the on-policy family, `use_dataset` of the learners from replay. An heir that changes more than these
writes its own `update`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

Metrics = dict[str, float]


class Checkpointable(Protocol):
    """Object that can be saved and restored: networks, optimisers, trackers."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore it."""
        ...


class Observer(Protocol):
    """Object with running statistics of observations: policies, critics, encoders."""

    def update_stats(self, obs: Observation) -> None:
        """Merge `obs` into the statistics."""
        ...


@runtime_checkable
class EpisodeTracker(Protocol):
    """Object that accumulates statistics of episodes over several rollouts."""

    def reset_episodes(self) -> None:
        """Forget the running episodes, whose remaining steps will not be collected."""
        ...


class Algorithm(ABC):
    """Base class of every algorithm; constructed as `Algorithm(config, policy, total_updates=n)`."""

    name: ClassVar[str]  # key in `ALGORITHMS`
    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings
    data_source: ClassVar[str]  # key in `SOURCES` of what provides the batches of `update`
    heads: ClassVar[tuple[str, ...]]  # policies it trains: names, or a verb (`decisions`) for all policies that have it
    reference: ClassVar[str]  # key of its paper in docs/references.bib
    may_regress: ClassVar[bool] = False  # success may fall for a while; only the end of a run shows a collapse
    distributed: ClassVar[bool] = False  # its updates can be shared by several processes (`training/distributed.py`)
    config: Any  # frozen dataclass
    policy: Policy  # the trainable policy, exploration included
    supports_recurrent: ClassVar[bool] = False  # trains recurrent policies through time
    requires_pretrained: ClassVar[bool] = False  # needs a trained policy; a fresh one learns nothing useful
    needs_dataset: ClassVar[bool] = False  # plays, and has nothing to learn from play alone
    constrained: bool = False  # gives success up where a constraint asks for it: less of it is no collapse
    requires_action_bounds: ClassVar[bool] = False  # evaluates actions anywhere in the action space
    lookahead_steps: int = 0  # control steps from an observation of a dataset to the next one of its batch; 0: none
    step_discount: float = 1.0  # discount per control step inside a chunk, for `ChunkedSim(gamma=...)`

    def __init__(self, policy: Policy, *, total_updates: int, seed: int = 0) -> None:
        """Keep the policy and seed the generator of minibatches and losses."""
        self.policy = policy
        self.total_updates = total_updates
        self.updates = 0  # calls of `update` so far
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def progress(self) -> float:
        """Share of the updates that are done."""
        return self.updates / self.total_updates

    @classmethod
    def init_hint(cls, config: Any) -> str:
        """Setting that gives the pretrained policy required with `config`, e.g. "init_from=CHECKPOINT"; else empty."""
        return "init_from=CHECKPOINT" if cls.requires_pretrained else ""

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

    def attach_symmetry(self, mirror: MirrorSymmetry | None) -> None:  # noqa: B027 - an algorithm without symmetry ignores it
        """Learn from the task's mirror symmetry, where the settings ask for it; most algorithms have no such setting.

        Args:
            mirror: Symmetry that the task declares; None where it declares none.

        Raises:
            UserError: The settings need a mirror and there is none, or it does not fit.
        """

    def inference_policy(self) -> Policy:
        """The policy to evaluate and to put into a checkpoint (averaged weights, no exploration network)."""
        return self.policy

    @abstractmethod
    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Everything that decides future updates, except counter and generator, by its name in `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """States of all checkpoint items, the counter and the generator."""
        state: dict[str, Any] = {name: copy.copy(item.state_dict()) for name, item in self.checkpoint_items().items()}
        return state | {"updates": self.updates, "generator": self.generator.get_state()}

    def reset_episodes(self) -> None:
        """Forget the running episodes, which a resumed run starts anew."""
        for item in self.checkpoint_items().values():
            if isinstance(item, EpisodeTracker):
                item.reset_episodes()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, item in self.checkpoint_items().items():
            item.load_state_dict(state[name])
        self.updates = int(state["updates"])
        self.generator.set_state(state["generator"])


def frozen_copy(module: Any) -> Any:
    """A copy in evaluation mode that no optimiser touches: bases and references."""
    frozen: nn.Module = copy.deepcopy(module)
    return frozen.eval().requires_grad_(False)
