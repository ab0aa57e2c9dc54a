"""Trajectory segments as one table: what was seen, done and earned, L steps in a row.

A row of the table is `[observations, action, reward, terminated]`, observations in the order of their keys. Whatever
learns chunks of actions learns segments by taking such rows for actions (`worldmodel/trajectories.py`).

A segment never leaves its episode. Where the episode was terminated its last frame is repeated, so that a generator
learns that nothing follows; where it merely stops, segments stop with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.data.episodes import Array, Episode, Episodes, is_cloud, is_image
from robopolicy.errors import UserError

NOTHING = "nothing"  # the only observation of a generator that is told nothing


@dataclass(frozen=True)
class TransitionLayout:
    """Which columns of a transition hold what."""

    keys: tuple[str, ...]  # observations, sorted
    sizes: tuple[int, ...]  # of their vectors
    action_dim: int  # A

    @classmethod
    def of(cls, episodes: Episodes) -> TransitionLayout:
        """The layout of a dataset.

        Raises:
            UserError: It has no rewards or ends, or shows pictures or clouds.
        """
        for key in ("reward", "terminated"):
            if key not in episodes.arrays:
                raise UserError(f"The dataset has no '{key}', which trajectories consist of; collect it anew.")
        keys = tuple(sorted(episodes.observation_keys))
        seen = [key for key in keys if is_image(key) or is_cloud(key)]
        if seen or not keys:
            raise UserError(f"Trajectories are made of vector observations, but the dataset shows {seen or 'nothing'}.")
        sizes = tuple(int(np.prod(episodes.arrays[key].shape[1:])) for key in keys)
        return cls(keys, sizes, episodes.arrays["action"].shape[1])

    @property
    def observed(self) -> int:
        """Columns of the observations, which come first."""
        return sum(self.sizes)

    @property
    def actions(self) -> slice:
        """Columns of the action."""
        return slice(self.observed, self.observed + self.action_dim)

    @property
    def size(self) -> int:
        """D, all columns."""
        return self.observed + self.action_dim + 2

    def rows(self, episodes: Episodes) -> NDArray[np.float32]:
        """The dataset as a table `(F, D)`, with the actions that were played."""
        arrays = episodes.with_executed_actions().arrays
        columns = [arrays[key] for key in (*self.keys, "action", "reward", "terminated")]
        return np.concatenate([column.reshape(len(column), -1).astype(np.float32) for column in columns], 1)

    def observations(self, rows: Tensor) -> dict[str, Tensor]:
        """Observations `{key: (..., n)}` of `rows` `(..., D)`."""
        return dict(zip(self.keys, rows[..., : self.observed].split(self.sizes, -1), strict=True))

    def episode(self, rows: Tensor, task: str, behaviour: str) -> Episode:
        """An episode of `rows` `(L, D)`, up to the first that says that it terminated."""
        ended = (rows[:, -1] > 0.5).cpu().numpy()
        count = int(ended.argmax()) + 1 if ended.any() else len(rows)
        kept = rows[:count].float().cpu()
        arrays: dict[str, Array] = {key: value.numpy() for key, value in self.observations(kept).items()}
        arrays |= {"action": kept[:, self.actions].numpy(), "reward": kept[:, -2].numpy(), "terminated": ended[:count]}
        return Episode(arrays, task, behaviour=behaviour)


def segment_starts(episodes: Episodes, length: int) -> NDArray[np.int64]:
    """Frames at which a segment of `length` frames may start.

    Raises:
        UserError: No episode is long enough.
    """
    longest = int(episodes.lengths.max())
    if length > longest:
        raise UserError(f"No episode has {length} frames, the longest has {longest}; set model.length={longest}.")
    ends = np.repeat(episodes.ends, episodes.lengths)
    terminated = np.repeat(episodes.arrays["terminated"][episodes.ends - 1].astype(np.bool_), episodes.lengths)
    return np.flatnonzero((np.arange(len(episodes)) + length <= ends) | terminated)


class SegmentSampler(ChunkSampler):
    """Endless shuffled segments, as chunks `(B, L, D)` of a policy that sees nothing."""

    def __init__(
        self, episodes: Episodes, layout: TransitionLayout, *, length: int, batch_size: int = 256, seed: int = 0
    ) -> None:
        """Precompute the tables.

        Args:
            episodes: Source.
            layout: Its columns.
            length: L, frames per segment.
            batch_size: B.
            seed: Seed of the shuffling.
        """
        rows = layout.rows(episodes)
        table = replace(episodes, arrays={NOTHING: np.zeros((len(rows), 1), np.float32), "action": rows}, names={})
        self._starts = torch.from_numpy(segment_starts(episodes, length))
        super().__init__(table, horizon=length, batch_size=batch_size, seed=seed)

    def take(self, frames: Tensor) -> ChunkBatch:
        """The segments that start at `frames` `(B,)`; what repeats the end of an episode counts as well."""
        batch = super().take(frames)
        return replace(batch, mask=torch.ones_like(batch.mask))

    def first(self, count: int) -> ChunkBatch:
        """The first `count` segments of the stream, or all where there are fewer, wherever it is now."""
        return self.take(self._permutation(0)[:count])

    def _permutation(self, epoch: int) -> Tensor:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._starts))
        return self._starts[torch.from_numpy(order)]


def nothing(rows: int, device: torch.device | str = "cpu") -> Mapping[str, Tensor]:
    """The observations of a generator that is told nothing."""
    return {NOTHING: torch.zeros(rows, 1, 1, device=device)}
