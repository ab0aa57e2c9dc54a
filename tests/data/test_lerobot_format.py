import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import LeRobotWriter, read_lerobot, write_lerobot
from robopolicy.data.formats.lerobot.images import video_encoder
from robopolicy.data.statistics import dataset_statistics
from robopolicy.errors import UserError


def make_episode(length: int, seed: int, terminated: bool, size: tuple[int, int] = (16, 24)) -> Episode:
    rng = np.random.default_rng(seed)
    last = np.arange(length) == length - 1
    smooth = np.linspace(40, 200, size[0] * size[1]).reshape(size)
    images = np.stack([np.stack([(smooth + 3 * t + 10 * c) % 256 for c in range(3)]) for t in range(length)])
    return Episode(
        {
            "state": rng.normal(size=(length, 5)).astype(np.float32),
            "goal": rng.normal(size=(length, 1)).astype(np.float64),
            "image.front": images.astype(np.uint8),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "reward": rng.normal(size=length).astype(np.float32),
            "terminated": last & terminated,
            "success": last & terminated,
        },
        task="toy/reach" if seed % 2 == 0 else "toy/push",
        seed=seed,
    )


def make_data(size: tuple[int, int] = (16, 24)) -> Episodes:
    return Episodes.from_list([make_episode(4 + seed, seed, seed != 1, size) for seed in range(4)], 0.05)


def assert_equal(found: Episodes, expected: Episodes, *, skip: tuple[str, ...] = ()) -> None:
    assert set(found.arrays) == set(expected.arrays)
    for key, array in expected.arrays.items():
        assert found.arrays[key].dtype == array.dtype and found.arrays[key].shape == array.shape
        assert key in skip or np.array_equal(found.arrays[key], array), key
    assert found.ends.tolist() == expected.ends.tolist()
    assert found.seeds.tolist() == expected.seeds.tolist()
    assert (found.tasks, found.control_dt) == (expected.tasks, expected.control_dt)


def test_png_dataset_round_trips_bit_for_bit(tmp_path: Path) -> None:
    data = make_data()
    write_lerobot(data, tmp_path / "set", video=False)
    assert_equal(read_lerobot(tmp_path / "set"), data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


def test_arrays_of_any_shape_round_trip_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"points": rng.normal(size=(4, 5, 3)).astype(np.float32), "action": np.zeros((4, 2), np.float32)}
    data = Episodes.from_list([Episode(arrays, "toy/reach", 0)], 0.05)
    write_lerobot(data, tmp_path / "set")
    assert_equal(read_lerobot(tmp_path / "set"), data)
    stats = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())["observation.points"]
    assert np.array_equal(np.array(stats["max"], np.float32), arrays["points"].max(0))


@pytest.mark.skipif(video_encoder() is None, reason="this PyAV has no video encoder")
def test_video_dataset_round_trips_with_small_image_error(tmp_path: Path) -> None:
    data = make_data()
    write_lerobot(data, tmp_path / "set")
    assert (tmp_path / "set/videos/observation.images.front/chunk-000/file-000.mp4").is_file()
    back = read_lerobot(tmp_path / "set")
    assert_equal(back, data, skip=("image.front",))
    error = np.abs(back.arrays["image.front"].astype(int) - data.arrays["image.front"])
    assert error.mean() < 3  # a shift by one frame gives 3 everywhere, a shift by one episode more
    part = read_lerobot(tmp_path / "set", episodes=[1, 3])
    assert np.array_equal(part.episode(1).arrays["image.front"], back.episode(3).arrays["image.front"])


def test_odd_image_sizes_fall_back_to_png(tmp_path: Path) -> None:
    data = make_data((15, 10))
    write_lerobot(data, tmp_path / "set")
    assert_equal(read_lerobot(tmp_path / "set"), data)


