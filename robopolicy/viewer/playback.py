"""Playback of episodes: which frame is due, and the frames known so far."""

from __future__ import annotations

import time
from collections.abc import Iterator

from robopolicy.viewer.frames import EpisodeFrame, EpisodeSource

AHEAD_SECONDS = 0.03  # [s] longest time that `advance` spends on frames that are not known yet
HOLD_SECONDS = 1.0  # [s] for which the last frame of an episode is shown before the next one


class Playback:
    """Position in the episodes of a source.

    Frames are read when they are due, and kept until the next episode, so that a user can go back in time.
    """

    def __init__(self, source: EpisodeSource) -> None:
        self.source = source
        self.playing = True
        self.speed = 1.0  # relative to real time
        self.repeats = False  # whether an episode is followed by itself
        self.open(0)

    def open(self, episode: int) -> None:
        """Show an episode from its start; numbers beyond the last one start again at 0."""
        count = self.source.num_episodes
        self.episode = max(episode, 0) if count is None else episode % count
        self.frames: list[EpisodeFrame] = []
        self.complete = False  # whether all frames are known
        self._time, self._held = 0.0, 0.0  # [s] in the episode, and at its end
        self._unread: Iterator[EpisodeFrame] = self.source.frames(self.episode)
        self._read_until(0)

    @property
    def index(self) -> int:
        """Number of the current frame."""
        return min(int(self._time / self.source.control_dt + 1e-6), len(self.frames) - 1)

    @property
    def frame(self) -> EpisodeFrame:
        """Current frame."""
        return self.frames[self.index]

    @property
    def length(self) -> int:
        """Number of frames, or an upper bound while they are not all known."""
        return len(self.frames) if self.complete else max(self.source.max_steps + 1, len(self.frames) + 1)

    @property
    def total_reward(self) -> float:
        """Sum of the rewards up to the current frame."""
        return sum(frame.reward for frame in self.frames[: self.index + 1])

    @property
    def success(self) -> bool | None:
        """Whether any step up to the current frame succeeded; None where the task defines no success."""
        known = [frame.success for frame in self.frames[: self.index + 1] if frame.success is not None]
        return any(known) if known else None

    @property
    def at_end(self) -> bool:
        """Whether the current frame is the last one."""
        return self.complete and self.index == len(self.frames) - 1

    def seek(self, seconds: float) -> None:
        """Go to a time in the episode [s]; frames up to it are read by the following calls of `advance`."""
        self._time, self._held = max(seconds, 0.0), 0.0

    def advance(self, seconds: float) -> None:
        """Let time pass [s] and read the frames that are due."""
        if self.playing:
            self._time += self.speed * seconds
        wanted = int(self._time / self.source.control_dt + 1e-6)
        self._read_until(wanted)
        if wanted >= len(self.frames):  # not known yet, or beyond the end
            self._time = (len(self.frames) - 1) * self.source.control_dt
        if self.playing and self.at_end:
            self._held += seconds
            if self._held >= HOLD_SECONDS:
                self.open(self.episode if self.repeats else self.episode + 1)

    def _read_until(self, index: int) -> None:
        deadline = time.monotonic() + AHEAD_SECONDS
        while not self.complete and (not self.frames or len(self.frames) <= index):
            frame = next(self._unread, None)
            if frame is None:
                self.complete = True
            else:
                self.frames.append(frame)
            if time.monotonic() > deadline and self.frames:
                return
