"""Messages of a robot, with the names of ROS 2.

Units are SI (m, rad, s, N, N m). Arrays are `float64`, or `uint8` for bytes. `CATALOGUE` maps ROS names to types;
`robopolicy_robots.codecs.register` adds types from the text of a `.msg` file.
"""

# ruff: noqa: RUF009  (`array` returns a field)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from robopolicy_robots.message import CATALOGUE as CATALOGUE
from robopolicy_robots.message import Message, array

Numbers = NDArray[np.float64]
Octets = NDArray[np.uint8]
NANO = 10**9
CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1}  # encodings with one byte per channel


@dataclass(frozen=True, eq=False)
class _Clock(Message):
    sec: int = 0
    nanosec: int = 0

    @classmethod
    def from_seconds(cls, seconds: float) -> Self:
        """Convert seconds, rounded to nanoseconds."""
        return cls(*divmod(round(seconds * NANO), NANO))

    @property
    def seconds(self) -> float:
        """Time in seconds."""
        return self.sec + self.nanosec / NANO


@dataclass(frozen=True, eq=False)
class Time(_Clock):
    """Time since the epoch in seconds and nanoseconds; zero means "not given"."""

    ros_name: ClassVar[str] = "builtin_interfaces/msg/Time"


@dataclass(frozen=True, eq=False)
class Duration(_Clock):
    """Duration in seconds and nanoseconds."""

    ros_name: ClassVar[str] = "builtin_interfaces/msg/Duration"


@dataclass(frozen=True, eq=False)
class Header(Message):
    """Time and frame of a measurement."""

    ros_name: ClassVar[str] = "std_msgs/msg/Header"
    stamp: Time = field(default_factory=Time)
    frame_id: str = ""


@dataclass(frozen=True, eq=False)
class Bool(Message):
    """Boolean, for instance the state of the emergency stop."""

    ros_name: ClassVar[str] = "std_msgs/msg/Bool"
    data: bool = False


@dataclass(frozen=True, eq=False)
class String(Message):
    """Text, for instance a status in JSON or a robot description."""

    ros_name: ClassVar[str] = "std_msgs/msg/String"
    data: str = ""


@dataclass(frozen=True, eq=False)
class Float64(Message):
    """One number, for instance the width of a gripper."""

    ros_name: ClassVar[str] = "std_msgs/msg/Float64"
    data: float = 0.0


@dataclass(frozen=True, eq=False)
class MultiArrayDimension(Message):
    """Axis of an array."""

    ros_name: ClassVar[str] = "std_msgs/msg/MultiArrayDimension"
    label: str = ""
    size: int = 0
    stride: int = 0


@dataclass(frozen=True, eq=False)
class MultiArrayLayout(Message):
    """Axes of an array."""

    ros_name: ClassVar[str] = "std_msgs/msg/MultiArrayLayout"
    dim: tuple[MultiArrayDimension, ...] = ()
    data_offset: int = 0


@dataclass(frozen=True, eq=False)
class Float64MultiArray(Message):
    """Array of numbers, for instance a command of forward_command_controller."""

    ros_name: ClassVar[str] = "std_msgs/msg/Float64MultiArray"
    layout: MultiArrayLayout = field(default_factory=MultiArrayLayout)
    data: Numbers = array()


@dataclass(frozen=True, eq=False)
class Vector3(Message):
    """Vector in space."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Vector3"
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclass(frozen=True, eq=False)
class Point(Message):
    """Position in space [m]."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Point"
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclass(frozen=True, eq=False)
class Quaternion(Message):
    """Rotation; MuJoCo has another order, with w first."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Quaternion"
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    w: float = 1.0


@dataclass(frozen=True, eq=False)
class Pose(Message):
    """Position and rotation."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Pose"
    position: Point = field(default_factory=Point)
    orientation: Quaternion = field(default_factory=Quaternion)


