"""Quality of a dataset: trajectory quality, coverage of states and actions, and checks for defects.

Trajectory quality (TQ) and state-action coverage (SACo) are the measures of Schweighofer et al. (2022):

    TQ = (mean return - return of random actions) / (best return of an online learner - return of random actions)
    SACo = distinct state-action pairs in the data / distinct pairs in as many replay steps of an online learner

TQ measures the exploitation of the behaviour policy, SACo its exploration. Numbers are sorted into bins per axis, and
distinct rows of bins are counted exactly (the paper estimates by HyperLogLog). Images and point clouds are excluded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.errors import UserError

BINS = 100  # per axis, as in the paper
LEVELS = 10  # an action with at most this many distinct values is discrete and has no limits
OUTLYING = 100.0  # range of an entry, in ranges of 98 % of its values, above which it has outliers
STILL = 1e-3  # of the range of the data; smaller changes are ignored

Array = NDArray[np.float64]


class Coverage(NamedTuple):
    """Distinct state-action pairs of a dataset and of a reference with as many steps."""

    unique: int  # in the data
    steps: int  # counted in each of the two
    reference: int | None  # distinct pairs in the reference; None without a reference

    @property
    def unique_fraction(self) -> float:
        """Fraction of distinct steps; 1 if no two are equal."""
        return self.unique / self.steps

    @property
    def saco(self) -> float | None:
        """State-action coverage; None without a reference."""
        return None if self.reference is None else self.unique / self.reference


def trajectory_quality(returns: ArrayLike, random: float, best: float) -> float:
    """Trajectory quality of undiscounted returns `(E,)`: 0 as for random actions, 1 as for the best online policy.

    `random` and `best` are mean returns of random actions and of the best policy of an online learner.
    """
    if not best > random:
        raise UserError(f"The best return must be above the return of random actions, got {best:g} and {random:g}.")
    return (float(np.asarray(returns, np.float64).mean()) - random) / (best - random)


def returns_of(episodes: Episodes) -> Array | None:
    """Undiscounted returns `(E,)`; None where no rewards are recorded."""
    if "reward" not in episodes.arrays:
        return None
    return np.add.reduceat(episodes.arrays["reward"].reshape(len(episodes)).astype(np.float64), episodes.starts)


def coverage(data: Episodes, reference: Episodes | None = None, bins: int = BINS) -> Coverage:
    """Count distinct state-action pairs; both datasets must have the same vectors.

    Args:
        data: The dataset.
        reference: Replay data of an online learner. Random whole episodes of the larger dataset, drawn with a fixed
            seed, are dropped until both have as many steps.
        bins: Per axis, between the minimum and the maximum of both; 0 compares the numbers exactly.
    """
    if bins < 0:
        raise UserError(f"Coverage needs a number of bins per axis of 0 or more, got {bins}.")
    found = pairs(data)  # (F, D)
    if reference is None:
        return Coverage(_unique(_binned(found, found, bins)), len(found), None)
    other = pairs(reference)
    if vector_keys(data) != vector_keys(reference) or found.shape[1] != other.shape[1]:
        raise UserError(
            f"Coverage compares datasets of the same vectors, got {', '.join(vector_keys(data))} with "
            f"{found.shape[1]} numbers and {', '.join(vector_keys(reference))} with {other.shape[1]}."
        )
    steps = min(len(found), len(other))
    found, other = found[_chosen(data, steps)], other[_chosen(reference, steps)]
    both = np.concatenate([found, other])
    return Coverage(_unique(_binned(found, both, bins)), steps, _unique(_binned(other, both, bins)))


def vector_keys(episodes: Episodes) -> tuple[str, ...]:
    """Keys of the vector observations in alphabetical order, at least one."""
    keys = sorted(key for key in episodes.observation_keys if not is_image(key) and not is_cloud(key))
    if not keys:
        raise UserError("The dataset has no vectors, only images or point clouds, whose states cannot be compared.")
    return tuple(keys)


def pairs(episodes: Episodes) -> Array:
    """Observed vectors with executed actions `(F, D)`."""
    arrays = [episodes.with_executed_actions().arrays[key] for key in (*vector_keys(episodes), "action")]
    return np.concatenate([array.reshape(len(episodes), -1).astype(np.float64) for array in arrays], 1)


def constant_entries(episodes: Episodes) -> list[str]:
    """Entries of vectors and actions that never change, such as `state[3]` or the name of the entry."""
    return [name for name, values in _entries(episodes) if len(values) > 1 and values.min() == values.max()]


def clipped_actions(episodes: Episodes) -> dict[str, float]:
    """Fraction of the steps in which an entry of the action is at its minimum or maximum, by entry.

    Entries with at most `LEVELS` values, such as a gripper command, are excluded.
    """
    fractions: dict[str, float] = {}
    for name, values in _entries(episodes, ("action",)):
        if len(np.unique(values)) > LEVELS:
            fractions[name] = float(((values == values.min()) | (values == values.max())).mean())
    return fractions


def outlying_entries(episodes: Episodes) -> list[str]:
    """Describe entries whose range exceeds `OUTLYING` times the range of 98 % of their values."""
    found: list[str] = []
    for name, values in _entries(episodes):
        low, high = np.quantile(values, (0.01, 0.99))
        if high > low and values.max() - values.min() > OUTLYING * (high - low):
            farthest = int(np.abs(values - (low + high) / 2).argmax())
            episode = int(np.searchsorted(episodes.ends, farthest, side="right"))
            span = f"98 % of it lies in [{low:.3g}, {high:.3g}]"
            found.append(f"{name} reaches {values[farthest]:.3g} in episode {episode}, and {span}")
    return found


def idle_fraction(episodes: Episodes) -> float:
    """Fraction of the steps after which neither the action nor any vector changes by more than `STILL` of its range."""
    values = np.stack([column for _, column in _entries(episodes)], 1)  # (F, D)
    width = np.ptp(values, axis=0)
    still = (np.abs(np.diff(values, axis=0)) <= STILL * width).all(1)  # (F - 1,)
    still = np.delete(still, episodes.ends[:-1] - 1)  # no step leads from one episode to the next
    return float(still.mean()) if len(still) else 0.0


def repeated_episodes(episodes: Episodes) -> int:
    """Number of episodes whose vectors and actions equal an earlier episode."""
    values = np.stack([column for _, column in _entries(episodes)], 1)
    rows = {values[start:end].tobytes() for start, end in zip(episodes.starts, episodes.ends, strict=True)}
    return episodes.num_episodes - len(rows)


def _entries(episodes: Episodes, keys: Sequence[str] = ()) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values `(F,)` of every number of vectors and actions."""
    vectors = [key for key in episodes.observation_keys if not is_image(key) and not is_cloud(key)]
    for key in keys or (*vectors, "action"):
        columns = episodes.arrays[key].reshape(len(episodes), -1)
        entry_names = episodes.names.get(key, ())
        for index, column in enumerate(columns.T):
            name = f"{key}[{index}]" + (f" ({entry_names[index]})" if len(entry_names) == columns.shape[1] else "")
            yield name, column.astype(np.float64)


def _binned(rows: Array, every: Array, bins: int) -> NDArray[Any]:
    """Bins `(F, D)` of `rows` in the range of `every`; the rows themselves where `bins` is 0."""
    if not bins:
        return rows + 0.0  # so that -0 equals 0
    low, width = every.min(0), np.ptp(every, axis=0)
    position = (rows - low) / np.where(width > 0, width, 1.0)
    return np.minimum(position * bins, bins - 1).astype(np.int32)


def _unique(rows: NDArray[Any]) -> int:
    """Number of different rows."""
    whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1])))
    return len(np.unique(whole))


def _chosen(episodes: Episodes, steps: int) -> NDArray[np.int64]:
    """Frames `(steps,)` of episodes drawn at random; the last episode may be cut."""
    if steps == len(episodes):
        return np.arange(steps)
    order = np.random.default_rng(0).permutation(episodes.num_episodes)
    frames = [np.arange(int(episodes.starts[index]), int(episodes.ends[index])) for index in order]
    return np.concatenate(frames)[:steps]