def test_large_datasets_roll_over_into_several_files(tmp_path: Path) -> None:
    data = make_data((128, 128))
    noise = np.random.default_rng(0).integers(0, 256, (len(data), 3, 128, 128), dtype=np.uint8)
    data = Episodes({**data.arrays, "image.front": noise}, data.ends, data.tasks, data.seeds, data.control_dt)
    with LeRobotWriter(tmp_path / "set", control_dt=0.05, video=False, data_file_mb=1) as writer:
        for index in range(data.num_episodes):
            writer.add(data.episode(index))
    files = sorted(path.name for path in (tmp_path / "set/data/chunk-000").iterdir())
    assert files == ["file-000.parquet", "file-001.parquet"]
    assert_equal(read_lerobot(tmp_path / "set"), data)
    assert read_lerobot(tmp_path / "set", episodes=[3], images=False).seeds.tolist() == [3]


def test_layout_matches_lerobot_v30(tmp_path: Path) -> None:
    data = make_data()
    write_lerobot(data, tmp_path / "set", video=False)
    info = json.loads((tmp_path / "set/meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["total_episodes"], info["total_frames"]) == ("v3.0", 20, 4, 22)
    assert info["features"]["observation.images.front"]["shape"] == [16, 24, 3]
    table = pq.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")
    assert table.schema.field("observation.state").type == pa.list_(pa.float32(), 5)
    assert table.schema.field("next.done").type == pa.bool_()
    assert table["timestamp"].to_pylist()[:3] == pytest.approx([0.0, 0.05, 0.1])
    assert sum(table["next.done"].to_pylist()) == 4 and sum(table["next.truncated"].to_pylist()) == 1
    rows = pq.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["dataset_to_index"] for row in rows] == data.ends.tolist()
    stored = json.loads((tmp_path / "set/meta/stats.json").read_text())
    for key, name in (
        ("state", "observation.state"),
        ("image.front", "observation.images.front"),
        ("action", "action"),
    ):
        for statistic, value in dataset_statistics(data)[key].items():
            np.testing.assert_allclose(stored[name][statistic], value)


def test_fractional_rates_are_preserved(tmp_path: Path) -> None:
    data = Episodes.from_list([make_episode(3, 0, True)], 0.015)
    write_lerobot(data, tmp_path / "set")
    assert read_lerobot(tmp_path / "set").control_dt == 0.015


def test_v21_dataset_is_read(tmp_path: Path) -> None:
    root = tmp_path / "old"
    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    feature = {"dtype": "float32", "shape": [2], "names": None}
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 1000,
        "features": {"observation.state": feature, "action": feature, "next.done": {"dtype": "bool", "shape": [1]}},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "Push the block."}\n')
    lines = [json.dumps({"episode_index": e, "tasks": ["Push the block."], "length": 2 + e}) for e in range(2)]
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    for episode in range(2):
        length = 2 + episode
        value = [[float(episode), float(t)] for t in range(length)]
        table = {
            "observation.state": pa.array(value, pa.list_(pa.float32())),
            "action": pa.array(value, pa.list_(pa.float32())),
            "next.done": pa.array([t == length - 1 for t in range(length)]),
            "frame_index": list(range(length)),
            "episode_index": [episode] * length,
            "task_index": [0] * length,
        }
        pq.write_table(pa.table(table), root / f"data/chunk-000/episode_{episode:06d}.parquet")
    data = read_lerobot(root)
    assert data.lengths.tolist() == [2, 3] and data.tasks == ("Push the block.",) * 2 and data.control_dt == 0.1
    assert data.arrays["state"].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    assert data.arrays["terminated"].tolist() == [False, True, False, False, True]


