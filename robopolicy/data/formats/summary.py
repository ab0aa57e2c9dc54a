"""Summary of a conversion between dataset formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.data.episodes import Episode


class ConversionSummary:
    """Counts and ranges of the episodes that pass through a conversion."""

    def __init__(self) -> None:
        self._episodes = self._frames = 0
        self._ranges: dict[str, dict[str, Any]] = {}

    def observe(self, episodes: Iterable[Episode]) -> Iterator[Episode]:
        """Yield all episodes and note their shapes, types and ranges."""
        for episode in episodes:
            self._episodes, self._frames = self._episodes + 1, self._frames + len(episode)
            for key, array in episode.arrays.items():
                entry = {"shape": list(array.shape[1:]), "type": array.dtype.name}
                if array.ndim == 2:
                    entry |= {"minimum": array.min(0), "maximum": array.max(0)}
                else:
                    entry |= {"minimum": array.min(), "maximum": array.max()}
                if (before := self._ranges.get(key)) is not None and before["shape"] == entry["shape"]:
                    entry["minimum"] = np.minimum(before["minimum"], entry["minimum"])
                    entry["maximum"] = np.maximum(before["maximum"], entry["maximum"])
                self._ranges[key] = entry
            yield episode

    def facts(self, origin: Mapping[str, Any], format: str, destination: Path) -> dict[str, Any]:
        """What was read and written, as plain values; `origin` are the facts of `OpenDataset.origin`."""
        ranges = {
            key: {**entry, **{end: np.asarray(entry[end]).tolist() for end in ("minimum", "maximum")}}
            for key, entry in self._ranges.items()
        }
        return {
            **origin,
            "destination": str(destination),
            "destination_format": format,
            "episodes": self._episodes,
            "frames": self._frames,
            "features": ranges,
        }