@dataclass(frozen=True, eq=False)
class PoseStamped(Message):
    """Pose with time and frame."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/PoseStamped"
    header: Header = field(default_factory=Header)
    pose: Pose = field(default_factory=Pose)


@dataclass(frozen=True, eq=False)
class PoseWithCovariance(Message):
    """Pose with covariance (6 x 6, row-major: x, y, z, rotations about x, y, z)."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/PoseWithCovariance"
    pose: Pose = field(default_factory=Pose)
    covariance: Numbers = array(size=36)


@dataclass(frozen=True, eq=False)
class Twist(Message):
    """Linear [m/s] and angular velocity [rad/s]."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Twist"
    linear: Vector3 = field(default_factory=Vector3)
    angular: Vector3 = field(default_factory=Vector3)


@dataclass(frozen=True, eq=False)
class TwistStamped(Message):
    """Twist with time and frame."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/TwistStamped"
    header: Header = field(default_factory=Header)
    twist: Twist = field(default_factory=Twist)


@dataclass(frozen=True, eq=False)
class TwistWithCovariance(Message):
    """Twist with covariance (6 x 6, row-major)."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/TwistWithCovariance"
    twist: Twist = field(default_factory=Twist)
    covariance: Numbers = array(size=36)


@dataclass(frozen=True, eq=False)
class Wrench(Message):
    """Force [N] and torque [N m]."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/Wrench"
    force: Vector3 = field(default_factory=Vector3)
    torque: Vector3 = field(default_factory=Vector3)


@dataclass(frozen=True, eq=False)
class WrenchStamped(Message):
    """Wrench with time and frame."""

    ros_name: ClassVar[str] = "geometry_msgs/msg/WrenchStamped"
    header: Header = field(default_factory=Header)
    wrench: Wrench = field(default_factory=Wrench)


@dataclass(frozen=True, eq=False)
class Odometry(Message):
    """Pose (in `header.frame_id`) and velocity (in `child_frame_id`) of a base."""

    ros_name: ClassVar[str] = "nav_msgs/msg/Odometry"
    header: Header = field(default_factory=Header)
    child_frame_id: str = ""
    pose: PoseWithCovariance = field(default_factory=PoseWithCovariance)
    twist: TwistWithCovariance = field(default_factory=TwistWithCovariance)


@dataclass(frozen=True, eq=False)
class JointState(Message):
    """State of joints by name; each array is empty or as long as `name`."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/JointState"
    header: Header = field(default_factory=Header)
    name: tuple[str, ...] = ()
    position: Numbers = array()
    velocity: Numbers = array()
    effort: Numbers = array()


@dataclass(frozen=True, eq=False)
class Joy(Message):
    """Axes in [-1, 1] and buttons (0 or 1) of a gamepad or joystick."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/Joy"
    header: Header = field(default_factory=Header)
    axes: NDArray[np.float32] = array(np.float32)
    buttons: NDArray[np.int32] = array(np.int32)


@dataclass(frozen=True, eq=False)
class Image(Message):
    """Raw image; `data` contains `height` rows of `step` bytes."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/Image"
    header: Header = field(default_factory=Header)
    height: int = 0
    width: int = 0
    encoding: str = ""
    is_bigendian: int = 0
    step: int = 0
    data: Octets = array(np.uint8)

    @classmethod
    def from_pixels(cls, pixels: Octets, header: Header, encoding: str = "rgb8") -> Self:
        """Create a message from `pixels` `(H, W, C)`, or `(H, W)` for one channel."""
        height, width = pixels.shape[:2]
        return cls(header, height, width, encoding, 0, width * CHANNELS[encoding], np.asarray(pixels, np.uint8))

    @property
    def pixels(self) -> Octets:
        """Pixels `(H, W, C)`, channels in the order of `encoding`.

        Raises:
            ValueError: The image is empty, the encoding does not have one byte per channel, or `data` does not match
                the image size.
        """
        channels = CHANNELS.get(self.encoding)
        filled = self.height > 0 and self.width > 0 and len(self.data) == self.step * self.height
        if channels is None or not filled or self.step < self.width * channels:
            found = f"{self.width} x {self.height} '{self.encoding}', step {self.step}, {len(self.data)} bytes"
            raise ValueError(f"Expected an image in one of {', '.join(CHANNELS)}, found {found}.")
        rows = self.data.reshape(self.height, self.step)[:, : self.width * channels]
        return rows.reshape(self.height, self.width, channels)


@dataclass(frozen=True, eq=False)
class CompressedImage(Message):
    """Encoded image file; `format` is its format, such as "jpeg"."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/CompressedImage"
    header: Header = field(default_factory=Header)
    format: str = ""
    data: Octets = array(np.uint8)


