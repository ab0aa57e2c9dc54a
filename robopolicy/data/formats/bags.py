"""Recordings of ROS as episodes: rosbag 1, rosbag 2 and MCAP, and recordings of `deploy`, which need no mapping.

A mapping names the topic of each key. A recording is one episode, unless a topic states when episodes are in progress
or pauses separate them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from robopolicy.data.episodes import Array
from robopolicy.data.formats.bag_files import BagFile, RepairedMcap, recordings
from robopolicy.data.formats.bag_messages import encoded_image, field_value, image
from robopolicy.data.formats.bag_recordings import is_deployment, joints_of_deployment, mapping_of_deployment
from robopolicy.data.formats.bag_streams import (
    NANO,
    FrameSet,
    Stream,
    StreamId,
    TimedStream,
    cut_at_old_messages,
    frame_times,
)
from robopolicy.data.formats.foreign import foreign_errors
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.data.formats.reader import RATE_HINT, DatasetReader
from robopolicy.data.formats.stored_facts import EpisodeInfo
from robopolicy.errors import UserError

WHOLE = (0, 2**63 - 1)  # [ns] a span without limits


class BagReader(DatasetReader):
    """Reader of one recording, or of a folder of recordings with the same topics."""

    format = "rosbag"

    def __init__(self, path: Path, mapping: DatasetMapping) -> None:
        self.keys, self.notes = {}, ()
        self._bags: list[BagFile | RepairedMcap] = []
        self._frames: list[tuple[int, FrameSet]] = []  # recording and frames of each episode
        self._streams: list[dict[StreamId, TimedStream]] = []  # of each recording
        self._ages: dict[str, list[Array]] = {}
        try:
            with foreign_errors(path):
                self._open(path, mapping)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, mapping: DatasetMapping) -> None:
        episodes: list[EpisodeInfo] = []
        self._features: Mapping[str, FeatureMapping] = mapping.features
        for index, each in enumerate(recordings(path)):
            with foreign_errors(each):
                bag = self._open_bag(each, mapping)
                if not mapping.features and is_deployment(bag):
                    mapping = mapping_of_deployment(bag, mapping)
                    self._features = mapping.features
                    self.names = joints_of_deployment(bag)
                parts = self._split(bag, mapping)
            self._frames += [(index, part) for part in parts]
            episodes += [EpisodeInfo(f"{number} of {each.name}", len(part.times)) for number, part in enumerate(parts)]
        self.episodes = episodes
        self.others = tuple(dict.fromkeys(topic for bag in self._bags for topic in bag.topics))
        if self._features and not episodes:
            raise UserError(f"It has no frames at which all messages are at most {mapping.max_age:g} s old.")
        self.rate, self.rate_origin = mapping.rate, "the recorded steps of the safety filter"
        self._note_ages(mapping)

    @property
    def features(self) -> Mapping[str, FeatureMapping]:
        """Topics of the mapping, or of a recording of `deploy`."""
        return self._features

    def close(self) -> None:
        """Close the recordings."""
        for bag in self._bags:
            bag.close()

    def read(self, episode: int, name: str, feature: FeatureMapping) -> Array | list[bytes]:
        """Read the values of a topic at the frames of an episode."""
        index, frames = self._frames[episode]
        id = StreamId.of(name, feature)
        timed = self._streams[index][id]
        newest = frames.newest[id]
        return self._images(self._bags[index], timed, newest) if timed.stream.is_image else timed.values(newest)

    def _open_bag(self, path: Path, mapping: DatasetMapping) -> BagFile | RepairedMcap:
        if mapping.repair and path.suffix == ".mcap":
            bag: BagFile | RepairedMcap = RepairedMcap(path)
            self.notes = (*self.notes, bag.note)
        else:
            bag = BagFile(path, mapping.definitions)
        self._bags.append(bag)
        return bag

    def _split(self, bag: BagFile | RepairedMcap, mapping: DatasetMapping) -> list[FrameSet]:
        """Read the numbers of a recording, and divide it into episodes."""
        ids = [StreamId.of(topic, each) for each in mapping.features.values() for topic in each.source]
        if not ids:
            self._streams.append({})
            return []
        if not mapping.rate:
            raise UserError(f"A recording has no rate of its own; {RATE_HINT}.")
        marker = mapping.episodes
        for topic in [*(id.topic for id in ids), *filter(None, (marker.source,))]:
            if topic not in bag.topics:
                raise UserError(f"It has no topic {topic}; it has {', '.join(bag.topics)}.")
        streams = {id: Stream(id, bag.topics[id.topic]) for id in dict.fromkeys(ids)}
        marks: list[tuple[int, bool]] = []
        for message in bag.messages([*(id.topic for id in ids), marker.source]):
            if message.topic == marker.source:
                running = field_value(message.content, message.kind, marker.field) == marker.equals
                marks.append((message.received, bool(running)))
            for id, stream in streams.items():
                if id.topic == message.topic:
                    stream.add(message)
        timed = {id: TimedStream.of(stream, mapping.clock) for id, stream in streams.items()}
        self._streams.append(timed)
        self._note_names(mapping, timed)
        spans = _spans(marks) if marker.source else [WHOLE]
        if mapping.gap:
            spans = [part for span in spans for part in _without_gaps(span, list(timed.values()), mapping.gap)]
        parts: list[FrameSet] = []
        for span in spans:
            times = frame_times(list(timed.values()), mapping.rate, span, mapping.frames)
            found, ages = cut_at_old_messages(list(timed.values()), times, mapping.max_age)
            parts += found
            for topic, age in ages.items():
                self._ages.setdefault(topic, []).append(age)
        return parts

    def _images(self, bag: BagFile | RepairedMcap, timed: TimedStream, newest: Array) -> Array | list[bytes]:
        """Images of messages by their index in time; PNG and JPEG bytes if they keep their size."""
        arrived = timed.order[newest]
        received = timed.stream.received
        first, last = int(arrived.min()), int(arrived.max())
        position = int(np.searchsorted(received, received[first], side="left"))
        id, needed = timed.stream.id, set(arrived.tolist())
        found: dict[int, Array | bytes] = {}
        for message in bag.messages([id.topic], received[first], received[last] + 1):
            if position in needed:
                encoded = None if id.size else encoded_image(message.content, message.kind)
                found[position] = image(message.content, message.kind, id.size) if encoded is None else encoded
            position += 1
        if missing := needed - set(found):
            raise UserError(f"Message {min(missing)} of {id.topic} is missing.")
        pictures = [found[index] for index in arrived.tolist()]
        kept = [each for each in pictures if isinstance(each, bytes)]
        return (
            kept if len(kept) == len(pictures) else np.stack([each for each in pictures if not isinstance(each, bytes)])
        )

    def _note_names(self, mapping: DatasetMapping, timed: Mapping[StreamId, TimedStream]) -> None:
        """Keep the names of joints, and require the same ones in all recordings."""
        for key, feature in mapping.features.items():
            names = [timed[StreamId.of(topic, feature)].stream.names for topic in feature.source]
            if len(names) != 1 or not names[0]:
                continue
            if self.names.get(key, names[0]) != names[0]:
                raise UserError(f"'{key}' has joints {', '.join(names[0])} here, and other ones in other recordings.")
            self.names = {**self.names, key: names[0]}

    def _note_ages(self, mapping: DatasetMapping) -> None:
        for topic, parts in self._ages.items():
            ages = np.concatenate(parts)
            if len(ages):
                late, cut = float(np.quantile(ages, 0.95)), int((ages > mapping.max_age).sum())
                text = f"{topic}: age at a frame {1e3 * late:.0f} ms (p95), {1e3 * float(ages.max()):.0f} ms at most"
                self.notes = (*self.notes, text + (f", {cut} frames older than max_age" if cut else ""))


def _spans(marks: Sequence[tuple[int, bool]]) -> list[tuple[int, int]]:
    """Spans [ns] during which the newest mark is true."""
    spans: list[tuple[int, int]] = []
    begin: int | None = None
    for time, running in marks:
        if running and begin is None:
            begin = time
        elif not running and begin is not None:
            spans.append((begin, time - 1))
            begin = None
    return spans if begin is None else [*spans, (begin, WHOLE[1])]


def _without_gaps(span: tuple[int, int], streams: Sequence[TimedStream], gap: float) -> list[tuple[int, int]]:
    """Parts of a span between pauses of all streams that are longer than `gap` [s]."""
    times = np.sort(np.concatenate([each.times for each in streams]))
    times = times[(times >= span[0]) & (times <= span[1])]
    breaks = np.flatnonzero(np.diff(times) > gap * NANO)
    starts, ends = [*times[:1], *times[breaks + 1]], [*times[breaks], *times[-1:]]
    return [(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
