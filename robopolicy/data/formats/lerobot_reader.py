"""LeRobot's format behind the interface of the readers of foreign datasets, for conversions from it."""

from __future__ import annotations

from pathlib import Path

from robopolicy.data.episodes import Array, Episodes
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.data.formats.lerobot.layout import key_of
from robopolicy.data.formats.lerobot.reader import DatasetFiles
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.reader import DatasetReader
from robopolicy.data.formats.stored_facts import EpisodeInfo

RATE_ORIGIN = "fps of meta/info.json"


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
    reader = EpisodesReader("lerobot", read_lerobot(path), RATE_ORIGIN)
    features = DatasetFiles.open(path).features.items()
    videos = [key_of(name, camera=True) for name, feature in features if feature["dtype"] == "video"]
    reader.notes = tuple(f"{key}: the frames of its videos were decoded" for key in videos)
    return reader
