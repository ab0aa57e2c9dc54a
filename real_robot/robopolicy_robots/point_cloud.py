"""Point clouds of ROS (`sensor_msgs/msg/PointCloud2`) from and to arrays of points."""

# ruff: noqa: RUF009  (`array` returns a field)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from robopolicy_robots.message import Message, array
from robopolicy_robots.messages import Header

TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 8: "f8"}  # of numpy, by number in a PointField
MAX_BYTES = 2**26
AXES = ("x", "y", "z")


@dataclass(frozen=True, eq=False)
class PointField(Message):
    """Field of a point: `count` numbers of a type of `TYPES`, `offset` bytes after the start of the point."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/PointField"
    name: str = ""
    offset: int = 0
    datatype: int = 0
    count: int = 0


@dataclass(frozen=True, eq=False)
class PointCloud2(Message):
    """Points in `height` rows of `row_step` bytes, each of `width` points of `point_step` bytes."""

    ros_name: ClassVar[str] = "sensor_msgs/msg/PointCloud2"
    header: Header = field(default_factory=Header)
    height: int = 0
    width: int = 0
    fields: tuple[PointField, ...] = ()
    is_bigendian: bool = False
    point_step: int = 0
    row_step: int = 0
    data: NDArray[np.uint8] = array(np.uint8)
    is_dense: bool = False

    @classmethod
    def from_points(cls, points: NDArray[Any], header: Header) -> Self:
        """Create an unordered cloud of `points` `(N, 3)` [m], which must be finite."""
        values = np.ascontiguousarray(points, "<f4")
        if values.ndim != 2 or values.shape[1] != 3 or not np.isfinite(values).all():
            raise ValueError(f"A point cloud needs finite points of shape (N, 3), found {values.shape}.")
        axes = tuple(PointField(name, 4 * index, 7, 1) for index, name in enumerate(AXES))
        size = values.nbytes
        return cls(header, 1, len(values), axes, False, 12, size, np.frombuffer(values.tobytes(), np.uint8), True)

    @property
    def points(self) -> NDArray[np.float32]:
        """Finite points `(N, 3)` [m], in the order of `data`.

        Raises:
            ValueError: The description of the fields, the sizes or the bytes do not fit each other, or an axis is
                missing.
        """
        dtype, size = self._dtype(), self.point_step * self.width
        if len(self.data) > MAX_BYTES:
            raise ValueError(f"A point cloud may have {MAX_BYTES} bytes, found {len(self.data)}.")
        if size > self.row_step or len(self.data) < self.height * self.row_step:
            found = f"{self.height} rows of {self.row_step} bytes, {len(self.data)} bytes of data"
            raise ValueError(f"Expected {self.width} points of {self.point_step} bytes per row, found {found}.")
        rows = self.data[: self.height * self.row_step].reshape(self.height, self.row_step)[:, :size]
        cloud = np.frombuffer(np.ascontiguousarray(rows).tobytes(), dtype)
        found = np.stack([cloud[name][:, 0] for name in AXES], 1).astype(np.float32)
        return found[np.isfinite(found).all(1)]

    def _dtype(self) -> np.dtype[Any]:
        """Type of a point."""
        names = [each.name for each in self.fields]
        if not set(AXES) <= set(names):
            raise ValueError(f"Expected the fields x, y and z, found {', '.join(names) or 'none'}.")
        if len(set(names)) < len(names):
            raise ValueError(f"Expected fields with different names, found {', '.join(names)}.")
        order, formats = ">" if self.is_bigendian else "<", list[Any]()
        for each in self.fields:
            if each.datatype not in TYPES or each.count < 1:
                found = f"type {each.datatype} and count {each.count}"
                raise ValueError(f"Expected a type from 1 to 8 and a count from 1 of '{each.name}', found {found}.")
            formats.append((order + TYPES[each.datatype], (each.count,)))
            end = each.offset + each.count * np.dtype(TYPES[each.datatype]).itemsize
            if end > self.point_step:
                raise ValueError(f"Field '{each.name}' ends at byte {end} of points of {self.point_step} bytes.")
        offsets = [each.offset for each in self.fields]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": self.point_step})


def resample(points: NDArray[np.float32], count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Choose `count` of the points `(N, 3)`, repeating some only if there are fewer; raises a ValueError for none."""
    if not len(points):
        raise ValueError("A point cloud without finite points cannot be resampled.")
    chosen = rng.permutation(len(points))[:count]
    extra = rng.integers(0, len(points), count - len(chosen))
    return points[np.concatenate([chosen, extra])]
