"""Tests of point clouds: layouts of other programs, and descriptions that do not fit the bytes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robopolicy_robots.messages import Header
from robopolicy_robots.point_cloud import PointCloud2, PointField, resample

POINTS = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)


def test_points_round_trip() -> None:
    cloud = PointCloud2.from_points(POINTS, Header())
    assert (cloud.height, cloud.width, cloud.point_step, cloud.row_step, cloud.is_dense) == (1, 3, 12, 36, True)
    np.testing.assert_array_equal(cloud.points, POINTS)
    assert PointCloud2.from_points(np.zeros((0, 3)), Header()).points.shape == (0, 3)


@pytest.mark.parametrize("order", ["<", ">"])
def test_fields_are_found_by_name_in_rows_with_padding(order: str) -> None:
    kind = np.dtype(
        {"names": ["rgb", "z", "x", "y"], "formats": [f"{order}f4", f"{order}f8", f"{order}f4", f"{order}f4"],
         "offsets": [0, 8, 16, 20], "itemsize": 32}
    )  # fmt: skip
    rows = np.zeros((2, 2), kind)
    rows["x"], rows["y"], rows["z"] = [[1, 2], [3, 4]], 5, 6
    rows["x"][1, 1] = np.nan
    data = b"".join(row.tobytes() + b"\xff" * 5 for row in rows)
    fields = [
        PointField("rgb", 0, 7, 1),
        PointField("z", 8, 8, 1),
        PointField("x", 16, 7, 1),
        PointField("y", 20, 7, 1),
    ]
    cloud = PointCloud2(Header(), 2, 2, fields, order == ">", 32, 69, np.frombuffer(data, np.uint8))  # type: ignore[arg-type]
    np.testing.assert_array_equal(cloud.points, [[1, 5, 6], [2, 5, 6], [3, 5, 6]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": (PointField("x", 0, 7, 1),)}, "Expected the fields x, y and z, found x"),
        ({"fields": "twice"}, "fields with different names"),
        ({"point_step": 8}, "Field 'z' ends at byte 12 of points of 8 bytes"),
        ({"row_step": 20}, "Expected 3 points of 12 bytes per row, found 1 rows of 20 bytes"),
        ({"data": np.zeros(10, np.uint8)}, "10 bytes of data"),
        ({"height": 4}, "found 4 rows of 36 bytes"),
        ({"kind": 9}, "Expected a type from 1 to 8 .* of 'x', found type 9 and count 1"),
        ({"count": 0}, "found type 7 and count 0"),
        ({"data": np.zeros(2**26 + 1, np.uint8)}, "may have 67108864 bytes"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    cloud = PointCloud2.from_points(POINTS, Header())
    if change.get("fields") == "twice":
        change = {"fields": (*cloud.fields, cloud.fields[0])}
    if set(change) & {"kind", "count"}:
        first = PointField("x", 0, change.get("kind", 7), change.get("count", 1))
        change = {"fields": (first, *cloud.fields[1:])}
    with pytest.raises(ValueError, match=message):
        _ = replace(cloud, **change).points


def test_only_finite_points_are_published() -> None:
    for points in (np.full((2, 3), np.nan), np.zeros((2, 2)), np.zeros(3)):
        with pytest.raises(ValueError, match=r"finite points of shape \(N, 3\)"):
            PointCloud2.from_points(points, Header())


def test_clouds_are_resampled_without_repeats_where_possible() -> None:
    rng = np.random.default_rng(0)
    assert {tuple(point) for point in resample(POINTS, 3, rng)} == {tuple(point) for point in POINTS}
    assert resample(POINTS, 2, rng).shape == (2, 3)
    more = resample(POINTS, 5, rng)
    assert {tuple(point) for point in more} == {tuple(point) for point in POINTS} and len(more) == 5
    with pytest.raises(ValueError, match="without finite points"):
        resample(POINTS[:0], 2, rng)


def test_bytes_match_rosbags() -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="needs robopolicy[ros]")
    from test_codecs import as_rosbags

    from robopolicy_robots.codecs import cdr
    from robopolicy_robots.codecs.definitions import type_hash

    cloud = PointCloud2.from_points(POINTS, Header())
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    assert cdr.encode(cloud) == bytes(store.serialize_cdr(as_rosbags(cloud, store), PointCloud2.ros_name))
    assert type_hash(PointCloud2) == "RIHS01_9198cabf7da3796ae6fe19c4cb3bdd3525492988c70522628af5daa124bae2b5"
