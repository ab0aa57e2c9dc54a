"""Trajectory segments as one table: observations, actions and rewards of L successive steps.

A row of the table is `[observations, action, reward, terminated]`, with observations in the order of their keys. Any
model of action chunks becomes a model of segments by taking these rows as actions (`trajectory_diffusion.py`).

A segment never leaves its episode. After a termination the last frame is repeated, so that a generator learns that
nothing follows; after a truncation segments stop.
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

NOTHING = "nothing"  # the only observation of an unconditional generator


@dataclass(frozen=True)
class TransitionLayout:
    """Columns of a transition."""

    keys: tuple[str, ...]  # observations, sorted
    sizes: tuple[int, ...]  # of their vectors
    action_dim: int  # A

    @classmethod
    def of(cls, episodes: Episodes) -> TransitionLayout:
        """Layout of a dataset.

        Raises:
            UserError: It has no rewards or terminations, or contains images or clouds.
        """
        for key in ("reward", "terminated"):
            if key not in episodes.arrays:
                raise UserError(f"The dataset has no '{key}', which trajectories need; collect it again.")
        keys = tuple(sorted(episodes.observation_keys))
        unsupported = [key for key in keys if is_image(key) or is_cloud(key)]
        if unsupported or not keys:
            found = unsupported or "nothing"
            raise UserError(f"Trajectories need vector observations, but the dataset contains {found}.")
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
        """The dataset as a table `(F, D)`, with the executed actions."""
        arrays = episodes.with_executed_actions().arrays
        columns = [arrays[key] for key in (*self.keys, "action", "reward", "terminated")]
        return np.concatenate([column.reshape(len(column), -1).astype(np.float32) for column in columns], 1)

    def observations(self, rows: Tensor) -> dict[str, Tensor]:
        """Observations `{key: (..., n)}` of `rows` `(..., D)`."""
        return dict(zip(self.keys, rows[..., : self.observed].split(self.sizes, -1), strict=True))

    def episode(self, rows: Tensor, task: str, behaviour: str) -> Episode:
        """Episode of `rows` `(L, D)` up to the first terminated one."""
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
    """Endless shuffled segments, as chunks `(B, L, D)` of an unconditional policy."""

    def __init__(
        self, episodes: Episodes, layout: TransitionLayout, *, length: int, batch_size: int = 256, seed: int = 0
    ) -> None:
        """Precompute the tables.

        Args:
            episodes: Episodes to sample from.
            layout: Columns of the episodes.
            length: L, frames per segment.
            batch_size: B.
            seed: Seed of the shuffling.
        """
        rows = layout.rows(episodes)
        table = replace(episodes, arrays={NOTHING: np.zeros((len(rows), 1), np.float32), "action": rows}, names={})
        self._starts = torch.from_numpy(segment_starts(episodes, length))
        super().__init__(table, horizon=length, batch_size=batch_size, seed=seed)

    def take(self, frames: Tensor) -> ChunkBatch:
        """Segments that start at `frames` `(B,)`; frames that repeat the end of an episode count as well."""
        batch = super().take(frames)
        return replace(batch, mask=torch.ones_like(batch.mask))

    def first(self, count: int) -> ChunkBatch:
        """The first `count` segments of the stream, or all if there are fewer, independent of its position."""
        return self.take(self._permutation(0)[:count])

    def _permutation(self, epoch: int) -> Tensor:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._starts))
        return self._starts[torch.from_numpy(order)]


def nothing(rows: int, device: torch.device | str = "cpu") -> Mapping[str, Tensor]:
    """Observations of an unconditional generator."""
    return {NOTHING: torch.zeros(rows, 1, 1, device=device)}