def one_line(error: pytest.ExceptionInfo[UserError]) -> bool:
    return "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/tasks.parquet",
        "meta/info.json",
    ],
)
@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_damaged_files_give_one_clear_line(tmp_path: Path, name: str, damage: str) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    file = tmp_path / "set" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"\x00" * len(content))
    with pytest.raises(UserError) as error:
        read_lerobot(tmp_path / "set")
    assert one_line(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: [], "it must be an object with entries"),
        (lambda info: info.pop("fps") and None, "info.json: entry 'fps' is missing; copy or collect"),
        (lambda info: info.update(fps=float("nan")), "'fps' must be a number from 0.0001 to 10000, found NaN"),
        (lambda info: info.update(features=[1]), r"'features' must be an object by name, found \[1\]"),
        (lambda info: info["features"].update(action=None), "feature 'action' must be an object, found null"),
        (lambda info: info["features"]["action"].update(info={"fps": float("inf")}), "has a number that is not finite"),
        (lambda info: info["features"]["action"].update(dtype=5), "the dtype of feature 'action' must be a name"),
        (lambda info: info["features"]["action"].update(shape=[-1]), r"list of sizes of 1 or more, found \[-1\]"),
        (lambda info: info["features"]["action"].update(shape=[7]), "column 'action' must hold 7 numbers in every"),
        (lambda info: info["features"].update(closing=info["features"]["action"]), "column 'closing' is missing"),
        (lambda info: info.update(data_path="{chunk_index.__class__}"), "'data_path' must be a file path"),
        *(
            (lambda info, name=name: info["features"].update({name: info["features"]["action"]}), "no name of a folder")
            for name in ("../../x", "a\\b", "a\0", "..", ".", "")
        ),
    ],
)
def test_invalid_metadata_gives_a_clear_error(tmp_path: Path, change: Any, message: str) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    file = tmp_path / "set/meta/info.json"
    info = json.loads(file.read_text())
    changed = change(info)
    file.write_text(json.dumps(info if changed is None else changed))
    with pytest.raises(UserError, match=message):
        read_lerobot(tmp_path / "set")


def test_deep_json_gives_one_clear_line(tmp_path: Path) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    (tmp_path / "set/meta/info.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="it is nested too deeply"):
        read_lerobot(tmp_path / "set")


@pytest.mark.parametrize(
    ("file", "column", "values", "message"),
    [
        ("meta/episodes", "length", ["a"] * 4, "'length' must be an integer of 1 or more, found \"a\""),
        ("meta/episodes", "data/file_index", [None] * 4, "'data/file_index' must be an integer of 0 or more"),
        ("data", "next.reward", ["a"] * 22, "column 'next.reward' must hold numbers, found string"),
        ("data", "action", [None] * 22, "column 'action' must hold numbers, found null"),
    ],
)
def test_columns_of_the_wrong_type_are_named(
    tmp_path: Path, file: str, column: str, values: list[Any], message: str
) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    place = tmp_path / "set" / file / "chunk-000/file-000.parquet"
    table = pq.read_table(place)
    pq.write_table(table.set_column(table.column_names.index(column), column, pa.array(values)), place)
    with pytest.raises(UserError, match=message):
        read_lerobot(tmp_path / "set")


def test_damaged_video_gives_one_clear_line(tmp_path: Path) -> None:
    write_lerobot(make_data(), tmp_path / "set")
    file = tmp_path / "set/videos/observation.images.front/chunk-000/file-000.mp4"
    if not file.exists():
        pytest.skip("this PyAV has no video encoder")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"file-000\.mp4") as error:
        read_lerobot(tmp_path / "set")
    assert one_line(error)


def test_missing_frames_are_counted(tmp_path: Path) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    file = tmp_path / "set/data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 20), file)
    with pytest.raises(UserError, match="episode 3 should have 7 frames, found 5"):
        read_lerobot(tmp_path / "set")


def test_paths_outside_of_the_dataset_are_refused(tmp_path: Path) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    file = tmp_path / "set/meta/info.json"
    file.write_text(file.read_text().replace('"data/chunk', '"../data/chunk'))
    with pytest.raises(UserError, match="outside"):
        read_lerobot(tmp_path / "set")


def test_depth_images_are_no_colour_images(tmp_path: Path) -> None:
    """Depth in 16 bits used to become 255 in every channel."""
    write_lerobot(make_data(), tmp_path / "set", video=False)
    (file,) = (tmp_path / "set/data").glob("*/*.parquet")
    table, depth = pq.read_table(file), io.BytesIO()
    Image.fromarray(np.full((16, 24), 1000, np.uint16)).save(depth, "PNG")
    name = "observation.images.front"
    rows = [{"bytes": depth.getvalue(), "path": "x.png"}] * len(table)
    column = pa.array(rows, table.schema.field(name).type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, column), file)
    with pytest.raises(UserError, match=f"set: '{name}' has 16 bits of grey") as error:
        read_lerobot(tmp_path / "set")
    assert one_line(error)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    write_lerobot(make_data(), tmp_path / "set", video=False)
    file = tmp_path / "set/meta/info.json"
    file.write_text(file.read_text().replace("v3.0", "v9.0"))
    with pytest.raises(UserError, match=r"v9\.0"):
        read_lerobot(tmp_path / "set")
    with pytest.raises(UserError, match="No LeRobot dataset"):
        read_lerobot(tmp_path / "nowhere")


