"""Numbers and images of ROS messages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from robopolicy.data.episodes import Array
from robopolicy.data.formats.lerobot.images import MAX_PIXELS, decode_image, is_deep
from robopolicy.errors import UserError
from robopolicy.files import parse_json

IMAGE_TYPES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
TEXT_TYPE = "std_msgs/msg/String"  # of which JSON text is read
_CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1, "8UC3": 3, "8UC1": 1}
_DEPTH = {"16UC1": (np.uint16, 1e-3), "mono16": (np.uint16, 1e-3), "32FC1": (np.float32, 1.0)}  # type, metres per unit
_FIELDS = {"sensor_msgs/msg/JointState": "position", "trajectory_msgs/msg/JointTrajectory": "points.0.positions"}
_NO_MEASUREMENTS = ("header", "layout", "covariance", "pose_covariance", "twist_covariance")
_PNG = b"\x89PNG"
_DEPTH_HEADER = 12  # bytes before the PNG of a compressed depth image


def stamp_of(message: Any) -> int:
    """Time of measurement [ns]; 0 if the message has none."""
    stamp = getattr(getattr(message, "header", None), "stamp", None)
    return 0 if stamp is None else int(stamp.sec) * 10**9 + int(stamp.nanosec)


def field_value(message: Any, kind: str, path: str) -> Any:
    """Value at a path such as `points.0.positions`; in String messages, the path in their JSON text.

    Raises:
        LookupError: The message has no such value.
    """
    value = message
    if kind == TEXT_TYPE and path != "data":
        value = parse_json(message.data)
    for part in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value[part]
        elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
            if not part.isdecimal():
                raise LookupError(part)
            value = value[int(part)]
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            raise LookupError(part)
    return value


def joint_names(message: Any) -> tuple[str, ...]:
    """Names of the joints of a JointState or a JointTrajectory; () of other messages."""
    names = getattr(message, "name", None) or getattr(message, "joint_names", None) or ()
    return () if isinstance(names, str) else tuple(names)


def numbers(message: Any, kind: str, path: str, names: Sequence[str]) -> Array:
    """Numbers `(D,)` at a path of a message; with `names`, the joints of these names, in their order.

    Raises:
        LookupError: The message has no such field, or not as many numbers as names.
        UserError: A joint is missing, or the field does not hold numbers.
    """
    value = field_value(message, kind, path or _FIELDS.get(kind, ""))
    found = np.array(list(_leaves(value)))
    if found.dtype.kind not in "biuf" or not found.size:
        raise UserError(f"Field '{path or 'of all numbers'}' of {kind} holds no numbers.")
    if not names:
        return found
    known = {name: index for index, name in enumerate(joint_names(message))}
    if missing := [name for name in names if name not in known]:
        raise UserError(
            f"A message of {kind} lacks joint {', '.join(missing)}; it has {', '.join(known) or 'no names'}."
        )
    if len(found) != len(known):
        raise LookupError(path)
    return found[[known[name] for name in names]]


def _leaves(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        for entry in fields(value):
            if entry.name not in _NO_MEASUREMENTS and not entry.name.startswith("__"):
                yield from _leaves(getattr(value, entry.name))
    elif isinstance(value, np.ndarray):
        yield from value.reshape(-1).tolist()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, bool | int | float | np.generic):
        yield value
    elif value is not None and not isinstance(value, str):
        raise UserError(f"A message holds {type(value).__name__}, which is no number.")


def encoded_image(message: Any, kind: str) -> bytes | None:
    """PNG or JPEG bytes of a CompressedImage of colours; None for other messages."""
    return None if kind != IMAGE_TYPES[1] or _compressed_depth(message) else bytes(message.data)


def _compressed_depth(message: Any) -> bytes:
    """PNG bytes of a CompressedImage of depth; empty for colours."""
    data, encoding = bytes(message.data), message.format.partition(";")[0].strip()
    if "compressedDepth" in message.format:
        if encoding == "32FC1":
            raise UserError("Depth in 32FC1 is not read from compressedDepth, which rounds it; record 16UC1.")
        return data[_DEPTH_HEADER:]
    return data if encoding in ("16UC1", "mono16") and data.startswith(_PNG) else b""


def image(message: Any, kind: str, size: Sequence[int]) -> NDArray[Any]:
    """Pixels `(3, height, width)` uint8 of a colour image, or `(height, width)` float32 [m] of a depth image.

    Args:
        message: Image or CompressedImage.
        kind: Its type.
        size: Height and width to which a colour image is scaled by averaging; empty: as it is.

    Raises:
        UserError: The encoding is not read, or the data do not fit it.
    """
    if kind == IMAGE_TYPES[1]:
        if depth := _compressed_depth(message):
            return _decoded_depth(depth)
        pixels = decode_image(bytes(message.data)).transpose(1, 2, 0)
    elif message.encoding in _DEPTH:
        return _depth(message)
    else:
        pixels = _raw(message)
    if size and pixels.shape[:2] != tuple(size):
        height, width = size
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _decoded_depth(data: bytes) -> NDArray[np.float32]:
    """Depth `(height, width)` [m] of a PNG image with 16 bits, in millimetres."""
    picture = Image.open(io.BytesIO(data), formats=("PNG",))
    if picture.width * picture.height > MAX_PIXELS or not is_deep(picture):
        raise UserError(f"A depth image of {picture.width} x {picture.height} pixels has mode {picture.mode}.")
    return (np.asarray(picture) * 1e-3).astype(np.float32)


def _rows(message: Any, row_bytes: int) -> NDArray[np.uint8]:
    """Bytes of an image without the padding of its rows, `(height, row_bytes)`."""
    height, width, step = int(message.height), int(message.width), int(message.step)
    data = np.asarray(message.data, np.uint8).reshape(-1)
    if not 0 < height * width <= MAX_PIXELS or step < row_bytes or len(data) < height * step:
        raise UserError(f"An image of {width} x {height} pixels in {message.encoding} has {len(data)} bytes.")
    return data[: height * step].reshape(height, step)[:, :row_bytes]


def _raw(message: Any) -> NDArray[np.uint8]:
    """Pixels `(height, width, 3)`."""
    if message.encoding not in _CHANNELS:
        raise UserError(
            f"Images in {message.encoding} are not read; record {', '.join(_CHANNELS)}, or 16UC1 for depth."
        )
    channels = _CHANNELS[message.encoding]
    pixels = _rows(message, int(message.width) * channels).reshape(int(message.height), int(message.width), channels)
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    return np.ascontiguousarray(pixels[:, :, 2::-1] if message.encoding.startswith("bgr") else pixels[:, :, :3])


def _depth(message: Any) -> NDArray[np.float32]:
    """Depth `(height, width)` [m]."""
    dtype, unit = _DEPTH[message.encoding]
    order = ">" if message.is_bigendian else "<"
    rows = np.ascontiguousarray(_rows(message, int(message.width) * np.dtype(dtype).itemsize))
    return (rows.view(np.dtype(dtype).newbyteorder(order)) * unit).astype(np.float32)
