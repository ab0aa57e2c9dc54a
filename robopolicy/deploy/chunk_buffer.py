"""Buffer of action chunks that arrive with delay; a chunk is placed at the time of its observation.

For a chunk observed at `t` with step `dt`, row `floor((now - t) / dt)` is the action of the tick at `now`, so actions
due during inference are skipped. If several chunks have an action for the tick, the *blending* selects:

replace   the chunk of the newest observation
hold      the current chunk until it ends, then the newest
ensemble  the mean of all, weighted by exp(-0.01 i), with i = 0 for the oldest (ACT, arXiv 2304.13705); not suited to
          multimodal policies
rtc       the newest, which starts with the actions committed at its request and continues them (real-time chunking,
          arXiv 2506.07339)

Chunks may arrive late, twice or out of order. Times are monotonic [s]; H chunk length, A action dimensions.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError, unknown_name

DECAY = 0.01  # decay of the ensemble weights per chunk, as in ACT
_TOLERANCE = 1e-6  # rounding tolerance of ticks, in steps


@dataclass(frozen=True)
class TimedChunk:
    """A chunk with the time of its observation."""

    observed: float  # [s] time of the observation
    actions: NDArray[np.float64]  # (H, A)


@dataclass(frozen=True)
class ChunkRow:
    """A chunk and its row for the tick."""

    chunk: TimedChunk
    row: int

    @property
    def action(self) -> NDArray[np.float64]:
        """Action `(A,)`."""
        return self.chunk.actions[self.row]


Blending = Callable[[list[ChunkRow], TimedChunk | None], tuple[NDArray[np.float64], TimedChunk]]
"""(chunks with a row for the tick, oldest first; previous chunk) -> (action, current chunk)."""


def _newest(rows: list[ChunkRow], _: TimedChunk | None) -> tuple[NDArray[np.float64], TimedChunk]:
    return rows[-1].action.copy(), rows[-1].chunk


def _hold(rows: list[ChunkRow], current: TimedChunk | None) -> tuple[NDArray[np.float64], TimedChunk]:
    return _newest([row for row in rows if row.chunk is current] or rows, current)


def _ensemble(rows: list[ChunkRow], _: TimedChunk | None) -> tuple[NDArray[np.float64], TimedChunk]:
    weights = np.exp(-DECAY * np.arange(len(rows)))
    return weights @ np.stack([row.action for row in rows]) / weights.sum(), rows[-1].chunk


BLENDINGS: dict[str, Blending] = {"replace": _newest, "hold": _hold, "ensemble": _ensemble, "rtc": _newest}


class ChunkBuffer:
    """Buffer of the received chunks that have not ended."""

    def __init__(self, dt: float, action_dim: int, blending: str = "replace") -> None:
        """Create an empty buffer.

        Args:
            dt: Time between two actions of a chunk [s].
            action_dim: Number of action dimensions A.
            blending: One of `BLENDINGS`.

        Raises:
            UserError: The blending is unknown, or `dt` is not positive.
        """
        if blending not in BLENDINGS:
            raise unknown_name("chunk blending", blending, BLENDINGS)
        if not 0 < dt < math.inf:
            raise UserError(f"The time between two actions of a chunk must be positive, got {dt:g} s.")
        self.dt, self.action_dim, self.blending = dt, action_dim, blending
        self._chunks: list[TimedChunk] = []  # sorted by time of observation
        self._current: TimedChunk | None = None
        self._commitment: tuple[float, NDArray[np.float64]] | None = (
            None  # committed actions of the last requested chunk
        )

    def put(self, chunk: NDArray[Any], observed: float) -> None:
        """Add a chunk `(H, A)` for the observation at time `observed`; a duplicate is ignored.

        Raises:
            UserError: The chunk has another shape or a non-finite number; the buffer is unchanged.
        """
        given = np.asarray(chunk)
        if given.ndim != 2 or not len(given) or given.shape[1] != self.action_dim or given.dtype.kind not in "fiu":
            raise UserError(f"Expected numbers of shape (H, {self.action_dim}), found {given.dtype} {given.shape}.")
        actions = np.array(given, np.float64)
        if not (np.isfinite(actions).all() and math.isfinite(observed)):
            raise UserError("The chunk contains a non-finite number; it is discarded.")
        if any(timed.observed == observed for timed in self._chunks):
            return
        if self._commitment is not None and self._commitment[0] == observed:
            prefix = self._commitment[1][: len(actions)]
            actions[: len(prefix)] = prefix
        bisect.insort(self._chunks, TimedChunk(observed, actions), key=lambda timed: timed.observed)

    def action(self, now: float) -> NDArray[np.float64] | None:
        """Return the action `(A,)` for the tick at `now`; None without a chunk for it.

        Expired chunks are dropped, and chunks observed more than a step after `now`, since the clock has jumped back.
        """
        self._chunks = [timed for timed in self._chunks if -1 <= self._row(timed, now) < len(timed.actions)]
        action, self._current = self._choose(now)
        return action

    def remaining(self, now: float) -> float:
        """Seconds from `now` with actions in the buffer; 0 without any."""
        ends = [timed.observed + len(timed.actions) * self.dt for timed in self._chunks if self._row(timed, now) >= -1]
        return max(0.0, max(ends, default=now) - now)

    def upcoming(self, now: float) -> NDArray[np.float64] | None:
        """Return the actions `(H, A)` of the newest chunk from `now` on, or None."""
        if not self._chunks:
            return None
        newest = self._chunks[-1]
        return newest.actions[max(self._row(newest, now), 0) :]

    def due(self, now: float, action_horizon: int) -> bool:
        """Whether to request a chunk: `action_horizon` actions of the newest have passed, or no actions remain."""
        return not self._chunks or self._row(self._chunks[-1], now) >= action_horizon or not self.remaining(now)

    def committed(self, now: float, delay: int) -> NDArray[np.float64]:
        """Return the actions `(d, A)` that will be executed from `now` until a chunk observed then can arrive.

        With blending `rtc`, the chunk added with `observed = now` starts with them, independent of the policy. The
        steps of two chunks may be shifted, so each action is sampled half a step after its beginning.

        Args:
            now: Time of the observation for the next chunk.
            delay: Steps until that chunk arrives (see `delay_steps`); the result is shorter if the buffer ends earlier.
        """
        actions: list[NDArray[np.float64]] = []
        for step in range(delay):
            action, _ = self._choose(now + (step + 0.5) * self.dt)
            if action is None:
                break
            actions.append(action)
        prefix = np.array(actions).reshape(-1, self.action_dim)
        if self.blending == "rtc":
            self._commitment = now, prefix
        return prefix.copy()

    def clear(self) -> None:
        """Remove all chunks, e.g. for a new episode."""
        self._chunks, self._current, self._commitment = [], None, None

    def _choose(self, now: float) -> tuple[NDArray[np.float64] | None, TimedChunk | None]:
        all_rows = [(timed, self._row(timed, now)) for timed in self._chunks]
        rows = [ChunkRow(timed, max(row, 0)) for timed, row in all_rows if -1 <= row < len(timed.actions)]
        return BLENDINGS[self.blending](rows, self._current) if rows else (None, None)

    def _row(self, timed: TimedChunk, now: float) -> int:
        return math.floor((now - timed.observed) / self.dt + _TOLERANCE)


def delay_steps(latency: float, dt: float) -> int:
    """Number of steps during inference: ceil(latency / dt), for a p95 latency [s]."""
    return max(math.ceil(latency / dt - _TOLERANCE), 0)


def check_delay(delay: int, action_horizon: int, horizon: int) -> None:
    """Check that chunks are long enough to cover their inference.

    One chunk is computed at a time, so at least `delay` actions of each are executed. The next chunk arrives `delay`
    steps after `action_horizon`, so the chunk must last until then.

    Raises:
        UserError: Not delay <= action_horizon <= horizon - delay.
    """
    if not delay <= action_horizon <= horizon - delay:
        raise UserError(
            f"Chunks of {horizon} actions with action horizon {action_horizon} cannot cover an inference of {delay} "
            f"steps, which needs {delay} <= action_horizon <= {horizon - delay}: use longer chunks or a faster policy."
        )
