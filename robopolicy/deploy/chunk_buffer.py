"""Buffer of action chunks that arrive with delay; a chunk is placed at the time of its observation.

A chunk observed at `t` with step `dt` holds the action of the tick at `now` in row `floor((now - t) / dt)`; what its
inference time is skipped and not executed late. If several chunks have an action for the tick, the *blending* decides:

replace   the chunk of the newest observation
hold      the current chunk until it ends; then the newest
ensemble  the mean of all, weighted by exp(-0.01 i), the oldest being i = 0 (ACT, arXiv 2304.13705); unsuited to
          multimodal policies
rtc       the newest, whose first actions are the ones committed at its request (real-time chunking, arXiv
          2506.07339): the policy continues them, so that the motion is continuous

Chunks may come late, twice or out of order. Times are of one monotonic clock [s]; H chunk length, A action dimensions.
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

DECAY = 0.01  # decay of the ensemble weights from one chunk to the next newer one, as in ACT
_TOLERANCE = 1e-6  # steps by which a tick may be early through rounding


@dataclass(frozen=True)
class TimedChunk:
    """A chunk with the time of its observation."""

    observed: float  # [s] when its observation was taken
    actions: NDArray[np.float64]  # (H, A)


@dataclass(frozen=True)
class ChunkRow:
    """A chunk and its row for the tick."""

    chunk: TimedChunk
    row: int

    @property
    def action(self) -> NDArray[np.float64]:
        """`(A,)`."""
        return self.chunk.actions[self.row]


Blending = Callable[[list[ChunkRow], TimedChunk | None], tuple[NDArray[np.float64], TimedChunk]]
"""(chunks with a row for the tick, oldest first; previous chunk) -> (action, current chunk)."""


def _newest(held: list[ChunkRow], _: TimedChunk | None) -> tuple[NDArray[np.float64], TimedChunk]:
    return held[-1].action.copy(), held[-1].chunk


def _to_the_end(held: list[ChunkRow], playing: TimedChunk | None) -> tuple[NDArray[np.float64], TimedChunk]:
    same = [one for one in held if one.chunk is playing]
    return _newest(same or held, playing)


def _ensemble(held: list[ChunkRow], _: TimedChunk | None) -> tuple[NDArray[np.float64], TimedChunk]:
    weights = np.exp(-DECAY * np.arange(len(held)))
    return weights @ np.stack([one.action for one in held]) / weights.sum(), held[-1].chunk


BLENDINGS: dict[str, Blending] = {"replace": _newest, "hold": _to_the_end, "ensemble": _ensemble, "rtc": _newest}


class ChunkBuffer:
    """Chunks that have arrived and not ended, and the action for a tick."""

    def __init__(self, dt: float, action_dim: int, blending: str = "replace") -> None:
        """Start empty.

        Args:
            dt: Time between two actions of a chunk [s].
            action_dim: A.
            blending: One of `BLENDINGS`.

        Raises:
            UserError: The blending is unknown, or `dt` is not positive.
        """
        if blending not in BLENDINGS:
            raise unknown_name("chunk blending", blending, BLENDINGS)
        if not 0 < dt < math.inf:
            raise UserError(f"The time between two actions of a chunk must be positive, got {dt:g} s.")
        self.dt, self.action_dim, self.blending = dt, action_dim, blending
        self._chunks: list[TimedChunk] = []  # by time of observation
        self._playing: TimedChunk | None = None
        self._commitment: tuple[float, NDArray[np.float64]] | None = None  # of the last requested chunk

    def put(self, chunk: NDArray[Any], observed: float) -> None:
        """Add a chunk `(H, A)` for the observation at time `observed`; a duplicate is ignored.

        Raises:
            UserError: It has another shape, or holds a number that is not finite; the buffer is as before.
        """
        given = np.asarray(chunk)
        if given.ndim != 2 or not len(given) or given.shape[1] != self.action_dim or given.dtype.kind not in "fiu":
            raise UserError(f"Expected numbers of shape (H, {self.action_dim}), found {given.dtype} {given.shape}.")
        actions = np.array(given, np.float64)
        if not (np.isfinite(actions).all() and math.isfinite(observed)):
            raise UserError("A chunk contains a number that is not finite; it is discarded.")
        if any(timed.observed == observed for timed in self._chunks):
            return
        if self._commitment is not None and self._commitment[0] == observed:
            prefix = self._commitment[1][: len(actions)]
            actions[: len(prefix)] = prefix
        bisect.insort(self._chunks, TimedChunk(observed, actions), key=lambda timed: timed.observed)

    def action(self, now: float) -> NDArray[np.float64] | None:
        """Return the action `(A,)` for the tick at `now`; None without a chunk for it.

        Expired chunks are dropped. Chunks observed more than a step after `now` are dropped too, since the clock jumped
        back and they would become active much later.
        """
        self._chunks = [timed for timed in self._chunks if -1 <= self._row(timed, now) < len(timed.actions)]
        action, self._playing = self._choose(now)
        return action

    def remaining(self, now: float) -> float:
        """Seconds from `now` with actions in the buffer; 0 without any."""
        ends = [timed.observed + len(timed.actions) * self.dt for timed in self._chunks if self._row(timed, now) >= -1]
        return max(0.0, max(ends, default=now) - now)

    def due(self, now: float, action_horizon: int) -> bool:
        """Whether to request a chunk: `action_horizon` actions of the newest have passed, or there is none."""
        return not self._chunks or self._row(self._chunks[-1], now) >= action_horizon or not self.remaining(now)

    def committed(self, now: float, delay: int) -> NDArray[np.float64]:
        """Return the actions `(d, A)` that will be executed from `now` until a chunk observed then can arrive.

        Blending `rtc` enforces them: the chunk added with `observed = now` starts with them, independent of its
        policy. The steps of two chunks may be shifted, so each action is sampled half a step after its beginning.

        Args:
            now: Time of the observation for the next chunk.
            delay: Steps until that chunk arrives, see `delay_steps`; the result is shorter if the buffer has fewer.
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
        self._chunks, self._playing, self._commitment = [], None, None

    def _choose(self, now: float) -> tuple[NDArray[np.float64] | None, TimedChunk | None]:
        rows = [(timed, self._row(timed, now)) for timed in self._chunks]
        held = [ChunkRow(timed, max(row, 0)) for timed, row in rows if -1 <= row < len(timed.actions)]
        return BLENDINGS[self.blending](held, self._playing) if held else (None, None)

    def _row(self, timed: TimedChunk, now: float) -> int:
        return math.floor((now - timed.observed) / self.dt + _TOLERANCE)


def delay_steps(latency: float, dt: float) -> int:
    """Steps during inference of a chunk: ceil(latency / dt), for a p95 latency [s]."""
    return max(math.ceil(latency / dt - _TOLERANCE), 0)


def check_delay(delay: int, action_horizon: int, horizon: int) -> None:
    """Check that chunks are long enough to cover their own inference.

    One chunk at a time is computed, so at least `delay` actions of each are executed; the next one arrives `delay`
    steps after `action_horizon`, and the chunk must last until then.

    Raises:
        UserError: Not delay <= action_horizon <= horizon - delay.
    """
    if not delay <= action_horizon <= horizon - delay:
        raise UserError(
            f"A chunk of {horizon} actions, {action_horizon} of them used, cannot cover an inference of "
            f"{delay} steps; that "
            f"needs {delay} <= action_horizon <= {horizon - delay}: execute more of it, use longer chunks, or a "
            f"faster policy."
        )
