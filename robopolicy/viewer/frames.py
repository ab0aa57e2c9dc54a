"""Frames of episodes, which sources of episodes yield and views show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.sim.physics_state import PhysicsState
from robopolicy.spec import IMAGE_PREFIX


class SafetyEvent(NamedTuple):
    """Event of the control loop of a robot or of its safety filter."""

    text: str  # one line
    is_warning: bool = True  # a hold, a stop or an intervention, rather than the normal course


@dataclass(frozen=True, eq=False)
class EpisodeFrame:
    """State of an episode at one control step, and the result of the step that led to it."""

    state: PhysicsState | None  # None where the simulator has no bodies to show
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict[str, NDArray[np.uint8]])  # (h, w, 3) by camera
    vectors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict[str, NDArray[np.float32]])  # (D,) by key
    reward: float = 0.0
    success: bool | None = None  # None where the task defines no success
    plan: tuple[PhysicsState, ...] = ()  # predicted by the current chunk of actions, the state before it first
    chunk: NDArray[np.float32] | None = None  # (H, A) actions that the policy predicts from this step on
    events: tuple[SafetyEvent, ...] = ()  # since the last frame


class EpisodeSource(Protocol):
    """Episodes by number, from a simulator or a dataset."""

    title: str
    control_dt: float  # seconds between two frames
    max_steps: int  # largest number of frames of an episode
    names: Mapping[str, tuple[str, ...]]  # of the entries of vectors, where known

    @property
    def num_episodes(self) -> int | None:
        """Number of episodes; None if there is no end."""
        ...

    def label(self, episode: int) -> str:
        """Name of an episode, such as its seed."""
        ...

    def frames(self, episode: int) -> Iterator[EpisodeFrame]:
        """Yield the frames of an episode, as late as possible; a later call ends earlier iterators."""
        ...

    def note(self) -> str:
        """Remark on the last episode in one line, or nothing."""
        ...

    def close(self) -> None:
        """Free simulators; safe to call twice."""
        ...


def split_observation(arrays: Mapping[str, Any]) -> tuple[dict[str, NDArray[np.uint8]], dict[str, NDArray[np.float32]]]:
    """Split one observation `{key: (...)}` into images `{camera: (h, w, 3)}` and vectors `{key: (D,)}`."""
    images: dict[str, NDArray[np.uint8]] = {}
    vectors: dict[str, NDArray[np.float32]] = {}
    for key, value in arrays.items():
        array = np.asarray(value)
        if key.startswith(IMAGE_PREFIX):
            images[key.removeprefix(IMAGE_PREFIX)] = np.ascontiguousarray(array.transpose(1, 2, 0))
        elif array.ndim == 1:
            vectors[key] = array.astype(np.float32)
    return images, vectors
