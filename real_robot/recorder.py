"""Recording a run to MCAP (profile `ros2`), which ROS 2's own tools, Foxglove and rosbags open, and reading it again.

A run is recorded from outside: `RecordedTransport` notes every message that the loop takes or sends. Writing happens in
a thread of its own; the control loop only hands over.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from real_robot.codecs import cdr
from real_robot.codecs.definitions import message_type, prepare
from real_robot.message import Message
from real_robot.transports.base import Graph, M, Publisher, QoS, Received, Subscription, Transport
from robopolicy.errors import UserError, cannot_write
from robopolicy.extras import need

BACKLOG = 10_000  # messages that may wait to be written; more are counted and left out, the loop never waits
FLUSH = 1.0  # [s] after which what has been written can be read, should the process be killed
NANO = 10**9


@dataclass(frozen=True)
class Recorded:
    """One message of a recording."""

    topic: str
    message: Message
    time: float  # [s since the epoch] when it was noted


class Recorder:
    """Writes one file; a context manager that completes it.

    Args:
        path: The file; it is replaced.

    Raises:
        UserError: It cannot be written, or the package mcap is missing.
    """

    def __init__(self, path: Path) -> None:
        mcap = need("mcap.writer", "record")
        self.path = path
        self.left_out = 0  # messages that came faster than the disk takes them
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise cannot_write(path, error) from error
        self._writer: Any = mcap.Writer(self._file)
        self._writer.start(profile="ros2", library="robopolicy")
        self._channels: dict[tuple[str, str], int] = {}
        self._failure: Exception | None = None
        self._queue: queue.Queue[tuple[str, Message, int] | None] = queue.Queue(BACKLOG)
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def write(self, topic: str, message: Message) -> None:
        """Note a message; never waits."""
        try:
            self._queue.put_nowait((topic, message, time.time_ns()))
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Complete the file; may be called twice.

        Raises:
            UserError: It could not be written in full.
        """
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if not self._file.closed:
            try:
                self._writer.finish()
                self._file.close()
            except OSError as error:
                self._failure = self._failure or error
        if self._failure is not None:
            raise cannot_write(self.path, self._failure) from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> None:
        flushed = time.monotonic()
        while (entry := self._queue.get()) is not None:
            topic, message, moment = entry
            try:
                channel = self._channel(topic, type(message))
                self._writer.add_message(channel, moment, cdr.encode(message), moment)
                if time.monotonic() - flushed > FLUSH:
                    self._writer.flush()
                    flushed = time.monotonic()
            except (OSError, ValueError) as error:  # the robot goes on; `close` tells
                self._failure = self._failure or error

    def _channel(self, topic: str, kind: type[Message]) -> int:
        key = (topic, kind.ros_name)
        if key not in self._channels:
            text = prepare(kind).generate_msgdef(kind.ros_name, ros_version=2)[0]
            schema = self._writer.register_schema(name=kind.ros_name, encoding="ros2msg", data=text.encode())
            self._channels[key] = self._writer.register_channel(topic, "cdr", schema)
        return self._channels[key]


def read(path: Path) -> Iterator[Recorded]:
    """Messages of a recording in the order of their times.

    Raises:
        UserError: The file is no recording.
    """
    reader, exceptions = need("mcap.reader", "record"), need("mcap.exceptions", "record")
    try:
        with path.open("rb") as file:
            for schema, channel, message in reader.make_reader(file).iter_messages():
                decoded = cdr.decode(message_type(schema.name), message.data)
                yield Recorded(channel.topic, decoded, message.log_time / NANO)
    except (OSError, ValueError, struct.error, exceptions.McapError) as error:
        raise UserError(f"{path} cannot be read as a recording: {error}.") from error


class _RecordedPublisher(Publisher[M]):
    def __init__(self, publisher: Publisher[M], topic: str, recorder: Recorder) -> None:
        self._publisher, self._topic, self._recorder = publisher, topic, recorder

    def publish(self, message: M) -> None:
        """Send and note."""
        self._publisher.publish(message)
        self._recorder.write(self._topic, message)

    @property
    def matched(self) -> int:
        """Subscriptions at the other end."""
        return self._publisher.matched


class _RecordedSubscription(Subscription[M]):
    def __init__(self, subscription: Subscription[M], topic: str, recorder: Recorder) -> None:
        self._subscription, self._topic, self._recorder = subscription, topic, recorder
        self._noted = 0

    def latest(self) -> Received[M] | None:
        """The newest message, noted when it is seen for the first time."""
        received = self._subscription.latest()
        if received is not None and received.sequence != self._noted:
            self._noted = received.sequence
            self._recorder.write(self._topic, received.message)
        return received

    @property
    def publishers(self) -> int:
        """Publishers at the other end."""
        return self._subscription.publishers

    @property
    def malformed(self) -> int:
        """Messages that could not be read."""
        return self._subscription.malformed


class RecordedTransport(Transport):
    """Another transport, all of whose messages are noted."""

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder

    def advertise(self, topic: str, kind: type[M], qos: QoS) -> Publisher[M]:
        """As the transport within."""
        return _RecordedPublisher(self._transport.advertise(topic, kind, qos), topic, self._recorder)

    def subscribe(self, topic: str, kind: type[M], qos: QoS) -> Subscription[M]:
        """As the transport within."""
        return _RecordedSubscription(self._transport.subscribe(topic, kind, qos), topic, self._recorder)

    def graph(self) -> Graph:
        """As the transport within."""
        return self._transport.graph()

    def close(self) -> None:
        """Close the transport within; the recorder stays open."""
        self._transport.close()
