"""Evaluated policies as rows: weights, returns, and observations of their episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from robopolicy.spec import IMAGE_PREFIX

PIXELS = 16  # maximum side of the images in a view


@dataclass(frozen=True)
class EvaluatedPolicies:
    """K policies of one architecture; on the CPU."""

    weights: Tensor  # (K, D)
    fitness: Tensor  # (K,) float64, undiscounted return
    views: Tensor  # (K, S, V) observations along their episodes, as vectors

    def __len__(self) -> int:
        return len(self.fitness)

    def __getitem__(self, rows: Tensor | slice) -> EvaluatedPolicies:
        return EvaluatedPolicies(self.weights[rows], self.fitness[rows], self.views[rows])

    def __add__(self, other: EvaluatedPolicies) -> EvaluatedPolicies:
        mine, theirs = vars(self), vars(other)
        return EvaluatedPolicies(**{name: torch.cat([mine[name], theirs[name]]) for name in mine})

    @classmethod
    def none(cls, weight_dim: int, views: int, view_dim: int) -> EvaluatedPolicies:
        """An empty set, D = `weight_dim`, S = `views`, V = `view_dim`."""
        return cls(torch.zeros(0, weight_dim), torch.zeros(0, dtype=torch.float64), torch.zeros(0, views, view_dim))

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> EvaluatedPolicies:
        """Load the policies of `state_dict`."""
        return cls(**{name: value.clone() for name, value in state.items()})

    def state_dict(self) -> dict[str, Tensor]:
        """Fields as tensors."""
        return dict(vars(self))


def flatten_obs(obs: Mapping[str, Tensor]) -> Tensor:
    """Flatten observations `{key: (N, ...)}` to vectors `(N, V)`; images are downscaled."""
    parts = [_downscaled(obs[key]) if key.startswith(IMAGE_PREFIX) else obs[key] for key in sorted(obs)]
    return torch.cat([part.flatten(1).float() for part in parts], 1)


def view_dim(observation: Mapping[str, Sequence[int]]) -> int:
    """V for observations of these shapes."""
    return flatten_obs({key: torch.zeros(1, *shape) for key, shape in observation.items()}).shape[1]


def _downscaled(images: Tensor) -> Tensor:
    """Downscale images to `(N, C, h, w)` in [0, 1], with sides of at most `PIXELS`."""
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    size = [min(PIXELS, side) for side in images.shape[-2:]]
    return interpolate(images.float() / scale, size=size, mode="area")
