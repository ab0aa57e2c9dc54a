"""The world-model contract: what every video world model and every judge offers, and what their users rely on.

A world model continues a film. It is shown the last C frames and told k actions, and returns the k frames that follow,
with the state vector (proprioception) beside each. One action leads from one frame to the next, so `fps` is also the
control rate. Rules that the rest of the stack depends on:

* **Rows are alone.** A row's future is a function of its start, its seed and its actions: not of its neighbours, its
  position or the size of the batch. Randomness is keyed by `(seeds[i], steps[i])` (`robopolicy.rng`). Floating
  point keeps that exact only as far as the device's kernels compute a row alike in any batch.
* **Nothing is written over.** `step` returns a new state and leaves the old one usable, so that a caller may branch.
* **The context is padded at the start of an episode** with copies of its first frame and with zero actions, in training
  as in `reset`.
* **Actions** are in the units of the task, unscaled; the model normalises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from robopolicy.errors import UserError

Images = dict[str, Tensor]
"""{camera: (B, T, 3, S, S) uint8}"""


@dataclass(frozen=True)
class WorldSpec:
    """Everything static about a world model that data, policies and evaluations must agree with (`schema.to_dict`)."""

    cameras: tuple[str, ...]  # views that are predicted together
    size: int  # S, pixels, square
    fps: float  # frames, and actions, per second
    action_dim: int  # A
    proprio_dim: int  # P, entries of the state vector beside the frames; 0 where there is none
    proprio: tuple[str, ...] = ()  # observation keys that make up the state vector, in order
    frames_per_call: int = 1  # k, actions of one call of `step`; 1 serves any number
    context: int = 4  # C, frames that the model looks back
    action_names: tuple[str, ...] = ()  # with units, e.g. "velocity_x [m/s]"; empty where unknown
    proprio_names: tuple[str, ...] = ()
    needs_text: bool = False  # whether the model must be told its task in words

    def __post_init__(self) -> None:
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise UserError(f"A world model needs cameras with different names, got {list(self.cameras)}.")
        if min(self.size, self.action_dim, self.frames_per_call, self.context) < 1 or self.proprio_dim < 0:
            raise UserError(f"Sizes, frames and actions of a world model must be at least 1, got {self}.")
        if not 0 < self.fps < float("inf"):
            raise UserError(f"fps of a world model must be a positive number, got {self.fps}.")


@dataclass(frozen=True)
class WorldState:
    """What a model remembers of B films."""

    seeds: Tensor  # (B,) int64, keys of the randomness of each row
    steps: Tensor  # (B,) int64, frames predicted so far
    memory: Mapping[str, Tensor]  # {name: (B, ...)} the model's own: latents, past actions, ...

    def select(self, rows: Tensor) -> WorldState:
        """The films `rows`: indices `(R,)`, repeated where a film branches, or a mask `(B,)`."""
        memory = {key: value[rows.to(value.device)] for key, value in self.memory.items()}
        return WorldState(self.seeds[rows.to(self.seeds.device)], self.steps[rows.to(self.steps.device)], memory)

    def put(self, rows: Tensor, other: WorldState) -> WorldState:
        """A copy in which `other`, in order, takes the place of the films `rows`: indices `(R,)` or a mask `(B,)`."""
        pairs = {key: (value, other.memory[key]) for key, value in self.memory.items()}
        memory = {key: _put(value, rows, new) for key, (value, new) in pairs.items()}
        return WorldState(_put(self.seeds, rows, other.seeds), _put(self.steps, rows, other.steps), memory)


def _put(value: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    result = value.clone()
    result[rows.to(value.device)] = new.to(value.device)
    return result


@dataclass(frozen=True)
class Frames:
    """What a model predicts for k actions."""

    images: Images  # {camera: (B, k, 3, S, S)} uint8
    proprio: Tensor  # (B, k, P) float32, in the units of the task
    uncertainty: Tensor  # (B, k) float32, disagreement of samples or of an ensemble; 0 where nothing disagrees


class VideoWorldModel(Protocol):
    """A world model. See the module docstring for the rules."""

    spec: WorldSpec

    @property
    def device(self) -> torch.device:
        """Where its tensors live; inputs may lie anywhere."""
        ...

    def reset(
        self, images: Images, proprio: Tensor, *, seeds: Tensor, actions: Tensor | None = None, text: str = ""
    ) -> WorldState:
        """Start B films.

        Args:
            images: The last C frames of every camera, `{camera: (B, C, 3, S, S)}` uint8.
            proprio: The state vectors beside them, `(B, C, P)`.
            seeds: Keys of the randomness of each row, `(B,)` int64.
            actions: The actions between those frames, `(B, C - 1, A)`; None is none, at the start of an episode.
            text: The task in words, for models that need it.

        Raises:
            UserError: Cameras, sizes or dimensions are not those of `spec`.
        """
        ...

    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Play `actions` `(B, k, A)`; returns where that leads and the k frames on the way."""
        ...


