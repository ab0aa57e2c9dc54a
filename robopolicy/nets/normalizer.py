"""Affine normalisers, saved with the weights of policies and critics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.core.distributed import all_gather_moments
from robopolicy.errors import UserError, unknown_name

Statistics = Mapping[str, Mapping[str, Any]]
"""`{key: {"min" | "max" | "mean" | "std": array (D,)}}` for observation keys and "action"."""

MODES = ("minmax", "meanstd", "running", "identity")
MIN_RANGE = 1e-4  # smaller ranges count as constant: centred, not scaled
MAX_STD = 3.0  # range of nearly all standardised values [standard deviations]
RUNNING_CLIP = 10.0  # bound of running normalisation, whose early estimates are poor


class Normalizer(nn.Module):
    """`(x - offset) / scale` per dimension, fitted once from statistics; `fitted` is False without them.

    Modes: "minmax" maps [min, max] to [-1, 1]; "meanstd" standardises; "identity" keeps raw units.
    """

    offset: Tensor
    scale: Tensor
    variance: Tensor
    zero: Tensor
    one: Tensor
    fitted: Tensor

    def __init__(self, dim: int, mode: str) -> None:
        super().__init__()
        if mode not in MODES:
            raise unknown_name("normalisation mode", mode, MODES)
        self.mode = mode
        self.register_buffer("offset", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.register_buffer("variance", torch.ones(dim), persistent=False)  # scale squared
        self.register_buffer("zero", torch.zeros(dim), persistent=False)
        self.register_buffer("one", torch.ones(dim), persistent=False)
        self.register_buffer("fitted", torch.tensor(mode == "identity"))

    def fit(self, statistics: Mapping[str, Any]) -> None:
        """Set offset and scale from `{"min", "max"}` or `{"mean", "std"}` arrays `(D,)`, depending on the mode.

        Dimensions with a range below `MIN_RANGE` are not scaled, unless the statistics are `declared` bounds.
        """
        least = 0.0 if statistics.get("declared") else MIN_RANGE
        if self.mode == "minmax":
            low, high = self._read(statistics, "min"), self._read(statistics, "max")
            offset, scale, constant = (high + low) / 2, (high - low) / 2, high - low <= least
        elif self.mode == "meanstd":
            offset, scale = self._read(statistics, "mean"), self._read(statistics, "std")
            constant = scale <= least
        else:
            return
        self.set_transform(offset, torch.where(constant, torch.ones_like(scale), scale))
        self.fitted.fill_(True)

    def fit_key(self, statistics: Statistics, key: str) -> None:
        """Fit from one entry of a statistics dictionary, if the mode needs statistics."""
        if self.mode not in ("minmax", "meanstd"):
            return
        if key not in statistics:
            raise UserError(f"The statistics lack '{key}'; found {sorted(statistics)}.")
        self.fit(statistics[key])

    @property
    def half_range(self) -> float:
        """Half the range of the data in normalised units (of nearly all data if standardised)."""
        return MAX_STD if self.mode in ("meanstd", "running") else 1.0

    def normalize(self, x: Tensor) -> Tensor:
        """Map `(..., D)` from raw to normalised units."""
        if self.mode == "identity":
            return x
        if x.device.type == "cpu":
            return (x - self.offset) / self.scale
        return _affine(x, self.offset, self.variance)

    def denormalize(self, x: Tensor) -> Tensor:
        """Inverse of `normalize`."""
        if self.mode == "identity":
            return x
        if x.device.type == "cpu":
            return x * self.scale + self.offset
        return _affine(x, self.zero, self.one, self.scale, self.offset)

    def set_transform(self, offset: Tensor | float, scale: Tensor | float) -> None:
        """Set offset and scale, `(D,)` each or numbers."""
        self.offset[...], self.scale[...] = offset, scale
        self.variance.copy_(self.scale.square())

    def _read(self, statistics: Mapping[str, Any], name: str) -> Tensor:
        if name not in statistics:
            raise UserError(f"Normalisation '{self.mode}' needs the statistic '{name}'; found {sorted(statistics)}.")
        value = torch.as_tensor(statistics[name], dtype=torch.float64).flatten()
        if value.shape != self.offset.shape:
            raise UserError(f"Statistic '{name}' has {value.numel()} values, expected {self.offset.numel()}.")
        if not bool(value.isfinite().all()):
            raise UserError(f"Statistic '{name}' is not finite; clean the dataset or recompute its statistics.")
        return value.to(self.offset.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in dict(self.named_buffers()):
            value = state_dict.get(prefix + name)
            if value is not None and not bool(value.isfinite().all()):
                raise UserError(f"Checkpoint statistic '{prefix}{name}' is not finite; the checkpoint is damaged.")
        scale = state_dict.get(prefix + "scale")
        if scale is not None and not bool((scale > 0).all()):
            raise UserError(f"Checkpoint statistic '{prefix}scale' is not positive; the checkpoint is damaged.")
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.set_transform(self.offset, self.scale)


def _affine(
    x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """`(x - mean) / sqrt(variance)`, then times scale plus shift if given: one kernel forwards, one backwards."""
    return F.batch_norm(x.reshape(-1, x.shape[-1]), mean, variance, scale, shift, eps=0.0).view(x.shape)


class RunningNormalizer(Normalizer):
    """Running mean and standard deviation of all observations (Welford; batches merge exactly).

    Call `update` only between iterations, because sampling and scoring must use the same transform.
    """

    mean: Tensor
    squares: Tensor
    count: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__(dim, "running")
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(dim, dtype=torch.float64))  # sum of squared deviations
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def fit(self, statistics: Mapping[str, Any]) -> None:
        """Initialise from `{"mean", "std", "count"}` of a dataset, as after updates with its frames."""
        self.mean.copy_(self._read(statistics, "mean"))
        self.count.copy_(torch.as_tensor(statistics["count"], dtype=torch.float64).squeeze())
        self.squares.copy_(self._read(statistics, "std").square() * self.count)
        self._refresh()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Update the statistics with the rows of `x` `(..., D)`, of all processes."""
        rows = x.reshape(-1, x.shape[-1]).double()
        if x.device.type == "cpu" and not bool(rows.isfinite().all()):  # a device would wait in every update
            raise UserError("An observation is not finite; the simulation has diverged.")
        own = rows.mean(0)
        for count, mean, squares in all_gather_moments(rows.shape[0], own, (rows - own).square().sum(0)):
            total = self.count + count
            delta = mean - self.mean
            self.squares += squares + delta.square() * self.count * count / total
            self.mean += delta * count / total
            self.count.copy_(total)
        self._refresh()

    def normalize(self, x: Tensor) -> Tensor:
        """Map `(..., D)` to standardised units, bounded to +-10."""
        return super().normalize(x).clamp(-RUNNING_CLIP, RUNNING_CLIP)

    def _refresh(self) -> None:
        std = (self.squares / self.count).sqrt()
        self.set_transform(self.mean, torch.where(std < MIN_RANGE, torch.ones_like(std), std))
        self.fitted.fill_(True)


def make_normalizer(dim: int, mode: str) -> Normalizer:
    """Build the normaliser of `mode` for vectors of `dim` elements."""
    return RunningNormalizer(dim) if mode == "running" else Normalizer(dim, mode)


def unfitted_normalizers(module: nn.Module) -> list[str]:
    """Names of the normalisers in `module` without statistics; a checkpoint must have none."""
    normalizers = ((name, part) for name, part in module.named_modules() if isinstance(part, Normalizer))
    return [name for name, part in normalizers if not bool(part.fitted.item())]
