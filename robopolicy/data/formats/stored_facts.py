"""Facts of episodes that foreign formats do not store, as one JSON object next to their arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from robopolicy.data.episodes import Array, Episode, is_image
from robopolicy.data.formats.foreign import find_number, find_text
from robopolicy.errors import UserError
from robopolicy.spec import IMAGE_PREFIX

NAME = "robopolicy"  # of the attribute or entry that holds them


@dataclass(frozen=True)
class EpisodeInfo:
    """Description of one episode of a foreign dataset."""

    name: str  # for messages, e.g. demo_3
    length: int  # T, actions
    task: str = ""  # registered task id, or an instruction
    seed: int = -1  # -1 where unknown
    behaviour: str = ""  # empty if unknown


@dataclass(frozen=True)
class StoredFacts:
    """Facts of `Episodes` that foreign formats do not store; our writers add them as one JSON object."""

    control_dt: float = 0.0  # [s] 0 if unknown
    tasks: tuple[str, ...] = ()  # (E,)
    seeds: tuple[int, ...] = ()  # (E,)
    behaviours: tuple[str, ...] = ()  # (E,)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # of entries, by key
    action_type: str = ""  # absolute | delta; empty if unknown

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        names = {key: list(entries) for key, entries in self.names.items()}
        lists = {name: list(getattr(self, name)) for name in ("tasks", "seeds", "behaviours")}
        return {"control_dt": self.control_dt, **lists, "names": names, "action_type": self.action_type}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], episodes: int) -> StoredFacts:
        """Read what fits a dataset of so many episodes, and leave out the rest, which any program may have written."""

        def entries(name: str, kind: type) -> tuple[Any, ...]:
            found = data.get(name)
            fits = isinstance(found, list) and len(found) == episodes and all(type(each) is kind for each in found)
            return tuple(found) if fits else ()  # type: ignore[arg-type]

        names = data.get("names")
        pairs = names.items() if isinstance(names, Mapping) else ()
        kept = {str(key): tuple(map(str, found)) for key, found in pairs if isinstance(found, list)}
        seeds = tuple(seed for seed in entries("seeds", int) if -1 <= seed < 2**63)
        lists = {"tasks": entries("tasks", str), "behaviours": entries("behaviours", str)}
        seeds = seeds if len(seeds) == episodes else ()
        kind = find_text(data, "action_type")
        kind = kind if kind in ("absolute", "delta") else ""
        return cls(find_number(data, "control_dt"), **lists, seeds=seeds, names=kept, action_type=kind)

    def info(self, index: int, name: str, length: int, task: str = "", seed: int = -1) -> EpisodeInfo:
        """Describe an episode; `task` and `seed` apply if none are stored."""
        return EpisodeInfo(
            name,
            length,
            self.tasks[index] if self.tasks else task,
            self.seeds[index] if self.seeds else seed,
            self.behaviours[index] if self.behaviours else "",
        )


class FactsOfEpisodes:
    """Collects the facts of episodes that a writer passes through, without their arrays."""

    def __init__(self, control_dt: float, names: Mapping[str, Sequence[str]], action_type: str = "") -> None:
        self.control_dt, self._action_type = control_dt, action_type
        self._names = {key: tuple(entries) for key, entries in names.items()}
        self._rows: list[tuple[str, int, str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, episode: Episode) -> None:
        """Add the facts of one episode."""
        self._rows.append((episode.task, episode.seed, episode.behaviour))

    def to_json(self) -> str:
        """JSON text of all facts; raises a `UserError` without episodes."""
        if not self._rows:
            raise UserError("No episode was read, so nothing was written.")
        tasks, seeds, behaviours = (tuple(column) for column in zip(*self._rows, strict=True))
        facts = StoredFacts(self.control_dt, tasks, seeds, behaviours, self._names, self._action_type)
        return json.dumps(facts.to_dict())


def with_distinct_names(episodes: Iterable[Episode]) -> Iterator[Episode]:
    """Yield episodes whose keys keep different names without the prefix of images, as foreign formats store them.

    Raises:
        UserError: Two keys have the same name.
    """
    for episode in episodes:
        stored: dict[str, str] = {}
        for key in episode.arrays:
            other = stored.setdefault(key.removeprefix(IMAGE_PREFIX), key)
            if other != key:
                raise UserError(f"This format stores '{other}' and '{key}' under one name; drop or rename one of them.")
        yield episode


def stored_images(key: str, array: Array) -> Array:
    """Images `(T, 3, height, width)` as other formats store them, `(T, height, width, 3)`; other arrays as they are."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if is_image(key) else array
