"""Tests of coordinate frames: chains, common times, rules of tf2, and late subscribers."""

import math
from typing import Any

import numpy as np
import pytest
from random_messages import random_message

from robopolicy_robots.tf import (
    FIXED,
    FRAMES,
    MOVING,
    FrameBuffer,
    FramePublisher,
    TFMessage,
    TransformStamped,
    transform,
)
from robopolicy_robots.transports.base import LATCHED
from robopolicy_robots.transports.loopback import LoopbackTransport

IDENTITY = np.array([1.0, 0, 0, 0])


def turned(angle: float) -> np.ndarray:
    """A rotation about z."""
    return np.array([math.cos(angle / 2), 0, 0, math.sin(angle / 2)])


def frame(parent: str, child: str, x: float, angle: float = 0.0, stamp: float = 1.0) -> TransformStamped:
    return transform(parent, child, np.array([x, 0, 0]), turned(angle), stamp)


def buffer(*moving: TransformStamped, fixed: tuple[TransformStamped, ...] = ()) -> FrameBuffer:
    frames = FrameBuffer()
    frames.add(TFMessage(fixed), static=True)
    for each in moving:
        frames.add(TFMessage((each,)), static=False)
    return frames


def test_a_chain_is_composed_in_both_directions() -> None:
    frames = buffer(
        frame("world", "base", 1, math.pi / 2), fixed=(frame("base", "camera", 2), frame("base", "tool", 5))
    )
    position, rotation = frames.lookup("world", "camera")
    np.testing.assert_allclose(position, [1, 2, 0], atol=1e-12)
    np.testing.assert_allclose(rotation, turned(math.pi / 2), atol=1e-12)
    np.testing.assert_allclose(frames.lookup("camera", "tool")[0], [3, 0, 0], atol=1e-12)
    np.testing.assert_allclose(frames.lookup("camera", "world")[0], [-2, 1, 0], atol=1e-12)
    np.testing.assert_array_equal(frames.lookup("tool", "tool")[0], np.zeros(3))


def test_the_newest_common_time_is_interpolated() -> None:
    frames = buffer(
        frame("world", "base", 0, 0, 1.0), frame("world", "base", 2, math.pi / 2, 3.0), frame("base", "tool", 0, 0, 2.0)
    )
    position, rotation = frames.lookup("world", "tool")  # the tool was seen last at 2 s
    np.testing.assert_allclose(position, [1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(rotation, turned(math.pi / 4), atol=1e-12)


def test_invalid_transforms_are_counted_and_ignored() -> None:
    frames = buffer(frame("world", "base", 1, stamp=2.0))
    bad = TransformStamped(child_frame_id="x")
    for message in (bad, frame("other", "base", 9), frame("world", "base", 9, stamp=1.0), frame("base", "world", 9)):
        frames.add(TFMessage((message,)), static=False)
    assert sorted(frames.rejected) == [
        "has an empty name, one with a leading '/', or its own",
        "has two parents",
        "is its own ancestor",
        "is older than the last one",
    ]
    np.testing.assert_array_equal(frames.lookup("world", "base")[0], [1, 0, 0])


@pytest.mark.parametrize(
    ("names", "numbers"),
    [(("", "a"), IDENTITY), (("/w", "a"), IDENTITY), (("a", "a"), IDENTITY), (("w", "a"), 2 * IDENTITY)],
)
def test_invalid_transforms_are_not_published(names: tuple[str, str], numbers: np.ndarray) -> None:
    with pytest.raises(ValueError, match="Frame 'a' in"):
        transform(*names, np.zeros(3), numbers, 0.0)


def test_unknown_and_separate_frames_are_named() -> None:
    frames = buffer(frame("world", "base", 1), frame("moon", "rover", 1))
    with pytest.raises(ValueError, match="Unknown frame 'arm'; known are base, rover"):
        frames.lookup("world", "arm")
    with pytest.raises(ValueError, match="No frames connect 'rover' in 'moon' and 'base' in 'world'"):
        frames.lookup("base", "rover")


def test_late_subscribers_receive_all_fixed_frames() -> None:
    with LoopbackTransport() as transport_:
        publisher = FramePublisher(transport_)
        moving = transport_.subscribe(MOVING, TFMessage, FRAMES)
        publisher.fix([frame("base", "camera", 1)])
        publisher.fix([frame("base", "lidar", 2)])
        publisher.move([frame("world", "base", 3)])
        late = transport_.subscribe(FIXED, TFMessage, LATCHED)
        newest: Any = late.latest()
        assert [each.child_frame_id for each in newest.message.transforms] == ["camera", "lidar"]
        assert moving.latest().message.transforms[0].child_frame_id == "base"  # type: ignore[union-attr]


def test_messages_have_the_bytes_and_hash_of_ros() -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="needs robopolicy[ros]")
    from test_codecs import as_rosbags

    from robopolicy_robots.codecs import cdr
    from robopolicy_robots.codecs.definitions import type_hash

    message = random_message(TFMessage, np.random.default_rng(0))
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    data = cdr.encode(message)
    assert data == bytes(store.serialize_cdr(as_rosbags(message, store), TFMessage.ros_name))
    assert cdr.decode(TFMessage, data) == message
    known = "RIHS01_e369d0f05a23ae52508854b66f6aa0437f3449d652e8cbf22d5abe85d020f087"  # of a real system
    assert type_hash(TFMessage) == known
