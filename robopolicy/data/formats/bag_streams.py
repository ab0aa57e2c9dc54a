"""Streams of values from the topics of a recording, and the frames at which they are read.

A frame holds the newest message of each topic that is not younger than the frame: what a policy would have had. Nothing
is interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from robopolicy.data.episodes import Array
from robopolicy.data.formats.bag_files import BagMessage
from robopolicy.data.formats.bag_messages import IMAGE_TYPES, TEXT_TYPE, joint_names, numbers, stamp_of
from robopolicy.data.formats.mapping import FeatureMapping
from robopolicy.errors import UserError

NANO = 10**9
MAX_OFFSET = 1.0  # [s] between the clocks of stamps and of the recording


@dataclass(frozen=True)
class StreamId:
    """What is read from a topic."""

    topic: str
    field: str
    names: tuple[str, ...]
    size: tuple[int, ...]
    hold: bool  # whether old messages count

    @classmethod
    def of(cls, topic: str, feature: FeatureMapping) -> StreamId:
        """Part of a feature that comes from one topic."""
        return cls(topic, feature.field, feature.names, feature.size, feature.hold)


@dataclass
class Stream:
    """Messages of one topic, of which one field is read."""

    id: StreamId
    kind: str  # ROS name of the type
    received: list[int] = field(default_factory=list)  # [ns] time of recording
    stamps: list[int] = field(default_factory=list)  # [ns] time of measurement, 0 if there is none
    values: list[Array] = field(default_factory=list)  # (D,) each; empty for images
    names: tuple[str, ...] = ()  # joints, in the order of the values

    @property
    def is_image(self) -> bool:
        """Whether the messages are images, which are decoded when they are needed."""
        return self.kind in IMAGE_TYPES

    def add(self, message: BagMessage) -> None:
        """Add a message; JSON texts without the field are left out."""
        if not self.is_image:
            names = self.id.names or self.names
            try:
                value = numbers(message.content, message.kind, self.id.field, names)
            except LookupError as error:
                if self.kind == TEXT_TYPE:
                    return
                text = f"A message of {self.id.topic} has no field '{self.id.field}', or fewer numbers."
                raise UserError(text) from error
            if self.values and value.shape != self.values[0].shape:
                raise UserError(f"Messages of {self.id.topic} have {len(self.values[0])} and {len(value)} numbers.")
            own = names or joint_names(message.content)  # later messages may have another order
            self.names = own if len(own) == len(value) else ()
            self.values.append(value)
        self.received.append(message.received)
        self.stamps.append(stamp_of(message.content))

    def times(self, clock: str) -> NDArray[np.int64]:
        """`(N,)` time of each message [ns]: its stamp, or the time of recording without one or by `clock`."""
        received, stamps = np.array(self.received, np.int64), np.array(self.stamps, np.int64)
        if clock == "receive" or not stamps.any():
            if clock == "stamp":
                raise UserError(f"Messages of {self.id.topic} have no stamps; set clock: receive.")
            return received
        if not stamps.all():
            raise UserError(f"Some messages of {self.id.topic} have no stamp; set clock: receive.")
        if not clock and abs(np.median(received - stamps)) > MAX_OFFSET * NANO:
            offset = float(np.median(received - stamps)) / NANO
            text = f"Stamps of {self.id.topic} differ from the time of recording by {offset:.3g} s"
            raise UserError(f"{text}, so there are two clocks; set clock: stamp or receive.")
        return stamps


@dataclass(frozen=True)
class TimedStream:
    """Stream in order of time."""

    stream: Stream
    times: NDArray[np.int64]  # (N,) [ns] rising
    order: NDArray[np.int64]  # (N,) index of each message in order of recording

    @classmethod
    def of(cls, stream: Stream, clock: str) -> TimedStream:
        """Sort a stream by time; raises a `UserError` if it is empty or its clock is unclear."""
        if not stream.received:
            raise UserError(f"{stream.id.topic} has no messages that can be read.")
        times = stream.times(clock)
        order = np.argsort(times, kind="stable")
        return cls(stream, times[order], order)

    def newest(self, grid: NDArray[np.int64]) -> NDArray[np.int64]:
        """`(F,)` index of the newest message at each time of the grid; -1 before the first one."""
        return np.searchsorted(self.times, grid, side="right") - 1

    def values(self, indices: NDArray[np.int64]) -> Array:
        """Values of messages by their index in time."""
        return np.stack([self.stream.values[index] for index in self.order[indices]])


@dataclass(frozen=True)
class FrameSet:
    """Frames of one episode: the time of each, and the message of each stream."""

    times: NDArray[np.int64]  # (F,) [ns]
    newest: dict[StreamId, NDArray[np.int64]]  # (F,) index in time


def frame_times(
    streams: Sequence[TimedStream], rate: float, span: tuple[int, int], topic: str = ""
) -> NDArray[np.int64]:
    """Times of the frames within a span [ns], from the first message of all streams to the last one of any.

    Args:
        streams: All streams that are read.
        rate: Frames per second.
        span: Begin and end [ns] of the part of the recording.
        topic: Topic each of whose messages is a frame; empty: equal distances.
    """
    begin = max(span[0], *(int(each.times[0]) for each in streams))
    if topic:
        clocked = next((each for each in streams if each.stream.id.topic == topic), None)
        if clocked is None:
            raise UserError(f"'frames' names {topic}, of which no feature is read.")
        return clocked.times[(clocked.times >= begin) & (clocked.times <= span[1])]
    lasting = [int(each.times[-1]) for each in streams if not each.stream.id.hold] or [span[1]]
    end = min(span[1], *lasting)
    count = int((end - begin) * rate / NANO + 1e-6) + 1 if end >= begin else 0
    return begin + np.round(np.arange(count) * (NANO / rate)).astype(np.int64)


def cut_at_old_messages(
    streams: Sequence[TimedStream], times: NDArray[np.int64], max_age: float
) -> tuple[list[FrameSet], dict[str, NDArray[np.float64]]]:
    """Split frames where a message is too old.

    Returns:
        Parts with at least one frame, and the ages `(F,)` [s] of the messages of each topic at all frames.
    """
    newest = {each.stream.id: each.newest(times) for each in streams}
    ages = {each.stream.id: (times - each.times[newest[each.stream.id]]) / NANO for each in streams}
    fresh = np.ones(len(times), np.bool_)
    for id, age in ages.items():
        fresh &= (newest[id] >= 0) & (id.hold | (age <= max_age))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], fresh, [False]]).astype(np.int8)))
    parts = [
        FrameSet(times[start:end], {id: indices[start:end] for id, indices in newest.items()})
        for start, end in edges.reshape(-1, 2)
    ]
    return parts, {id.topic: age for id, age in ages.items()}
