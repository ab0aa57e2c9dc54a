"""Sampler of observation histories and action chunks for imitation, with precomputed index tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.episodes import Episodes
from robopolicy.device import CPU, copy_to, has_memory
from robopolicy.errors import UserError


@dataclass(frozen=True)
class ChunkBatch:
    """One minibatch for `Policy.imitation_loss`."""

    obs: dict[str, Tensor]  # {key: (B, To, ...)} oldest first
    chunk: Tensor  # (B, H, A) chunk[:, 0] is the action for the newest observation
    mask: Tensor  # (B, H) float32, 0 on steps padded after the end of the episode
    weight: Tensor | None = None  # (B,) importance of each sample
    next_obs: dict[str, Tensor] | None = None  # {key: (B, To, ...)} after `lookahead_steps` steps, if sampled
    next_obs_valid: Tensor | None = None  # (B,) float32, 0 where the episode ended earlier
    executed: Tensor | None = None  # (B, H, A) executed actions that led to `next_obs`; equal to `chunk` without noise


def history_index(episodes: Episodes, length: int) -> NDArray[np.int64]:
    """Indices `(F, length)` of the history of every frame, oldest first; the first frame of an episode is repeated."""
    first = np.repeat(episodes.starts, episodes.lengths)[:, None]
    return np.maximum(np.arange(len(episodes))[:, None] + np.arange(1 - length, 1), first)


def chunk_index(last: NDArray[np.int64], horizon: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices `(F, H)` of the actions of the chunk of every frame, and their mask, 0 after the `last` frame `(F,)`."""
    ahead = np.arange(len(last))[:, None] + np.arange(horizon)
    return np.minimum(ahead, last[:, None]), (ahead <= last[:, None]).astype(np.float32)


def last_frames(episodes: Episodes, learned: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Last frame `(F,)` of the episode of every frame, or of its part in which all frames are learned."""
    last = np.repeat(episodes.ends - 1, episodes.lengths)
    if learned is None:
        return last
    frame = np.arange(len(episodes))
    ends = np.flatnonzero((frame == last) | ~np.append(learned[1:], False))  # of the parts
    return ends[np.searchsorted(ends, frame)]


class ChunkSampler:
    """Endless shuffled minibatches; every frame starts one chunk per epoch.

    The history repeats the first observation at the start of an episode, the chunk repeats the last action after its
    end with mask 0. Epoch k is a permutation keyed by `(seed, k)`, so the position in the stream is two integers.
    """

    def __init__(
        self,
        episodes: Episodes,
        *,
        horizon: int,
        obs_horizon: int = 1,
        batch_size: int = 256,
        seed: int = 0,
        weight: np.ndarray | None = None,
        lookahead_steps: int = 0,
        part: slice = slice(None),
        learned: NDArray[np.bool_] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """Precompute the index tables; on the CPU the arrays of `episodes` are shared, not copied.

        `horizon` is H, `obs_horizon` is To. `weight` `(F,)` is an optional importance of each frame, copied to the
        batches. With `lookahead_steps` > 0, batches contain `next_obs`, that many steps after each observation. `part`
        selects the rows of each minibatch, for distributed training. Chunks consist of the frames `learned` `(F,)`;
        histories also contain others. The dataset is copied to `device` if it fits, and batches are then gathered there
        without a wait.
        """
        if min(horizon, obs_horizon, batch_size) < 1:
            raise UserError(
                f"horizon, obs_horizon and batch_size must be at least 1, got {horizon}, {obs_horizon}, {batch_size}."
            )
        if weight is not None and len(weight) != len(episodes):
            raise UserError(f"weight needs one number per frame ({len(episodes)}), got {len(weight)}.")
        self.batch_size, self._part = batch_size, part
        self.seed = seed
        frame, last = np.arange(len(episodes)), last_frames(episodes, learned)
        future, mask = chunk_index(last, horizon)
        size = sum(array.nbytes for array in episodes.arrays.values()) + future.nbytes * 2 + frame.nbytes * obs_horizon
        self._device = device if has_memory(device, size) else CPU
        self._obs = {key: self._tensor(episodes.arrays[key]) for key in episodes.observation_keys}
        self._action = self._tensor(episodes.arrays["action"])  # (F, A)
        self._executed = self._tensor(episodes.with_executed_actions().arrays["action"])  # (F, A)
        self._weight = None if weight is None else self._tensor(weight)
        self._history = self._tensor(history_index(episodes, obs_horizon))  # (F, To)
        self._future, self._mask = self._tensor(future), self._tensor(mask)  # (F, H)
        self._after: Tensor | None = None
        if lookahead_steps:
            self._after = self._tensor(np.minimum(frame + lookahead_steps, last))  # (F,)
            self._reached = self._tensor((frame + lookahead_steps <= last).astype(np.float32))  # (F,)
        self.frames = np.arange(len(episodes)) if learned is None else np.flatnonzero(learned)  # that start chunks
        self._epoch, self._position = 0, 0
        self._order = self._permutation(0)

    def __iter__(self) -> ChunkSampler:
        return self

    def __next__(self) -> ChunkBatch:
        """Draw the next minibatch, always full: it may span epochs."""
        parts: list[Tensor] = []
        missing = self.batch_size
        while missing:
            part = self._order[self._position : self._position + missing]
            parts.append(part)
            missing -= len(part)
            self._position += len(part)
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
        return self.take(torch.cat(parts)[self._part])

    def __len__(self) -> int:
        """Chunks per epoch (= frames that start them)."""
        return len(self._order)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    def take(self, frames: Tensor) -> ChunkBatch:
        """Return the chunks that start at the given frames `(B,)`."""
        frames = copy_to(frames, self._device)
        weight = None if self._weight is None else self._weight[frames]
        batch = ChunkBatch(self._histories(frames), self._action[self._future[frames]], self._mask[frames], weight)
        if self._after is None:
            return batch
        return replace(
            batch,
            next_obs=self._histories(self._after[frames]),
            next_obs_valid=self._reached[frames],
            executed=self._executed[self._future[frames]],
        )

    def _histories(self, frames: Tensor) -> dict[str, Tensor]:
        history = self._history[frames]
        return {key: value[history] for key, value in self._obs.items()}

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream, as plain integers."""
        return {"seed": self.seed, "frames": len(self), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, on the same dataset."""
        if state["frames"] != len(self):
            raise UserError(
                f"The saved sampler belongs to a dataset of {state['frames']} frames, this one has {len(self)}; "
                "resume with the dataset the run was started with."
            )
        self.seed, self._epoch, self._position = int(state["seed"]), int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> Tensor:
        order = torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(self.frames))
        return copy_to(order, self._device)

    def _tensor(self, array: np.ndarray) -> Tensor:
        """Share memory where possible; floats become float32."""
        if np.issubdtype(array.dtype, np.floating):
            array = array.astype(np.float32, copy=False)
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self._device)