def test_failed_recording_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), LeRobotWriter(tmp_path / "set", control_dt=0.1) as writer:
        writer.add(make_episode(3, 0, True))
        raise RuntimeError
    with pytest.raises(UserError, match="No episode"), LeRobotWriter(tmp_path / "set", control_dt=0.1):
        pass
    assert list(tmp_path.iterdir()) == []


def test_short_episodes_are_videos(tmp_path: Path) -> None:
    """The encoder writes the first packet after several frames."""
    with LeRobotWriter(tmp_path / "set", control_dt=0.1) as writer:
        for seed in range(3):
            writer.add(make_episode(1 + seed, seed, True))
    assert read_lerobot(tmp_path / "set").lengths.tolist() == [1, 2, 3]


def test_an_error_keeps_the_episodes_of_a_person(tmp_path: Path) -> None:
    options = {"control_dt": 0.1, "keep_on_error": True}
    with pytest.raises(RuntimeError), LeRobotWriter(tmp_path / "set", **options) as writer:
        for seed in range(2):
            writer.add(make_episode(3, seed, True))
        raise RuntimeError
    assert read_lerobot(tmp_path / "set").num_episodes == 2
    with pytest.raises(RuntimeError), LeRobotWriter(tmp_path / "empty", **options):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_full_disk_gives_one_clear_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, table: pa.Table) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(UserError, match="No space left") as error:
        write_lerobot(make_data(), tmp_path / "set")
    assert one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_replaced_only_on_request_and_only_when_datasets(tmp_path: Path) -> None:
    data = make_data()
    write_lerobot(data, tmp_path / "set", video=False)
    with pytest.raises(UserError, match="--overwrite"):
        write_lerobot(data, tmp_path / "set")
    write_lerobot(data.subset([0]), tmp_path / "set", video=False, overwrite=True)
    assert read_lerobot(tmp_path / "set").num_episodes == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").write_text("dear")
    with pytest.raises(UserError, match="not a dataset"):
        write_lerobot(data, tmp_path / "home", overwrite=True)


def test_unwritable_place_gives_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        write_lerobot(make_data(), tmp_path / "file" / "set")


def test_episodes_with_other_shapes_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="differs from the first"),
        LeRobotWriter(tmp_path / "set", control_dt=0.1) as writer,
    ):
        writer.add(make_episode(3, 0, True))
        writer.add(make_episode(3, 0, True, (8, 8)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), 1e-9, 86_400.0])
def test_control_steps_that_the_format_cannot_store_are_refused_at_construction(step: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"control steps of 0\.0001 to 10000 s, got"):
        LeRobotWriter(tmp_path / "set", control_dt=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "lesson"),
    [
        (np.array([["a"], ["b"]]), "real numbers, found <U1"),
        (np.array([[1], [2]], object), "real numbers, found object"),  # earlier versions dropped it on reading
        (np.zeros((2, 1), "datetime64[s]"), "real numbers, found datetime64"),
        (np.zeros((2, 1), np.complex64), "real numbers, found complex64"),
        ([[1.0], [2.0]], "real numbers, found list"),
        (np.zeros((2, 0)), r"frames of shape \(0,\), without numbers"),
    ],
)
def test_arrays_that_cannot_be_read_back_are_not_written(extra: Any, lesson: str, tmp_path: Path) -> None:
    arrays = {"state": np.zeros((2, 1), np.float32), "action": np.zeros((2, 1), np.float32), "extra": extra}
    with pytest.raises(UserError, match=lesson), LeRobotWriter(tmp_path / "set", control_dt=0.05) as writer:
        writer.add(Episode(arrays))
    assert list(tmp_path.iterdir()) == []
