"""Episodes that arrive while they are shown."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.playback import Playback

MAX_EPISODES = 8  # newest episodes that are kept
MAX_FRAMES = 1000  # frames of an episode; it continues as another one, so that memory is bounded on a robot


@dataclass
class _Episode:
    label: str
    frames: list[EpisodeFrame] = field(default_factory=list[EpisodeFrame])
    complete: bool = False


class LiveEpisodes:
    """The newest episodes of a running program, numbered from 0; `add` may be called in another thread.

    Args:
        title: Name of what runs.
        control_dt: Time between two frames [s].
    """

    num_episodes = None
    max_steps = 0  # the time bar ends at the newest frame

    def __init__(self, title: str, control_dt: float) -> None:
        self.title, self.control_dt = title, control_dt
        self.names: Mapping[str, tuple[str, ...]] = {}
        self.newest = -1  # number of the newest episode
        self._episodes: OrderedDict[int, _Episode] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def oldest(self) -> int:
        """Number of the oldest episode that is kept."""
        with self._lock:
            return next(iter(self._episodes))

    def add(self, label: str, frame: EpisodeFrame) -> None:
        """Add a frame of the episode `label`, which starts if the last frame had another label."""
        with self._lock:
            last = self._episodes.get(self.newest)
            if last is None or last.label != label or len(last.frames) >= MAX_FRAMES:
                if last is not None:
                    last.complete = True
                self.newest += 1
                self._episodes[self.newest] = last = _Episode(label)
                if len(self._episodes) > MAX_EPISODES:
                    self._episodes.popitem(last=False)
            last.frames.append(frame)

    def end(self) -> None:
        """Note that no frames follow."""
        with self._lock:
            if self.newest >= 0:
                self._episodes[self.newest].complete = True

    def known(self, episode: int) -> tuple[list[EpisodeFrame], bool]:
        """Return the frames so far of an episode that is kept, and whether it is complete."""
        with self._lock:
            found = self._episodes[episode]
            return found.frames, found.complete

    def label(self, episode: int) -> str:
        """Name of an episode, such as its seed."""
        with self._lock:
            return self._episodes[episode].label if episode in self._episodes else ""

    def frames(self, episode: int) -> Iterator[EpisodeFrame]:
        """Yield the frames so far."""
        yield from self.known(episode)[0]

    def note(self) -> str:
        """Return nothing."""
        return ""

    def close(self) -> None:
        """Do nothing, since there is no simulator."""


class LivePlayback(Playback):
    """Playback of `LiveEpisodes` that shows the newest frame while it follows, until the user goes back in time."""

    def __init__(self, source: LiveEpisodes) -> None:
        self._live = source
        super().__init__(source)
        self.follows = True

    def open(self, episode: int) -> None:
        """Show an episode from its start, or the nearest one that is kept, and stop following."""
        self.follows = False
        super().open(min(max(episode, self._live.oldest), self._live.newest))

    def seek(self, seconds: float) -> None:
        """Go to a time in the episode [s] and stop following."""
        self.follows = False
        super().seek(seconds)

    def advance(self, seconds: float) -> None:
        """Show the newest frame, or let time pass [s] if the user has paused or gone back."""
        if not (self.follows and self.playing):
            super().advance(seconds)
            return
        if self.episode != self._live.newest:
            super().open(self._live.newest)
        self._read_until(0)
        super().seek((len(self.frames) - 1) * self.source.control_dt)

    def _read_until(self, index: int) -> None:
        if self._live.oldest <= self.episode:  # else all frames are known already
            self.frames, self.complete = self._live.known(self.episode)
