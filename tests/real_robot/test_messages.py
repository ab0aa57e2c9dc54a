"""Tests of messages: ROS field names, equality by content, arrays of one type."""

import math

import numpy as np
import pytest

from robopolicy_robots import messages
from robopolicy_robots.message import CATALOGUE, field_names
from robopolicy_robots.messages import Duration, Header, Image, Imu, JointState, JointTrajectory, Quaternion, Time


def test_every_type_is_found_by_its_ros_name() -> None:
    kinds = [kind for kind in vars(messages).values() if getattr(kind, "ros_name", None)]
    assert len(kinds) >= 28
    for kind in kinds:
        package, middle, name = kind.ros_name.split("/")
        assert CATALOGUE[kind.ros_name] is kind and middle == "msg" and name == kind.__name__ and package.islower()
        assert kind() == kind() == kind().copy()


def test_lists_become_arrays_and_tuples() -> None:
    state = JointState(Header(), ["a", "b"], [1, 2], np.float32([0, 1]))  # type: ignore[arg-type]
    assert state.name == ("a", "b") and state.position.dtype == state.velocity.dtype == np.float64
    np.testing.assert_array_equal(state.velocity, [0, 1])
    assert state.effort.shape == (0,)


def test_fixed_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Imu\.orientation_covariance must contain 9 numbers, found 3"):
        Imu(orientation_covariance=np.zeros(3))


def test_equality_is_by_content() -> None:
    assert JointState(position=np.array([1, np.nan])) == JointState(position=np.array([1, np.nan]))
    assert JointState(position=np.array([1.0])) != JointState(position=np.array([2.0]))
    assert Quaternion(x=math.nan) == Quaternion(x=math.nan) != Quaternion()
    assert Time(1, 2) != Duration(1, 2) and JointTrajectory() != JointState()


def test_a_copy_shares_nothing() -> None:
    state = JointState(position=np.zeros(2))
    copy = state.copy()
    state.position[0] = 1
    assert copy.position[0] == 0


@pytest.mark.parametrize("seconds", [0.0, 1.25, 1.7e9 + 0.5, -0.25, 3 - 1e-10])
def test_seconds_round_trip(seconds: float) -> None:
    stamp = Time.from_seconds(seconds)
    assert 0 <= stamp.nanosec < 10**9
    assert stamp.seconds == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(("encoding", "channels"), [("rgb8", 3), ("bgra8", 4), ("mono8", 1)])
def test_pixels_round_trip(encoding: str, channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, channels), np.uint8)
    image = Image.from_pixels(pixels, Header(Time(1)), encoding)
    assert (image.height, image.width, image.step) == (4, 5, 5 * channels)
    np.testing.assert_array_equal(image.pixels, pixels)
    padded = np.concatenate([pixels.reshape(4, -1), np.zeros((4, 3), np.uint8)], 1)
    image = Image(Header(), 4, 5, encoding, 0, padded.shape[1], padded)
    np.testing.assert_array_equal(image.pixels, pixels)


@pytest.mark.parametrize(
    "image",
    [
        Image(encoding="32FC1"),
        Image(Header(), 2, 2, "rgb8", 0, 6, np.zeros(11, np.uint8)),
        Image(Header(), 0, 4, "rgb8", 0, 12),
        Image(Header(), 4, 0, "rgb8"),
    ],
)
def test_images_with_invalid_pixels_are_refused(image: Image) -> None:
    with pytest.raises(ValueError, match="Expected an image in one of rgb8"):
        _ = image.pixels


def test_fields_are_in_the_order_of_the_definition() -> None:
    assert field_names(JointState) == ("header", "name", "position", "velocity", "effort")
