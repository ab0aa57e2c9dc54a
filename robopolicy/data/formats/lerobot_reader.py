"""LeRobot's format behind the interface of the readers of foreign datasets, for conversions from it."""

from __future__ import annotations

from pathlib import Path

from robopolicy.data.episodes import Array, Episodes
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.reader import DatasetReader
from robopolicy.data.formats.stored_facts import EpisodeInfo


class EpisodesReader(DatasetReader):
    """Reader of episodes in memory."""

    def __init__(self, format: str, episodes: Episodes, rate_origin: str) -> None:
        self.format, self._episodes = format, episodes
        self.keys = {key: key for key in episodes.arrays}
        self.names, self.action_type = episodes.names, episodes.action_type
        self.rate, self.rate_origin = 1 / episodes.control_dt, rate_origin
        parts = [episodes.episode(index) for index in range(episodes.num_episodes)]
        self.episodes = [
            EpisodeInfo(str(index), len(part), part.task, part.seed, part.behaviour) for index, part in enumerate(parts)
        ]

    def read(self, episode: int, name: str, feature: FeatureMapping) -> Array | list[bytes]:
        """Return the rows of an episode."""
        return self._episodes.episode(episode).arrays[name]


def open_lerobot(path: Path, mapping: DatasetMapping) -> EpisodesReader:
    """Open a LeRobotDataset, all of whose frames are read into memory."""
    return EpisodesReader("lerobot", read_lerobot(path), "fps of meta/info.json")
