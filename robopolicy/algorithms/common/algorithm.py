"""The algorithm interface: `update` on a batch, `act` to explore, `inference_policy` to evaluate and export.

An algorithm never imports a logger, a simulator or the command line. `data_source` names the source of the batches of
its `update` (`robopolicy/training/make_source.py`), e.g. "dataset" (a `ChunkBatch`), "rollout" (a `Rollout`), "group"
(a `GroupRollout`) or "replay" (`Transitions`).

Every registered class sets `data_source`, `heads` and `reference` as literals in its own body, so that listings and
documents need not import it. Subclasses in other packages may override the methods marked as "hook"; a subclass that
changes more overrides `update`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.device import module_device, restore_generator
from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

IMITATION = ("dataset", "corrections")
"""Values of `Algorithm.data_source` for demonstrated chunks, which need no exploration."""

Metrics = dict[str, float | Tensor]
"""Metrics of an update: numbers, or on a device scalars `()` that `read_metrics` copies to the host together."""


class Checkpointable(Protocol):
    """Object with state: networks, optimisers, trackers."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore the state."""
        ...


class Observer(Protocol):
    """Object with running observation statistics: policies, critics, encoders."""

    def update_stats(self, obs: Observation) -> None:
        """Update the statistics with `obs`."""
        ...


@runtime_checkable
class EpisodeTracker(Protocol):
    """Object that accumulates episode statistics over several rollouts."""

    def reset_episodes(self) -> None:
        """Discard the running episodes, whose remaining steps will not be collected."""
        ...


