"""Coordinate frames of ROS: `/tf` for moving frames, `/tf_static` for fixed ones.

    frames = FrameBuffer()
    frames.add(message, static=False)                      # of a subscription
    position, rotation = frames.lookup("base", "camera")   # of the camera in the base, at the newest common time

    publisher = FramePublisher(transport)
    publisher.fix([transform("base", "camera", position, rotation, 0.0)])
    publisher.move([transform("world", "base", position, rotation, stamp)])

Rotations are quaternions (w, x, y, z), as in MuJoCo; messages have w last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy_robots.message import Message
from robopolicy_robots.messages import Header, Quaternion, Time, Vector3
from robopolicy_robots.transports.base import LATCHED, QoS, Transport

Numbers = NDArray[np.float64]
Placement = tuple[Numbers, Numbers]  # position (3,) [m] and quaternion (4,)
MOVING, FIXED = "/tf", "/tf_static"
FRAMES = QoS(offers_reliable=True, requests_reliable=True, depth=100)  # of /tf; /tf_static is LATCHED
KEPT = 100  # moving transforms per frame
UNIT = 1e-3  # largest difference of the norm of a quaternion from 1


@dataclass(frozen=True, eq=False)
class Transform(Message):
    """Position and rotation of a frame in its parent."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Transform"
    translation: Vector3 = field(default_factory=Vector3)
    rotation: Quaternion = field(default_factory=Quaternion)