@dataclass(frozen=True, eq=False)
class RegionOfInterest(Message):
    """Region of the sensor in an image [pixels]; all zeros for the whole sensor."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/RegionOfInterest"
    x_offset: int = 0
    y_offset: int = 0
    height: int = 0
    width: int = 0
    do_rectify: bool = False


@dataclass(frozen=True, eq=False)
class CameraInfo(Message):
    """Calibration of a camera: distortion d, intrinsics k (3 x 3), rectification r (3 x 3), projection p (3 x 4)."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/CameraInfo"
    header: Header = field(default_factory=Header)
    height: int = 0
    width: int = 0
    distortion_model: str = ""
    d: Numbers = array()
    k: Numbers = array(size=9)
    r: Numbers = array(size=9)
    p: Numbers = array(size=12)
    binning_x: int = 0
    binning_y: int = 0
    roi: RegionOfInterest = field(default_factory=RegionOfInterest)


@dataclass(frozen=True, eq=False)
class Imu(Message):
    """Orientation, angular velocity [rad/s], linear acceleration [m/s^2], with 3 x 3 covariances."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/Imu"
    header: Header = field(default_factory=Header)
    orientation: Quaternion = field(default_factory=Quaternion)
    orientation_covariance: Numbers = array(size=9)
    angular_velocity: Vector3 = field(default_factory=Vector3)
    angular_velocity_covariance: Numbers = array(size=9)
    linear_acceleration: Vector3 = field(default_factory=Vector3)
    linear_acceleration_covariance: Numbers = array(size=9)


@dataclass(frozen=True, eq=False)
class JointTrajectoryPoint(Message):
    """Targets of joints at `time_from_start` after the trajectory's stamp; empty arrays are not given."""

    ros_name: ClassVar[str] = "trajectory_msgs/msg/JointTrajectoryPoint"
    positions: Numbers = array()
    velocities: Numbers = array()
    accelerations: Numbers = array()
    effort: Numbers = array()
    time_from_start: Duration = field(default_factory=Duration)


@dataclass(frozen=True, eq=False)
class JointTrajectory(Message):
    """Command of joint_trajectory_controller; a stamp of zero means "from now"."""

    ros_name: ClassVar[str] = "trajectory_msgs/msg/JointTrajectory"
    header: Header = field(default_factory=Header)
    joint_names: tuple[str, ...] = ()
    points: tuple[JointTrajectoryPoint, ...] = ()


@dataclass(frozen=True, eq=False)
class KeyValue(Message):
    """Entry of a diagnosis."""

    ros_name: ClassVar[str] = "diagnostic_msgs/msg/KeyValue"
    key: str = ""
    value: str = ""


@dataclass(frozen=True, eq=False)
class DiagnosticStatus(Message):
    """Diagnosis of one component; `level` is 0 OK, 1 warning, 2 error, 3 stale."""

    ros_name: ClassVar[str] = "diagnostic_msgs/msg/DiagnosticStatus"
    level: int = 0
    name: str = ""
    message: str = ""
    hardware_id: str = ""
    values: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, eq=False)
class DiagnosticArray(Message):
    """Diagnoses of all components."""

    ros_name: ClassVar[str] = "diagnostic_msgs/msg/DiagnosticArray"
    header: Header = field(default_factory=Header)
    status: tuple[DiagnosticStatus, ...] = ()