class Algorithm(ABC):
    """Base class of algorithms, constructed as `Algorithm(config, policy, total_updates=n)`."""

    name: ClassVar[str]  # key in `ALGORITHMS`
    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings
    data_source: ClassVar[str]  # key in `SOURCES` of the source of batches
    heads: ClassVar[tuple[str, ...]]  # supported policies: names, or a method (`decisions`) that they must have
    reference: ClassVar[str]  # key of its paper in docs/references.bib
    may_regress: ClassVar[bool] = False  # success may drop temporarily, so collapse is checked at the end
    distributed: ClassVar[bool] = False  # supports several processes (`training/distributed.py`)
    config: Any  # frozen dataclass
    policy: Policy  # the trainable policy, including exploration
    supports_recurrent: ClassVar[bool] = False  # trains recurrent policies by backpropagation through time
    supports_overlap: ClassVar[bool] = False  # learns from data of earlier weights (`training/overlap.py`)
    requires_pretrained: ClassVar[bool] = False  # needs a pretrained policy
    needs_dataset: ClassVar[bool] = False  # needs a dataset in addition to its rollouts
    constrained: bool = False  # trades success for constraints: a lower success rate is expected
    requires_action_bounds: ClassVar[bool] = False  # evaluates actions in the whole action space
    lookahead_steps: int = 0  # control steps between the two observations of a dataset sample; 0: one observation
    step_discount: float = 1.0  # discount per control step inside a chunk, for `ChunkedSim(gamma=...)`

    def __init__(self, policy: Policy, *, total_updates: int, seed: int = 0) -> None:
        """Set the policy and seed the generator of minibatches and losses, which is on the device of the policy."""
        self.policy = policy
        self.total_updates = total_updates
        self.updates = 0  # calls of `update` so far
        self.generator = torch.Generator(module_device(policy) or "cpu").manual_seed(seed)

    @property
    def progress(self) -> float:
        """Fraction of the updates that are done."""
        return self.updates / self.total_updates

    @classmethod
    def init_hint(cls, config: Any) -> str:
        """Setting of the required pretrained policy, e.g. "init_from=CHECKPOINT"; empty if none is required."""
        return "init_from=CHECKPOINT" if cls.requires_pretrained else ""

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Raise `UserError` if the settings of a run do not fit the data that the algorithm needs.

        `dataset` is a folder of demonstrations or empty, `env_steps` the budget of control steps, `offline_updates`
        the number of first updates that use only the dataset.
        """
        if cls.data_source == "dataset":
            if not dataset:
                raise UserError(f"Algorithm '{cls.name}' needs demonstrations; pass dataset=FOLDER (see collect).")
            if env_steps:
                raise UserError(f"Algorithm '{cls.name}' runs no environment steps; set budget.updates instead.")
        elif cls.needs_dataset:
            if not dataset:
                raise UserError(f"Algorithm '{cls.name}' also needs demonstrations; pass dataset=FOLDER (see collect).")
        elif dataset:
            raise UserError(f"Algorithm '{cls.name}' learns only from its own rollouts; drop dataset=.")

    @abstractmethod
    def update(self, batch: Any) -> Metrics:
        """Train on one batch; returns metrics with keys such as `actor/loss`."""

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration."""
        return self.policy.sample(obs, generator=generator)

    def attach_symmetry(self, mirror: MirrorSymmetry | None) -> None:
        """Use the mirror symmetry of the task, None if it has none, in algorithms with such a setting.

        Raises:
            UserError: The settings need a mirror, and it is missing or incompatible.
        """

    def inference_policy(self) -> Policy:
        """Policy to evaluate and save (averaged weights, no exploration network)."""
        return self.policy

    @abstractmethod
    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """State of future updates, except counter and generator, by name in `state_dict`."""

    def networks(self, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Networks among the checkpoint items, and of algorithms among them, with names such as `part/critic`."""
        for name, item in self.checkpoint_items().items():
            if isinstance(item, nn.Module):
                yield prefix + name, item
            elif isinstance(item, Algorithm):
                yield from item.networks(f"{prefix}{name}/")

    def state_dict(self) -> dict[str, Any]:
        """States of all checkpoint items, the counter and the generator."""
        state: dict[str, Any] = {name: copy.copy(item.state_dict()) for name, item in self.checkpoint_items().items()}
        return state | {"updates": self.updates, "generator": self.generator.get_state()}

    def reset_episodes(self) -> None:
        """Discard the running episodes; a resumed run starts new ones."""
        for item in self.checkpoint_items().values():
            if isinstance(item, EpisodeTracker):
                item.reset_episodes()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, item in self.checkpoint_items().items():
            item.load_state_dict(state[name])
        self.updates = int(state["updates"])
        restore_generator(self.generator, state["generator"])


def make_metrics(stats: Mapping[str, Any]) -> Metrics:
    """Metrics of an update from numbers and scalars `()`; scalars on the CPU become numbers."""
    detached = {key: value.detach() if isinstance(value, Tensor) else value for key, value in stats.items()}
    here = {key for key, value in detached.items() if not isinstance(value, Tensor) or value.device.type == "cpu"}
    return {key: float(value) if key in here else value for key, value in detached.items()}


def read_metrics(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """Numbers of all metrics; waits for the device once."""
    waiting = {key: value for key, value in metrics.items() if isinstance(value, Tensor)}
    read = torch.stack(tuple(waiting.values())).tolist() if waiting else ()
    return {**metrics, **dict(zip(waiting, read, strict=True))}  # type: ignore[dict-item]


def frozen_copy(module: Any) -> Any:
    """Copy a module in evaluation mode without gradients."""
    frozen: nn.Module = copy.deepcopy(module)
    return frozen.eval().requires_grad_(False)


def cosine_decay(progress: float, final: float) -> float:
    """Factor from 1 at progress 0 to `final` at progress 1 and later."""
    return final + (1 - final) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def decay_learning_rates(algorithm: Algorithm, final: float) -> None:
    """Set the learning rates of all optimisers to `cosine_decay` times their initial value."""
    factor = cosine_decay(algorithm.progress, final)
    for item in algorithm.checkpoint_items().values():
        for group in item.param_groups if isinstance(item, torch.optim.Optimizer) else ():
            group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
