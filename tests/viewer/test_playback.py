"""Tests of playback: time, lazy reading, the ends of episodes, and going back in time."""

from collections.abc import Iterator

import numpy as np
import pytest

from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.playback import HOLD_SECONDS, Playback


class Count:
    """Episodes of 5 frames with reward 1 each, 0.1 s apart; `read` counts the frames that were read."""

    title, control_dt, max_steps, names = "count", 0.1, 9, {}

    def __init__(self, num_episodes: int | None = None) -> None:
        self.num_episodes, self.read = num_episodes, 0

    def label(self, episode: int) -> str:
        return f"seed {episode}"

    def note(self) -> str:
        return ""

    def frames(self, episode: int) -> Iterator[EpisodeFrame]:
        for step in range(5):
            self.read += 1
            yield EpisodeFrame(
                None, {}, {"step": np.array([step], np.float32)}, reward=float(step > 0), success=step == 4
            )

    def close(self) -> None:
        pass


def test_frames_are_read_when_they_are_due() -> None:
    playback = Playback(source := Count())
    assert (playback.index, source.read, playback.length) == (0, 1, 10)  # at most 9 steps
    playback.advance(0.25)
    assert (playback.index, source.read, playback.total_reward, playback.success) == (2, 3, 2.0, False)


def test_the_end_is_held_before_the_next_episode() -> None:
    playback = Playback(Count())
    playback.advance(0.5)
    assert playback.at_end and playback.success and playback.length == 5 and playback.episode == 0
    playback.advance(HOLD_SECONDS)
    assert (playback.episode, playback.index) == (1, 0)


def test_episodes_repeat_on_request() -> None:
    playback = Playback(Count())
    playback.repeats = True
    playback.advance(0.5)
    playback.advance(HOLD_SECONDS)
    assert (playback.episode, playback.index) == (0, 0)


def test_a_pause_stops_time_and_seeking_goes_back_without_reading_again() -> None:
    playback = Playback(source := Count())
    playback.advance(0.35)
    playback.playing = False
    playback.advance(10.0)
    assert playback.index == 3
    playback.seek(0.1)
    playback.advance(0.0)
    assert (playback.index, source.read) == (1, 4)
    playback.seek(99.0)  # beyond the end
    playback.advance(0.0)
    assert playback.at_end and playback.index == 4


def test_speed_scales_time() -> None:
    playback = Playback(Count())
    playback.speed = 0.5
    playback.advance(0.4)
    assert playback.index == 2


@pytest.mark.parametrize("asked, shown", [(2, 0), (-1, 1), (1, 1)])
def test_numbers_of_datasets_wrap_around(asked: int, shown: int) -> None:
    playback = Playback(Count(num_episodes=2))
    playback.open(asked)
    assert playback.episode == shown
