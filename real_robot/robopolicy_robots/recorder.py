"""Recordings of runs in MCAP (profile `ros2`), readable by ROS 2 tools, Foxglove and rosbags.

`RecordedTransport` records every message that the loop receives or sends. A separate thread writes the file; the
control loop only queues messages.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from robopolicy.errors import UserError, cannot_write
from robopolicy.optional import require
from robopolicy_robots.codecs import cdr
from robopolicy_robots.codecs.definitions import message_type, prepare
from robopolicy_robots.message import Message
from robopolicy_robots.messages import JointTrajectory
from robopolicy_robots.transports.actions import TrajectoryClient
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport
from robopolicy_robots.transports.wrapped import WrappedPublisher, WrappedSubscription, WrappedTransport

log = logging.getLogger(__name__)
QUEUE_SIZE = 10_000  # maximum number of queued messages; further messages are counted and dropped
FLUSH_PERIOD = 1.0  # [s] between flushes, so that most of a recording survives a kill
NANO = 10**9


@dataclass(frozen=True)
class Recorded:
    """Message of a recording."""

    topic: str
    message: Message
    time: float  # [s since the epoch] time of recording


class Recorder:
    """Writer of one MCAP file, and a context manager that completes it.

    Args:
        path: File, which is replaced.

    Raises:
        UserError: The file cannot be written, or the package mcap is missing.
    """

    def __init__(self, path: Path) -> None:
        mcap = require("mcap.writer", "record")
        self.path = path
        self.dropped = 0  # messages dropped because the queue was full
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise cannot_write(path, error) from error
        self._writer: Any = mcap.Writer(self._file)
        self._writer.start(profile="ros2", library="robopolicy")
        self._channels: dict[tuple[str, str], int] = {}
        self._failure: Exception | None = None
        self._queue: queue.Queue[tuple[str, Message, int] | None] = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def write(self, topic: str, message: Message) -> None:
        """Queue a message without waiting."""
        try:
            self._queue.put_nowait((topic, message, time.time_ns()))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Complete the file; raises `UserError` if it could not be written in full; safe to call twice."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if not self._file.closed:
            if self.dropped:
                log.warning("%s lacks %d messages, which arrived faster than the disk writes", self.path, self.dropped)
            try:
                self._writer.finish()
                self._file.close()
            except OSError as error:
                self._failure = self._failure or error
        if self._failure is not None:
            raise cannot_write(self.path, self._failure) from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self) -> None:
        flushed = time.monotonic()
        while (entry := self._queue.get()) is not None:
            topic, message, moment = entry
            try:
                channel = self._channel(topic, type(message))
                self._writer.add_message(channel, moment, cdr.encode(message), moment)
                if time.monotonic() - flushed > FLUSH_PERIOD:
                    self._writer.flush()
                    flushed = time.monotonic()
            except (OSError, ValueError) as error:  # the robot continues; `close` raises the error
                self._failure = self._failure or error

    def _channel(self, topic: str, kind: type[Message]) -> int:
        key = (topic, kind.ros_name)
        if key not in self._channels:
            text = prepare(kind).generate_msgdef(kind.ros_name, ros_version=2)[0]
            schema = self._writer.register_schema(name=kind.ros_name, encoding="ros2msg", data=text.encode())
            self._channels[key] = self._writer.register_channel(topic, "cdr", schema)
        return self._channels[key]


def read(path: Path) -> Iterator[Recorded]:
    """Read the messages of a recording in order of time; raises `UserError` for other files."""
    reader, exceptions = require("mcap.reader", "record"), require("mcap.exceptions", "record")
    try:
        with path.open("rb") as file:
            for schema, channel, message in reader.make_reader(file).iter_messages():
                decoded = cdr.decode(message_type(schema.name), message.data)
                yield Recorded(channel.topic, decoded, message.log_time / NANO)
    except (OSError, ValueError, struct.error, exceptions.McapError) as error:
        raise UserError(f"{path} cannot be read as a recording: {error}.") from error


class RecordedTransport(WrappedTransport):
    """Transport wrapper that records all messages; closing it does not close the recorder."""

    def __init__(self, inner: Transport, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> Publisher[M]:
        return _RecordedPublisher(self._inner.advertise(topic, kind, qos), self._recorder)

    def trajectory_client(self, action: str) -> TrajectoryClient:
        """Create a client whose goals are recorded."""
        return _RecordedTrajectoryClient(super().trajectory_client(action), self._recorder)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        return _RecordedSubscription(self._inner.subscribe(topic, kind, qos), self._recorder)


class _RecordedTrajectoryClient(TrajectoryClient):
    """Client through `inner` that records its goals as messages of the topic ACTION/goal."""

    def __init__(self, inner: TrajectoryClient, recorder: Recorder) -> None:
        self.action, self.merge_time = inner.action, inner.merge_time
        self._inner, self._recorder = inner, recorder

    @property
    def matched(self) -> int:
        return self._inner.matched

    @property
    def failure(self) -> str:
        return self._inner.failure

    def send(self, trajectory: JointTrajectory) -> None:
        self._inner.send(trajectory)
        self._recorder.write(f"{self.action}/goal", trajectory)

    def cancel(self) -> None:
        self._inner.cancel()

    def close(self) -> None:
        self._inner.close()


class _RecordedPublisher(WrappedPublisher[M]):
    def __init__(self, inner: Publisher[M], recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def _send(self, message: M) -> None:
        super()._send(message)
        self._recorder.write(self.topic, message)


class _RecordedSubscription(WrappedSubscription[M]):
    def __init__(self, inner: Subscription[M], recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def _arrived(self) -> list[Arrival]:
        arrived = super()._arrived()
        for arrival in arrived:
            self._recorder.write(self.topic, arrival.data)
        return arrived