@dataclass(frozen=True, eq=False)
class TransformStamped(Message):
    """Transform of the frame `child_frame_id` in the frame of the header."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/TransformStamped"
    header: Header = field(default_factory=Header)
    child_frame_id: str = ""
    transform: Transform = field(default_factory=Transform)


@dataclass(frozen=True, eq=False)
class TFMessage(Message):
    """Transforms of some frames."""

    ros_name: ClassVar[str] = "tf2_msgs/msg/TFMessage"
    transforms: tuple[TransformStamped, ...] = ()


def transform(parent: str, child: str, position: Numbers, rotation: Numbers, stamp: float) -> TransformStamped:
    """Message for a frame at `position` `(3,)` [m] and `rotation` `(4,)` at time `stamp` [s since the epoch].

    Raises:
        ValueError: A name is empty or begins with "/", both are equal, or the numbers are not finite or no rotation.
    """
    w, x, y, z = (float(each) for each in rotation)
    placed = Transform(Vector3(*(float(each) for each in position)), Quaternion(x, y, z, w))
    message = TransformStamped(Header(Time.from_seconds(stamp), parent), child, placed)
    if reason := _invalid(message):
        raise ValueError(f"Frame '{child}' in '{parent}' {reason}.")
    return message


class FramePublisher:
    """Publisher of frames; all fixed frames are one message, which late subscribers receive."""

    def __init__(self, transport: Transport) -> None:
        self._moving = transport.advertise(MOVING, TFMessage, FRAMES)
        self._fixed = transport.advertise(FIXED, TFMessage, LATCHED)
        self._known: dict[str, TransformStamped] = {}

    def fix(self, transforms: Iterable[TransformStamped]) -> None:
        """Publish fixed frames together with the earlier ones."""
        self._known |= {each.child_frame_id: each for each in transforms}
        self._fixed.publish(TFMessage(tuple(self._known.values())))

    def move(self, transforms: Iterable[TransformStamped]) -> None:
        """Publish moving frames."""
        self._moving.publish(TFMessage(tuple(transforms)))


@dataclass
class _Frame:
    parent: str
    static: bool
    stamps: deque[float]
    placements: deque[Placement]

    def at(self, stamp: float) -> Placement:
        """Placement at a time, interpolated between neighbours; a fixed frame has one placement."""
        after = bisect_right(self.stamps, stamp)
        if self.static or after == 0 or after == len(self.stamps):
            return self.placements[min(max(after - 1, 0), len(self.placements) - 1)]
        start, end = self.stamps[after - 1], self.stamps[after]
        share = (stamp - start) / (end - start)
        (p0, q0), (p1, q1) = self.placements[after - 1], self.placements[after]
        return p0 + share * (p1 - p0), _slerp(q0, q1, share)


class FrameBuffer:
    """Received frames, each with one parent."""

    def __init__(self) -> None:
        self.rejected: dict[str, int] = {}  # number of ignored transforms by reason
        self._frames: dict[str, _Frame] = {}

    def add(self, message: TFMessage, *, static: bool) -> None:
        """Add the transforms of a message; invalid ones are ignored and counted in `rejected`."""
        for each in message.transforms:
            if reason := _invalid(each) or self._add(each, static):
                self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def lookup(self, target: str, source: str) -> Placement:
        """Return the placement of the frame `source` in `target` at the newest time that all frames between have.

        Raises:
            ValueError: A frame is unknown, or no chain of frames connects the two.
        """
        up, down = self._chain(source), self._chain(target)
        if up[-1] != down[-1]:
            raise ValueError(f"No frames connect '{source}' in '{up[-1]}' and '{target}' in '{down[-1]}'.")
        shared = next(name for name in up if name in down)
        up, down = up[: up.index(shared)], down[: down.index(shared)]
        moving = [frame.stamps[-1] for name in (*up, *down) if not (frame := self._frames[name]).static]
        stamp = min(moving, default=0.0)
        return _compose(_inverse(self._along(down, stamp)), self._along(up, stamp))

    def _add(self, message: TransformStamped, static: bool) -> str:
        parent, child, stamp = message.header.frame_id, message.child_frame_id, message.header.stamp.seconds
        frame = self._frames.get(child)
        if frame is not None and frame.parent != parent:
            return "has two parents"
        if parent in self._frames and child in self._chain(parent):
            return "is its own ancestor"
        if frame is not None and not static and stamp < frame.stamps[-1]:
            return "is older than the last one"
        if frame is None or static:
            frame = self._frames[child] = _Frame(parent, static, deque(maxlen=KEPT), deque(maxlen=KEPT))
        place, turn = message.transform.translation, message.transform.rotation
        rotation = np.array([turn.w, turn.x, turn.y, turn.z])
        frame.stamps.append(stamp)
        frame.placements.append((np.array([place.x, place.y, place.z]), rotation / np.linalg.norm(rotation)))
        return ""

    def _chain(self, name: str) -> list[str]:
        """Return the frame and its ancestors."""
        chain = [name]
        while chain[-1] in self._frames:
            chain.append(self._frames[chain[-1]].parent)
        if len(chain) == 1 and not any(frame.parent == name for frame in self._frames.values()):
            raise ValueError(f"Unknown frame '{name}'; known are {', '.join(sorted(self._frames)) or 'none'}.")
        return chain

    def _along(self, names: list[str], stamp: float) -> Placement:
        """Placement of the first frame in the parent of the last."""
        placed: Placement = np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0])
        for name in names:
            placed = _compose(self._frames[name].at(stamp), placed)
        return placed


def _invalid(message: TransformStamped) -> str:
    """Reason why a transform is invalid; "" if it is valid."""
    names = message.header.frame_id, message.child_frame_id
    if not all(names) or any(name.startswith("/") for name in names) or names[0] == names[1]:
        return "has an empty name, one with a leading '/', or its own"
    place, turn = message.transform.translation, message.transform.rotation
    norm = float(np.linalg.norm([turn.w, turn.x, turn.y, turn.z]))
    if not np.isfinite([place.x, place.y, place.z]).all() or not abs(norm - 1) < UNIT:
        return "has numbers that are not finite, or no unit quaternion"
    return ""


def _compose(outer: Placement, inner: Placement) -> Placement:
    position, rotation = np.zeros(3), np.zeros(4)
    mujoco.mju_mulPose(position, rotation, *outer, *inner)
    return position, rotation


def _inverse(placed: Placement) -> Placement:
    position, rotation = np.zeros(3), np.zeros(4)
    mujoco.mju_negPose(position, rotation, *placed)
    return position, rotation


def _slerp(a: Numbers, b: Numbers, share: float) -> Numbers:
    cosine = float(a @ b)
    b, cosine = (b, cosine) if cosine >= 0 else (-b, -cosine)
    angle = np.arccos(min(cosine, 1.0))
    if angle < 1e-6:
        return a + share * (b - a)
    return (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)
