"""Task code for two array libraries: numpy on the CPU engines, torch on the warp backend.

A task that sets `MujocoTask.array_api` computes with `xp = namespace(x)` and keeps to what numpy 2 and torch call the
same (`concat`, `stack`, `where`, `clip`, `sum(axis=...)`, `mT`, ...); then its numpy code stays what it was. The two
functions below are the exceptions. They, and not the array API's compatibility layer, because that layer's `clip` and
torch's own `linalg.solve` make the host wait for the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def namespace(array: Any) -> Any:
    """The library whose functions work on `array`: numpy or torch."""
    return np if isinstance(array, np.ndarray) else torch


def constant(value: NDArray[np.float64], like: Any) -> Any:
    """`value` as an array of the library, type and device of `like`; uploaded once, so do not write to it."""
    if isinstance(like, np.ndarray):
        return value
    return _uploaded(value.tobytes(), value.shape, like.dtype, like.device)


def solve(matrices: Any, right: Any) -> Any:
    """Solutions `(N, D, K)` of N systems `matrices` `(N, D, D)` @ x = `right` `(N, D, K)` that are not singular."""
    if isinstance(matrices, np.ndarray):
        return np.linalg.solve(matrices, right)
    return torch.linalg.solve_ex(matrices, right).result


@lru_cache(maxsize=256)
def _uploaded(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data).reshape(shape).copy()).to(device, dtype)
