"""Contract of video world models and success detectors.

A world model receives the last C frames and k actions and returns the next k frames with their state vectors
(proprioception). One action leads from one frame to the next, so `fps` is also the control rate. Rules:

* **Rows are independent.** The prediction of a row depends on its start, seed and actions, not on the other rows, its
  position or the batch size. Randomness is keyed by `(seeds[i], steps[i])` (`robopolicy.rng`). In floating point this
  is exact only where the kernels of the device compute a row identically in any batch.
* **States are immutable.** `step` returns a new state and leaves the old one usable, so callers can branch.
* **The context is padded at the start of an episode** with copies of its first frame and with zero actions, in training
  and in `reset`.
* **Actions** are in the units of the task; the model normalises them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from robopolicy.device import copy_to
from robopolicy.errors import UserError

Images = dict[str, Tensor]
"""{camera: (B, T, 3, S, S) uint8}"""


@dataclass(frozen=True)
class WorldSpec:
    """Static specification of a world model, which data, policies and evaluations must match (`schema.to_dict`)."""

    cameras: tuple[str, ...]  # cameras that are predicted together
    size: int  # S, pixels, square
    fps: float  # frames, and actions, per second
    action_dim: int  # A
    proprio_dim: int  # P, entries of the state vector; 0 without one
    proprio: tuple[str, ...] = ()  # observation keys that make up the state vector, in order
    frames_per_call: int = 1  # k; `step` accepts multiples of it
    context: int = 4  # C, past frames that the model receives
    action_names: tuple[str, ...] = ()  # with units, e.g. "velocity_x [m/s]"; empty where unknown
    proprio_names: tuple[str, ...] = ()
    needs_text: bool = False  # whether the model requires a text instruction

    def __post_init__(self) -> None:
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise UserError(f"A world model needs cameras with different names, got {list(self.cameras)}.")
        if min(self.size, self.action_dim, self.frames_per_call, self.context) < 1 or self.proprio_dim < 0:
            raise UserError(f"Sizes, frames and actions of a world model must be at least 1, got {self}.")
        if not 0 < self.fps < float("inf"):
            raise UserError(f"fps of a world model must be a positive number, got {self.fps}.")


@dataclass(frozen=True)
class WorldState:
    """State of B predicted videos."""

    seeds: Tensor  # (B,) int64, keys of the randomness of each row
    steps: Tensor  # (B,) int64, frames predicted so far
    memory: Mapping[str, Tensor]  # {name: (B, ...)} specific to the model: latents, past actions, ...
    slots: Tensor | None = None  # (B,) int64, slots of rows in calls of a fixed size (`assign_slots`); None: the seeds

    def select(self, rows: Tensor) -> WorldState:
        """Return the videos `rows`: indices `(R,)`, which may repeat to branch, or a mask `(B,)`."""
        memory = {key: value[rows.to(value.device)] for key, value in self.memory.items()}
        slots = None if self.slots is None else self.slots[rows.to(self.slots.device)]
        return WorldState(self.seeds[rows.to(self.seeds.device)], self.steps[rows.to(self.steps.device)], memory, slots)

    def put(self, rows: Tensor, other: WorldState, active: Tensor) -> WorldState:
        """Return a copy with the videos `rows` replaced by `other`, see `put_rows`."""
        memory = {key: put_rows(value, rows, other.memory[key], active) for key, value in self.memory.items()}
        seeds = put_rows(self.seeds, rows, other.seeds, active)
        slots = self.slots
        if slots is not None and other.slots is not None:
            slots = put_rows(slots, rows, other.slots, active)
        return WorldState(seeds, put_rows(self.steps, rows, other.steps, active), memory, slots)


def put_rows(value: Tensor, rows: Tensor, new: Tensor, active: Tensor) -> Tensor:
    """Copy of `value` `(N, ...)` with `new` `(R, ...)` in the rows where `active` `(N,)` bool.

    `rows` `(R,)`, ascending, are the active rows, or all rows, of which the others are kept.
    """
    new = copy_to(new.to(value.dtype), value.device)
    if len(rows) < len(value):
        return value.index_copy(0, rows.to(value.device), new)
    return torch.where(active.to(value.device).reshape(-1, *[1] * (value.dim() - 1)), new, value)


@dataclass(frozen=True)
class Frames:
    """Prediction of a model for k actions."""

    images: Images  # {camera: (B, k, 3, S, S)} uint8
    proprio: Tensor  # (B, k, P) float32, in the units of the task
    uncertainty: Tensor  # (B, k) float32, disagreement of samples or of an ensemble; 0 with a single sample


class VideoWorldModel(Protocol):
    """A world model; the module docstring states the rules."""

    spec: WorldSpec

    @property
    def device(self) -> torch.device:
        """Device of its tensors; inputs may be on any device."""
        ...

    def reset(
        self, images: Images, proprio: Tensor, *, seeds: Tensor, actions: Tensor | None = None, text: str = ""
    ) -> WorldState:
        """Start B videos.

        Args:
            images: Last C frames of every camera, `{camera: (B, C, 3, S, S)}` uint8.
            proprio: State vectors of those frames, `(B, C, P)`.
            seeds: Keys of the randomness of each row, `(B,)` int64.
            actions: Actions between those frames, `(B, C - 1, A)`; None at the start of an episode.
            text: Text instruction, for models that need it.

        Raises:
            UserError: Cameras, sizes or dimensions do not match `spec`.
        """
        ...

    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Return the state after `actions` `(B, k, A)` and the k predicted frames."""
        ...


