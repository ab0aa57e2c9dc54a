"""Conversion of gymnasium spaces to flat observations and bounded actions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.modality import ENCODERS, prefix_of
from robopolicy.sim.contract import TensorSpec
from robopolicy.sim.vector_env import Arrays
from robopolicy.sim.wrappers.registry import is_wrapper_key
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX, STEP_KEYS

_RESERVED = (*STEP_KEYS, HIDDEN_STATE)  # keys of an episode that are no observations


class ObservationMap:
    """Conversion of observations of one space: vectors to float32, colour images `image.<key>` to uint8 `(3, H, W)`.

    A single Box is named `state` (or `image.pixels`); entries of a Dict keep their keys, nested keys are joined by
    dots. Keys with several dimensions (`point_cloud.`) keep their shape; entries without numbers are dropped.

    Raises:
        UserError: An observation has an unsupported type or a reserved name, or there is none.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._leaves: dict[str, spaces.Space[Any]] = {}
        for path, leaf in _leaves(space, ()):
            key = ".".join(path)
            image = _image_size(leaf)
            if image is not None:
                key = IMAGE_PREFIX + (key or "pixels")
                entry = TensorSpec((3, *image), torch.uint8)
            else:
                key = key or "state"
                prefix = prefix_of(key)
                rank = ENCODERS[prefix].rank if prefix else 1
                keeps_shape = rank > 1 and len(leaf.shape or ()) == rank
                entry = TensorSpec(tuple(leaf.shape or ()) if keeps_shape else (int(spaces.flatdim(leaf)),))
            if 0 in entry.shape:
                continue
            reserved = key in _RESERVED or is_wrapper_key(key) or (image is None and key.startswith(IMAGE_PREFIX))
            if reserved or key in self.specs:
                raise UserError(f"Observation '{key}' has a name that is already used; rename it.")
            self.specs[key], self._paths[key], self._leaves[key] = entry, path, leaf
        if not self.specs:
            raise UserError(f"An environment with the observation space {space} has no usable observation.")

    def empty(self, num_envs: int) -> Arrays:
        """Allocate arrays `(N, ...)`."""
        types = {torch.uint8: np.uint8, torch.float32: np.float32}
        return {key: np.zeros((num_envs, *spec.shape), types[spec.dtype]) for key, spec in self.specs.items()}

    def single(self, observation: Any) -> Arrays:
        """Flatten one observation: arrays without batch dimension."""
        return {key: self._convert(key, self._get(key, observation)[None])[0] for key in self.specs}

    def batch(self, observation: Any) -> Arrays:
        """Flatten an observation whose arrays have a leading batch dimension."""
        return {key: self._convert(key, self._get(key, observation)) for key in self.specs}

    def _get(self, key: str, observation: Any) -> NDArray[Any]:
        for name in self._paths[key]:
            observation = observation[name]
        return np.asarray(observation)

    def _convert(self, key: str, values: NDArray[Any]) -> NDArray[Any]:
        leaf = self._leaves[key]
        if self.specs[key].dtype == torch.uint8:
            pixels = _pixels(key, values, leaf.shape or ())
            return np.ascontiguousarray(pixels if _channels_first(pixels.shape[1:]) else pixels.transpose(0, 3, 1, 2))
        if isinstance(leaf, spaces.Discrete):
            if values.size != len(values) or (values < leaf.start).any():  # numpy accepts negative indices
                raise ValueError(f"'{key}' must be a number of at least {leaf.start}, found {values[0].tolist()}")
            return np.eye(int(leaf.n), dtype=np.float32)[values.reshape(-1) - leaf.start]
        if values[0].size != math.prod(self.specs[key].shape):  # numpy would broadcast a single number
            raise ValueError(f"'{key}' must have the shape {leaf.shape}, found {values.shape[1:]}")
        return values.reshape(len(values), *self.specs[key].shape).astype(np.float32)


def action_bounds(space: spaces.Space[Any], task: str) -> tuple[Tensor, Tensor]:
    """Lower and upper bound `(A,)` float32 of a Box, flattened; other or unbounded spaces raise a `UserError`."""
    if not isinstance(space, spaces.Box):
        raise UserError(f"Task {task} has {type(space).__name__} actions; robot policies need a Box.")
    if 0 in space.shape:
        raise UserError(f"Task {task} has no actions: its action space is {space}.")
    low, high = (torch.tensor(bound.reshape(-1), dtype=torch.float32) for bound in (space.low, space.high))
    if not bool(torch.isfinite(torch.stack([low, high])).all()):
        raise UserError(f"Task {task} has unbounded actions; give it finite bounds (gymnasium's RescaleAction).")
    return low, high


def _leaves(space: spaces.Space[Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, child in space.items():
            yield from _leaves(child, (*path, str(key)))
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary):
        yield path, space
    else:
        raise UserError(f"Observations of type {type(space).__name__} are not supported; use Box, Dict or Discrete.")


def _image_size(space: spaces.Space[Any]) -> tuple[int, int] | None:
    """(height, width) of a colour image, channels last or first."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        return None
    if _channels_first(space.shape):
        return space.shape[1], space.shape[2]
    return (space.shape[0], space.shape[1]) if space.shape[2] == 3 else None


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Whether a colour image has the shape `(3, height, width)`; an image with 3 rows does not."""
    return shape[0] == 3 != shape[2]


def _pixels(key: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Convert a batch of images of `shape` to uint8; other values than 0 to 255 raise a `ValueError`."""
    if values.shape[1:] != shape:
        raise ValueError(f"'{key}' must have the shape {shape}, found {values.shape[1:]}")
    if values.dtype == np.uint8:
        return values
    with np.errstate(invalid="ignore"):  # NaN is reported below
        pixels = values.astype(np.uint8)
    if not np.array_equal(pixels, values):
        raise ValueError(f"'{key}' must contain integers from 0 to 255, found other {values.dtype} values")
    return pixels
