"""Conversion of messages to policy observations and of actions to joint targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.sim.physics_state import PhysicsState
from robopolicy_robots.message import Message
from robopolicy_robots.messages import CompressedImage, Image, JointState
from robopolicy_robots.robot import CAMERA, JOINTS
from robopolicy_robots.transports.base import Received

Array = NDArray[np.float64]
FORMATS = ("PNG", "JPEG")  # supported formats of a CompressedImage
MAX_PIXELS = 2**24  # maximum number of pixels of an image


class Embodiment(Protocol):
    """Interface of one robot in one task.

    The commands of a `copy.copy` of an embodiment do not change the original, since trajectories are planned with it.
    """

    sources: Mapping[str, type[Message]]  # required sources, such as {"joints": JointState, "object.cube": PoseStamped}
    joints: tuple[str, ...]  # (J,) joints that `command` moves, in this order
    control_dt: float  # [s] duration of an action

    def start(self, state: Mapping[str, Received]) -> None:
        """Reset the state; called before an episode and before the robot moves again after a stop."""

    def observe(self, state: Mapping[str, Received]) -> dict[str, NDArray[Any]]:
        """Observation `{key: (...)}` without history, from the newest messages `{source: Received}`."""
        ...

    def command(self, action: NDArray[Any], state: Mapping[str, Received]) -> Array:
        """Joint targets `(J,)` [rad, m] for `action` `(A,)`; called once per action, not per tick."""
        ...

    def physics_state(self, state: Mapping[str, Received]) -> PhysicsState | None:
        """State of the bodies for 3D views; None without a model, or before the robot has reported all of it."""
        ...


class JointEmbodiment:
    """Embodiment with joint positions and cameras as observations and joint position targets as actions.

    Args:
        joints: Joints in the order of the policy's actions and of its observation `state`.
        control_dt: Duration of an action [s].
        images: Cameras of the policy and their sizes `{"front": (height, width)}`.
        velocities: Append joint velocities to the positions in `state`.
    """

    def __init__(
        self,
        joints: Sequence[str],
        control_dt: float,
        images: Mapping[str, tuple[int, int]] | None = None,
        *,
        velocities: bool = False,
    ) -> None:
        self.joints, self.control_dt, self.velocities = tuple(joints), control_dt, velocities
        self.images = dict(images or {})
        cameras = {CAMERA + name: Image for name in self.images}
        self.sources: Mapping[str, type[Message]] = {JOINTS: JointState, **cameras}

    def start(self, state: Mapping[str, Received]) -> None:
        """Do nothing, since the embodiment has no state."""

    def observe(self, state: Mapping[str, Received]) -> dict[str, NDArray[Any]]:
        """`state` `(J,)` or `(2J,)` float32 and `image.<camera>` `(3, height, width)` uint8.

        Raises:
            UserError: A joint or a camera is missing, or an image cannot be read.
        """
        message = state[JOINTS].message if JOINTS in state else JointState()
        assert isinstance(message, JointState)
        index = {name: i for i, name in enumerate(message.name)}
        missing = [name for name in self.joints if name not in index]
        missing += [CAMERA + name for name in self.images if CAMERA + name not in state]
        if missing:
            raise UserError(f"The robot does not report {', '.join(missing)}.")
        order = [index[name] for name in self.joints]
        parts = [message.position, message.velocity] if self.velocities else [message.position]
        if any(len(part) != len(message.name) for part in parts):
            raise UserError("The joint state reports names without positions or velocities.")
        found: dict[str, NDArray[Any]] = {"state": np.concatenate([part[order] for part in parts]).astype(np.float32)}
        return found | {
            CAMERA + name: decode_image(state[CAMERA + name].message, size) for name, size in self.images.items()
        }

    def command(self, action: NDArray[Any], state: Mapping[str, Received]) -> Array:
        """Return the action as joint targets; raises `UserError` for other lengths than the number of joints."""
        if np.shape(action) != (len(self.joints),):
            raise UserError(f"Expected {len(self.joints)} joint targets, found an action of shape {np.shape(action)}.")
        return np.asarray(action, np.float64)

    def physics_state(self, state: Mapping[str, Received]) -> PhysicsState | None:
        """Return None, since there is no model."""
        return None


def decode_image(message: Message, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Decode an image to pixels `(3, height, width)` of `size`; raises `UserError` if unreadable or too large."""
    from PIL import Image as pillow

    if isinstance(message, CompressedImage):
        try:
            image = pillow.open(BytesIO(message.data.tobytes()), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:  # a damaged header may claim gigabytes
                raise ValueError(f"{image.width} x {image.height} pixels")
            image = image.convert("RGB")
        except Exception as error:  # decoders raise many exceptions, which must not stop the loop
            raise UserError(f"A camera sent an image that cannot be read: {' '.join(str(error).split())}.") from error
    elif isinstance(message, Image):
        try:
            image = pillow.fromarray(_rgb(message))
        except ValueError as error:
            raise UserError(str(error)) from error
    else:
        raise UserError(f"Expected an image, found {message.ros_name}.")
    if (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), pillow.Resampling.BOX)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _rgb(message: Image) -> NDArray[np.uint8]:
    pixels = message.pixels
    if message.encoding == "mono8":
        return np.repeat(pixels, 3, axis=2)
    rgb = pixels[:, :, :3]
    return np.ascontiguousarray(rgb[:, :, ::-1] if message.encoding.startswith("bgr") else rgb)