@dataclass(frozen=True)
class Judgement:
    """Prediction of a success detector for B clips."""

    success: Tensor  # (B,) float32 in [0, 1], probability that the task is solved in the last frame
    progress: Tensor  # (B,) float32 in [0, 1]
    uncertain: Tensor  # (B,) bool, the detector abstains


class SuccessDetector(Protocol):
    """Stateless detector of success and progress in real or predicted clips."""

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Evaluate clips `{camera: (B, T, 3, S, S)}` uint8 with state vectors `(B, T, P)`, T >= 1."""
        ...


def check_inputs(spec: WorldSpec, images: Mapping[str, Tensor], proprio: Tensor, actions: Tensor | None) -> None:
    """Raise a UserError for cameras, sizes, types or dimensions that do not match `spec`."""
    if set(images) != set(spec.cameras):
        raise UserError(f"The world model expects the cameras {sorted(spec.cameras)}, got {sorted(images)}.")
    rows = len(proprio)
    expected: tuple[int, ...] = (rows, spec.context, 3, spec.size, spec.size)
    for camera, frames in images.items():
        if tuple(frames.shape) != expected or frames.dtype != torch.uint8:
            found = f"{tuple(frames.shape)} {str(frames.dtype).removeprefix('torch.')}"
            raise UserError(f"Frames of camera '{camera}' must be {expected} uint8, got {found}.")
    expected = (rows, spec.context, spec.proprio_dim)
    if tuple(proprio.shape) != expected:
        raise UserError(f"State vectors must have shape {expected}, got {tuple(proprio.shape)}.")
    expected = (rows, spec.context - 1, spec.action_dim)
    if actions is not None and tuple(actions.shape) != expected:
        raise UserError(f"Past actions must have shape {expected}, got {tuple(actions.shape)}.")


def check_actions(spec: WorldSpec, state: WorldState, actions: Tensor) -> None:
    """Raise a UserError for actions whose batch size, number or dimension does not match `state` and `spec`."""
    calls, rest = divmod(actions.shape[1], spec.frames_per_call) if actions.ndim == 3 else (0, 0)
    if calls < 1 or rest or actions.shape[0] != len(state.seeds) or actions.shape[2] != spec.action_dim:
        expected = f"({len(state.seeds)}, a multiple of {spec.frames_per_call}, {spec.action_dim})"
        raise UserError(f"Actions of the world model must have shape {expected}, got {tuple(actions.shape)}.")


def first_frames(spec: WorldSpec, images: Mapping[str, Tensor], proprio: Tensor) -> tuple[Images, Tensor]:
    """Repeat the first frame of an episode, `{camera: (B, 3, S, S)}` and `(B, P)`, C times as its context."""
    repeated = {camera: frame[:, None].expand(-1, spec.context, -1, -1, -1) for camera, frame in images.items()}
    return repeated, proprio[:, None].expand(-1, spec.context, -1)
