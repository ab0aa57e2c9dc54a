"""What to play now, from chunks that arrive late: every chunk is laid on the time axis where its observation was taken.

A chunk observed at `t` with step `dt` holds the action of the tick at `now` in row `floor((now - t) / dt)`; what its
inference cost is skipped, never played late. Where several chunks hold an action for the tick, a *join* decides:

replace   the chunk of the newest observation
hold      the chunk being played, until it ends; then the newest
ensemble  the mean of all, weighted by exp(-0.01 i), the oldest being i = 0 (ACT, arXiv 2304.13705); bad for policies
          that choose between several ways
rtc       the newest, whose first actions are those that were committed when it was asked for (real-time chunking, arXiv
          2506.07339): the policy has to continue them, so that nothing jumps when it arrives

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

DECAY = 0.01  # of the ensemble's weights from one chunk to the next younger one, as in ACT
_TOLERANCE = 1e-6  # steps by which a tick may come early through rounding alone


@dataclass(frozen=True)
class Laid:
    """A chunk on the time axis."""

    observed: float  # [s] when its observation was taken
    actions: NDArray[np.float64]  # (H, A)


@dataclass(frozen=True)
class Held:
    """A chunk that has an action for the tick, and the row it is in."""

    chunk: Laid
    row: int

    @property
    def action(self) -> NDArray[np.float64]:
        """`(A,)`."""
        return self.chunk.actions[self.row]


Join = Callable[[list[Held], Laid | None], tuple[NDArray[np.float64], Laid]]
"""From the chunks that hold the tick, oldest first, and the one played last: the action and the chunk played now."""


def _newest(held: list[Held], _: Laid | None) -> tuple[NDArray[np.float64], Laid]:
    return held[-1].action.copy(), held[-1].chunk


def _to_the_end(held: list[Held], playing: Laid | None) -> tuple[NDArray[np.float64], Laid]:
    same = [one for one in held if one.chunk is playing]
    return _newest(same or held, playing)


def _ensemble(held: list[Held], _: Laid | None) -> tuple[NDArray[np.float64], Laid]:
    weights = np.exp(-DECAY * np.arange(len(held)))
    return weights @ np.stack([one.action for one in held]) / weights.sum(), held[-1].chunk


JOINS: dict[str, Join] = {"replace": _newest, "hold": _to_the_end, "ensemble": _ensemble, "rtc": _newest}


class ChunkBuffer:
    """The chunks that have arrived and are not over."""

    def __init__(self, dt: float, action_dim: int, join: str = "replace") -> None:
        """Start empty.

        Args:
            dt: Time between two actions of a chunk [s].
            action_dim: A.
            join: One of `JOINS`.

        Raises:
            UserError: There is no such join, or `dt` is not positive.
        """
        if join not in JOINS:
            raise unknown_name("join", join, JOINS)
        if not 0 < dt < math.inf:
            raise UserError(f"A chunk needs a positive time between its actions, got {dt:g} s.")
        self.dt, self.action_dim, self.join = dt, action_dim, join
        self._chunks: list[Laid] = []  # by time of observation
        self._playing: Laid | None = None
        self._commitment: tuple[float, NDArray[np.float64]] | None = None  # of the chunk that was asked for last

    def put(self, chunk: NDArray[Any], observed: float) -> None:
        """Add a chunk `(H, A)` computed from what was observed at `observed`; one that is there already is ignored.

        Raises:
            UserError: It has another shape, or holds a number that is not finite; the buffer is as before.
        """
        given = np.asarray(chunk)
        if given.ndim != 2 or not len(given) or given.shape[1] != self.action_dim or given.dtype.kind not in "fiu":
            raise UserError(f"Expected numbers of shape (H, {self.action_dim}), found {given.dtype} {given.shape}.")
        actions = np.array(given, np.float64)
        if not (np.isfinite(actions).all() and math.isfinite(observed)):
            raise UserError("A chunk holds a number that is not finite; nothing of it is played.")
        if any(laid.observed == observed for laid in self._chunks):
            return
        if self._commitment is not None and self._commitment[0] == observed:
            prefix = self._commitment[1][: len(actions)]
            actions[: len(prefix)] = prefix
        bisect.insort(self._chunks, Laid(observed, actions), key=lambda laid: laid.observed)

    def action(self, now: float) -> NDArray[np.float64] | None:
        """The action `(A,)` of the tick at `now`; None where no chunk holds one.

        Chunks that are over are forgotten. So are those observed more than a step after `now`: the clock has jumped
        back, and they would come to life again much later.
        """
        self._chunks = [laid for laid in self._chunks if -1 <= self._row(laid, now) < len(laid.actions)]
        action, self._playing = self._choose(now)
        return action

    def remaining(self, now: float) -> float:
        """Seconds from `now` for which there are actions; 0 where there are none."""
        ends = [laid.observed + len(laid.actions) * self.dt for laid in self._chunks if self._row(laid, now) >= -1]
        return max(0.0, max(ends, default=now) - now)

    def due(self, now: float, execute: int) -> bool:
        """Whether the next chunk should be asked for: `execute` actions of the newest are over, or there is none."""
        return not self._chunks or self._row(self._chunks[-1], now) >= execute or not self.remaining(now)

    def committed(self, now: float, delay: int) -> NDArray[np.float64]:
        """The actions `(d, A)` that will be played from `now` on before a chunk observed then can arrive.

        A join `rtc` keeps its word: the chunk put with `observed = now` starts with them, whatever its policy made of
        them. The two chunks may tick at different moments, so each action is the one half a step after its beginning.

        Args:
            now: When the observation is taken that the next chunk comes from.
            delay: Steps until that chunk arrives, see `delay_steps`; fewer come back where the buffer holds fewer.
        """
        actions: list[NDArray[np.float64]] = []
        for step in range(delay):
            action, _ = self._choose(now + (step + 0.5) * self.dt)
            if action is None:
                break
            actions.append(action)
        prefix = np.array(actions).reshape(-1, self.action_dim)
        if self.join == "rtc":
            self._commitment = now, prefix
        return prefix.copy()

    def clear(self) -> None:
        """Forget everything, e.g. when a new episode begins."""
        self._chunks, self._playing, self._commitment = [], None, None

    def _choose(self, now: float) -> tuple[NDArray[np.float64] | None, Laid | None]:
        rows = [(laid, self._row(laid, now)) for laid in self._chunks]
        held = [Held(laid, max(row, 0)) for laid, row in rows if -1 <= row < len(laid.actions)]
        return JOINS[self.join](held, self._playing) if held else (None, None)

    def _row(self, laid: Laid, now: float) -> int:
        return math.floor((now - laid.observed) / self.dt + _TOLERANCE)


def delay_steps(latency: float, dt: float) -> int:
    """Steps that pass while a chunk is computed: ceil(latency / dt), for a latency [s] seldom exceeded (p95)."""
    return max(math.ceil(latency / dt - _TOLERANCE), 0)


def check_delay(delay: int, execute: int, horizon: int) -> None:
    """Refuse chunks that cannot cover their own inference.

    One chunk at a time is computed, so at least `delay` actions are played of each; the next one arrives `delay` steps
    after `execute`, and until then there have to be actions left.

    Raises:
        UserError: Not delay <= execute <= horizon - delay.
    """
    if not delay <= execute <= horizon - delay:
        raise UserError(
            f"A chunk of {horizon} actions, {execute} of them played, cannot cover an inference of {delay} steps; that "
            f"needs {delay} <= execute <= {horizon - delay}: play more of it, use longer chunks, or a faster policy."
        )