@dataclass(frozen=True)
class Judgement:
    """What a judge thinks of B clips."""

    success: Tensor  # (B,) float32 in [0, 1], probability that the last frame of the clip fulfils the task
    progress: Tensor  # (B,) float32 in [0, 1]
    uncertain: Tensor  # (B,) bool, the judge abstains


class SuccessDetector(Protocol):
    """Looks at clips, real or predicted, and says how far the task has come. Holds no memory between calls."""

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Judge clips `{camera: (B, T, 3, S, S)}` uint8 with state vectors `(B, T, P)`, T >= 1."""
        ...


def check_inputs(spec: WorldSpec, images: Mapping[str, Tensor], proprio: Tensor, actions: Tensor | None) -> None:
    """Refuse frames that are not those of `spec`, naming what was expected.

    Raises:
        UserError: A camera is missing or unknown, or a size, a type or a dimension differs.
    """
    if set(images) != set(spec.cameras):
        raise UserError(f"The world model sees the cameras {sorted(spec.cameras)}, got {sorted(images)}.")
    rows = len(proprio)
    for camera, frames in images.items():
        wanted = (rows, spec.context, 3, spec.size, spec.size)
        if tuple(frames.shape) != wanted or frames.dtype != torch.uint8:
            found = f"{tuple(frames.shape)} {str(frames.dtype).removeprefix('torch.')}"
            raise UserError(f"Frames of camera '{camera}' must be {wanted} uint8, got {found}.")
    if tuple(proprio.shape) != (rows, spec.context, spec.proprio_dim):
        wanted = (rows, spec.context, spec.proprio_dim)
        raise UserError(f"State vectors must have shape {wanted}, got {tuple(proprio.shape)}.")
    if actions is not None and tuple(actions.shape) != (rows, spec.context - 1, spec.action_dim):
        wanted = (rows, spec.context - 1, spec.action_dim)
        raise UserError(f"Past actions must have shape {wanted}, got {tuple(actions.shape)}.")


def check_actions(spec: WorldSpec, state: WorldState, actions: Tensor) -> None:
    """Refuse actions of another shape than the films in `state` need.

    Raises:
        UserError: The batch, the number of actions or their dimension differs.
    """
    calls, rest = divmod(actions.shape[1], spec.frames_per_call) if actions.ndim == 3 else (0, 0)
    if calls < 1 or rest or actions.shape[0] != len(state.seeds) or actions.shape[2] != spec.action_dim:
        wanted = f"({len(state.seeds)}, a multiple of {spec.frames_per_call}, {spec.action_dim})"
        raise UserError(f"Actions of the world model must have shape {wanted}, got {tuple(actions.shape)}.")


def first_frames(spec: WorldSpec, images: Mapping[str, Tensor], proprio: Tensor) -> tuple[Images, Tensor]:
    """The context at the start of an episode: its first frame `{camera: (B, 3, S, S)}`, `(B, P)` repeated C times."""
    repeated = {camera: frame[:, None].expand(-1, spec.context, -1, -1, -1) for camera, frame in images.items()}
    return repeated, proprio[:, None].expand(-1, spec.context, -1)
