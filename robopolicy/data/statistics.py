"""Per-dimension statistics of datasets, for normalisers and for `meta/stats.json` of LeRobot.

Vectors give statistics `(D,)` in their own units. Images give `(3, 1, 1)` per channel in [0, 1], computed exactly from
histograms of their bytes, so that any number of frames fits into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.data.episodes import Episodes, is_image
from robopolicy.errors import UserError

Statistics = dict[str, NDArray[Any]]
"""`mean std min max q01 q10 q50 q90 q99` `(D,)` or `(3, 1, 1)` float64, and `count` `(1,)` int64, frames."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def vector_statistics(array: NDArray[Any]) -> Statistics:
    """Statistics of vectors `(F, D)` or scalars `(F,)` over their frames."""
    values = array.reshape(len(array), -1).astype(np.float64)  # (F, D)
    if not np.isfinite(values).all():
        raise UserError(f"Statistics need finite numbers, found {int((~np.isfinite(values)).sum())} others.")
    with np.errstate(over="ignore", invalid="ignore"):
        std = values.std(0)
    if not np.isfinite(std).all():
        raise UserError(f"Statistics need numbers with finite squares, found {np.abs(values).max():.3g}.")
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "mean": values.mean(0),
        "std": std,
        "min": values.min(0),
        "max": values.max(0),
        "count": np.array([len(values)], np.int64),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def image_histogram(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Counts `(3, 256)` of the bytes of each channel of images `(F, 3, height, width)`; histograms can be summed."""
    return np.stack([np.bincount(images[:, channel].reshape(-1), minlength=256) for channel in range(3)])


def histogram_statistics(histogram: NDArray[np.int64], frames: int) -> Statistics:
    """Statistics `(3, 1, 1)` in [0, 1] of the `frames` images counted in `histogram` `(3, 256)`."""
    level = np.arange(256) / 255.0
    pixels = histogram.sum(1)  # (3,)
    mean = histogram @ level / pixels
    cumulative = histogram.cumsum(1)

    def quantile(q: float) -> NDArray[np.float64]:
        """Linear interpolation between order statistics, as `numpy.quantile` does."""
        rank = q * (pixels - 1)
        low, high = np.floor(rank), np.ceil(rank)
        at = [[level[np.searchsorted(c, r[i], side="right")] for r in (low, high)] for i, c in enumerate(cumulative)]
        below, above = np.array(at).T
        return below + (above - below) * (rank - low)

    values = {
        "mean": mean,
        "std": np.sqrt(np.maximum(histogram @ level**2 / pixels - mean**2, 0.0)),
        "min": quantile(0.0),
        "max": quantile(1.0),
        **{name: quantile(q) for name, q in QUANTILES.items()},
    }
    shaped = {name: value.reshape(3, 1, 1) for name, value in values.items()}
    return {**shaped, "count": np.array([frames], np.int64)}


def combine_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Statistics of several parts together: exact, except for quantiles, which are means weighted by the counts."""
    counts = np.array([float(np.sum(part["count"])) for part in parts])
    weight = counts / counts.sum()

    def mean(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.tensordot(weight, np.stack(values), 1)

    means = mean([part["mean"] for part in parts])
    squares = mean([part["std"] ** 2 + part["mean"] ** 2 for part in parts])
    shared = [name for name in QUANTILES if all(name in part for part in parts)]
    return {
        "mean": means,
        "std": np.sqrt(np.maximum(squares - means**2, 0.0)),
        "min": np.minimum.reduce([part["min"] for part in parts]),
        "max": np.maximum.reduce([part["max"] for part in parts]),
        "count": np.array([int(counts.sum())], np.int64),
        **{name: mean([part[name] for part in parts]) for name in shared},
    }


def dataset_statistics(episodes: Episodes) -> dict[str, Statistics]:
    """Statistics of every key of a dataset, over all its frames."""
    return {
        key: histogram_statistics(image_histogram(array), len(array)) if is_image(key) else vector_statistics(array)
        for key, array in episodes.arrays.items()
    }


def statistics_to_json(statistics: Mapping[str, Statistics]) -> dict[str, dict[str, Any]]:
    """Convert to plain lists, as in `meta/stats.json`."""
    return {key: {name: value.tolist() for name, value in stats.items()} for key, stats in statistics.items()}
