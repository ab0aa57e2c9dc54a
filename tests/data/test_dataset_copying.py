"""Tests of datasets made of episodes of others: every number, image and video frame stays equal."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import read_lerobot, write_lerobot
from robopolicy.data.formats.lerobot.copying import PROVENANCE, Edit, EpisodeCopier, describe_copy
from robopolicy.data.selection import EpisodeFilter, split_indices
from robopolicy.errors import UserError
from robopolicy.plurals import counted


def episodes(count: int, seed: int, *, task: str = "lift", video: bool = True) -> Episodes:
    rng = np.random.default_rng(seed)

    def one(index: int) -> Episode:
        length = 4 + index
        arrays = {
            "state": rng.normal(size=(length, 3)).astype(np.float32),
            "wide": rng.normal(size=(length, 2)),
            "action": rng.normal(size=(length, 2)).astype(np.float32),
            "reward": np.full(length, index, np.float32),
            "success": np.arange(length) == length - 1 if index % 2 else np.zeros(length, np.bool_),
            "terminated": np.arange(length) == length - 1,
        }
        arrays |= {"image.top": rng.integers(0, 255, (length, 3, 16, 16), np.uint8)} if video else {}
        return Episode(arrays, f"{task} {index % 2}", 100 * seed + index, "expert")

    return Episodes.from_list([one(index) for index in range(count)], 0.1, {"action": ("x [m]", "y [m]")})


@pytest.fixture(scope="module", params=["video", "png"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets with a camera as video or as images."""
    root = tmp_path_factory.mktemp("copied")
    for seed, name in enumerate(("first", "second")):
        write_lerobot(episodes(4, seed), root / name, video=request.param == "video")
    return root


def assert_equal(found: Episodes, expected: Episodes) -> None:
    assert found.arrays.keys() == expected.arrays.keys()
    for key, array in expected.arrays.items():
        assert found.arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[key], array, err_msg=key)
    np.testing.assert_array_equal(found.ends, expected.ends)
    np.testing.assert_array_equal(found.seeds, expected.seeds)
    assert found.tasks == expected.tasks and found.behaviours == expected.behaviours
    assert found.control_dt == expected.control_dt and found.names == expected.names


def test_features_whose_videos_would_lie_elsewhere_are_not_copied(folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "hostile"
    shutil.copytree(folders / "first", source)
    file, name = source / "meta/info.json", "../../../elsewhere"
    info = json.loads(file.read_text())
    info["features"][name] = {"dtype": "video", "shape": [16, 16, 3], "names": None}
    info["video_path"] = "meta/info.json"
    file.write_text(json.dumps(info))
    file = next((source / "meta/episodes").glob("*/*.parquet"))
    table = pq.read_table(file)
    for entry in ("chunk_index", "file_index", "from_timestamp"):
        table = table.append_column(f"videos/{name}/{entry}", pa.array([0] * len(table)))
    pq.write_table(table, file)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="which is no name of a folder"), EpisodeCopier(tmp_path / "sub/out") as copier:
        copier.add(source)
    assert sorted(tmp_path.rglob("*")) == before


def test_merged_and_filtered_datasets_equal_the_episodes_of_their_sources(folders: Path, tmp_path: Path) -> None:
    first, second = (read_lerobot(folders / name) for name in ("first", "second"))
    with EpisodeCopier(tmp_path / "both", command="data merge") as copier:
        copier.add(folders / "first")
        copier.add(folders / "second", [3, 1])
    assert_equal(read_lerobot(tmp_path / "both"), Episodes.concat([first, second.subset([1, 3])]))
    assert (copier.episodes, copier.frames) == (6, len(first) + 5 + 7)
    with EpisodeCopier(tmp_path / "again") as copier:
        copier.add(tmp_path / "both", [1, 4])
    assert_equal(read_lerobot(tmp_path / "again"), Episodes.concat([first.subset([1]), second.subset([1])]))


def test_video_files_are_copied_byte_for_byte_and_unused_ones_are_left_out(folders: Path, tmp_path: Path) -> None:
    with EpisodeCopier(tmp_path / "both") as copier:
        copier.add(folders / "first")
        copier.add(folders / "second")
    videos = sorted((tmp_path / "both").rglob("*.mp4"))
    sources = [file for name in ("first", "second") for file in sorted((folders / name).rglob("*.mp4"))]
    assert [file.read_bytes() for file in videos] == [file.read_bytes() for file in sources]
    with EpisodeCopier(tmp_path / "one") as copier:
        copier.add(tmp_path / "both", [5])
    assert copier.videos == len(videos) // 2 == len(list((tmp_path / "one").rglob("*.mp4")))


def test_statistics_are_those_of_a_dataset_written_at_once(folders: Path, tmp_path: Path) -> None:
    both = Episodes.concat([read_lerobot(folders / name) for name in ("first", "second")])
    write_lerobot(both, tmp_path / "expected", video=False)
    with EpisodeCopier(tmp_path / "both") as copier:
        copier.add(folders / "first")
        copier.add(folders / "second")
    found, expected = (json.loads((tmp_path / name / "meta/stats.json").read_text()) for name in ("both", "expected"))
    for name in ("observation.state", "action", "next.reward", "timestamp"):
        assert found[name] == expected[name]
    for name in ("mean", "std", "min", "max"):  # of images before they were encoded
        stored, read = (np.array(stats["observation.images.top"][name]) for stats in (found, expected))
        np.testing.assert_allclose(stored, read, atol=0.1)
    rows = pq.read_table(next((tmp_path / "both").glob("meta/episodes/*/*.parquet")))
    assert "stats/observation.images.top/mean" in rows.column_names and len(rows) == 8


def test_keys_names_and_instruction_are_edited(folders: Path, tmp_path: Path) -> None:
    source = read_lerobot(folders / "first")
    edit = Edit(
        {"state": "position", "image.top": "image.front"}, ("wide",), {"action": ("a [rad]", "b [rad]")}, "put it down"
    )
    with EpisodeCopier(tmp_path / "edited", edit=edit, command="data edit") as copier:
        copier.add(folders / "first")
    new = {"state": "position", "image.top": "image.front"}
    arrays = {new.get(key, key): array for key, array in source.arrays.items() if key != "wide"}
    expected = replace(source, arrays=arrays, names={"action": ("a [rad]", "b [rad]")}, tasks=("put it down",) * 4)
    found = read_lerobot(tmp_path / "edited")
    assert_equal(replace(found, arrays={key: found.arrays[key] for key in arrays}), expected)


def test_provenance_names_command_sources_and_episodes(folders: Path, tmp_path: Path) -> None:
    with EpisodeCopier(tmp_path / "a", command="data filter") as copier:
        copier.add(folders / "first", [2])
    with EpisodeCopier(tmp_path / "b", command="data merge") as copier:
        copier.add(tmp_path / "a")
    content = json.loads((tmp_path / "b" / PROVENANCE).read_text())
    (source,) = content["sources"]
    assert content["command"] == "data merge" and source["episodes"] == "all" and len(source["info_sha256"]) == 64
    assert source["provenance"]["sources"][0]["episodes"] == [2]
    assert "robopolicy" in content["versions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: replace(data, control_dt=0.2), "10 frames per second and .* has 5"),
        (lambda data: replace(data, arrays={k: v for k, v in data.arrays.items() if k != "wide"}), "lacks .*wide"),
        (lambda data: replace(data, arrays={**data.arrays, "state": data.arrays["state"][:, :2]}), "has shape"),
        (lambda data: replace(data, arrays={**data.arrays, "state": data.arrays["state"].astype("f8")}), "has dtype"),
        (lambda data: replace(data, names={"action": ("x [cm]", "y [cm]")}), "has names"),
    ],
)
def test_datasets_that_differ_are_not_merged(change, message, tmp_path: Path) -> None:
    for name, data in (("one", episodes(2, 0, video=False)), ("two", change(episodes(2, 1, video=False)))):
        write_lerobot(data, tmp_path / name)
    with pytest.raises(UserError, match=message), EpisodeCopier(tmp_path / "both") as copier:
        copier.add(tmp_path / "one")
        copier.add(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit(rename={"stat": "x"}), "Did you mean 'state'"),
        (Edit(remove=("action",)), "cannot be removed"),
        (Edit(rename={"state": "wide"}), "twice"),
        (Edit(rename={"image.top": "top"}), "exactly if it is a camera"),
        (Edit(rename={"state": "closing"}), "'closing' is a key with a meaning of its own"),
        (Edit(rename={"state": "memory"}), "'memory' is a key with a meaning of its own"),
        (Edit(names={"action": ("x",)}), "1 names do not fit"),
    ],
)
def test_edits_that_do_not_fit_are_refused(edit: Edit, message: str, folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message), EpisodeCopier(tmp_path / "out", edit=edit) as copier:
        copier.add(folders / "first")
    assert not list(tmp_path.iterdir())


def test_a_source_is_not_replaced_and_an_empty_choice_is_not_written(folders: Path, tmp_path: Path) -> None:
    with EpisodeCopier(tmp_path / "a") as copier:
        copier.add(folders / "first")
    with pytest.raises(UserError, match="is the input"), EpisodeCopier(tmp_path / "a", overwrite=True) as copier:
        copier.add(tmp_path / "a")
    with pytest.raises(UserError, match="No episode was chosen"), EpisodeCopier(tmp_path / "b") as copier:
        copier.add(tmp_path / "a", [])
    with pytest.raises(UserError, match="episode 4 is missing"), EpisodeCopier(tmp_path / "b") as copier:
        copier.add(tmp_path / "a", [4])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_episodes_are_chosen_by_every_condition() -> None:
    data = episodes(6, 0, video=False)  # lengths 4 to 9, returns index * length, odd ones succeed
    for conditions, expected in (
        (EpisodeFilter(), [0, 1, 2, 3, 4, 5]),
        (EpisodeFilter(success=True), [1, 3, 5]),
        (EpisodeFilter(success=False, numbers=(0, 1, 2)), [0, 2]),
        (EpisodeFilter(min_length=6, max_length=8), [2, 3, 4]),
        (EpisodeFilter(min_return=21), [3, 4, 5]),
        (EpisodeFilter(min_quality=0.5, references=(5.0, 59.0)), [4, 5]),  # half way is a return of 32
        (EpisodeFilter(max_idle=0.5), [0, 1, 2, 3, 4, 5]),
    ):
        assert conditions.choose(data).tolist() == expected, conditions
    bare = replace(data, arrays={key: data.arrays[key] for key in ("state", "action")})
    for conditions, message in (
        (EpisodeFilter(success=True), "which episodes succeeded"),
        (EpisodeFilter(min_return=0), "no rewards"),
        (EpisodeFilter(numbers=(6,)), "episode 6 is missing"),
    ):
        with pytest.raises(UserError, match=message):
            conditions.choose(bare)


def test_a_split_is_random_disjoint_and_repeatable() -> None:
    first, second = split_indices(10, 3, seed=1)
    assert sorted([*first, *second]) == list(range(10)) and len(second) == 3
    assert split_indices(10, 3, seed=1)[1].tolist() == second.tolist()
    assert any(split_indices(10, 3, seed=seed)[1].tolist() != second.tolist() for seed in range(2, 5))
    with pytest.raises(UserError, match="both parts need some"):
        split_indices(1, 1, seed=0)


def as_v21(source: Path, path: Path) -> Path:
    """The dataset `source` with one video per episode, as LeRobot v2.1 stores it."""
    data, info = read_lerobot(source), json.loads((source / "meta/info.json").read_text())
    table = pq.read_table(next(source.glob("data/*/*.parquet")))
    camera = "observation.images.top"
    stored = info["features"][camera]["dtype"]
    info["codebase_version"] = "v2.1"
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    for folder in ("meta", "data/chunk-000", f"videos/chunk-000/{camera}"):
        (path / folder).mkdir(parents=True)
    (path / "meta/info.json").write_text(json.dumps(info))
    rows = [{"episode_index": e, "tasks": [data.tasks[e]], "length": int(n)} for e, n in enumerate(data.lengths)]
    (path / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = [{"task_index": index, "task": text} for index, text in enumerate(dict.fromkeys(data.tasks))]
    (path / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    for episode, (start, end) in enumerate(zip(data.starts, data.ends, strict=True)):
        pq.write_table(table.slice(start, end - start), path / f"data/chunk-000/episode_{episode:06d}.parquet")
        if stored == "video":
            write_lerobot(data.subset([episode]), path / "one")
            (video,) = (path / "one").rglob("*.mp4")
            video.rename(path / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4")
            shutil.rmtree(path / "one")
    return path


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_converting_lerobot_to_lerobot_copies_images_and_videos(
    version: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders / "first" if version == "v3.0" else as_v21(folders / "first", tmp_path / "old")
    before = read_lerobot(source)
    assert main(["data", "convert", str(source), str(tmp_path / "new"), "--task", "push"]) == 0
    out, videos = capsys.readouterr().out, sorted((tmp_path / "new").rglob("*.mp4"))
    assert_equal(read_lerobot(tmp_path / "new"), replace(before, tasks=("push",) * 4))
    assert [file.read_bytes() for file in videos] == [file.read_bytes() for file in sorted(source.rglob("*.mp4"))]
    assert len(videos) == 0 or f"copied as stored: {counted(len(videos), 'video file')}" in out
    assert json.loads((tmp_path / "new/meta/info.json").read_text())["codebase_version"] == "v3.0"
    columns = [pq.read_table(min((each / "data").rglob("*.parquet"))) for each in (source, tmp_path / "new")]
    if not videos:
        assert columns[0]["observation.images.top"][0].as_py() == columns[1]["observation.images.top"][0].as_py()


def test_other_conversions_of_videos_say_that_they_decode(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = bool(list((folders / "first").rglob("*.mp4")))
    for words in (["faster", "--rate", "20"], ["again", "--video"], ["set.npz"]):
        assert main(["data", "convert", str(folders / "first"), str(tmp_path / words[0]), *words[1:]]) == 0
        assert ("image.top: the frames of its videos were decoded" in capsys.readouterr().out) == video
    assert read_lerobot(tmp_path / "faster").control_dt == 0.05


def test_a_choice_of_episodes_reports_the_unused_frames_of_its_videos(folders: Path, tmp_path: Path) -> None:
    video = bool(list((folders / "first").rglob("*.mp4")))
    with EpisodeCopier(tmp_path / "some") as copier:
        copier.add(folders / "first", [1, 3])  # 0 and 2 have 4 and 6 frames in the same file
    assert copier.unused_frames == 10 * video
    assert describe_copy(copier, tmp_path).endswith("1 video file with 10 frames of other episodes") == video


@pytest.mark.parametrize(
    ("file", "column", "value", "message"),
    [
        ("data", "timestamp", None, "column 'timestamp' must hold numbers, found null"),
        ("data", "observation.state", "x", "column 'observation.state' must hold numbers, found string"),
        ("data", "task_index", "x", "task_index"),
        ("meta", "task", [1], "column 'task' must hold texts"),
        ("meta/episodes", "stats/observation.images.top/mean", {"a": 1}, "do not match the LeRobot format"),
        ("meta/episodes", "stats/observation.images.top/std", [1.0, None, 1.0], "must hold finite numbers"),
        ("meta/episodes", "stats/observation.images.top/max", [1.0] * 4, ""),
        ("meta/episodes", "stats/observation.images.top/min", None, ""),
    ],
)
def test_damaged_columns_are_refused_while_copying(
    file: str, column: str, value: object, message: str, folders: Path, tmp_path: Path, refused
) -> None:
    """Statistics of cameras that are missing, or are not of three channels, are left out."""
    shutil.copytree(folders / "first", tmp_path / "set")
    path = min((tmp_path / "set" / file).glob("*.parquet" if file == "meta" else "*/*.parquet"))
    table = pq.read_table(path)
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array([value] * len(table))), path)
    words = ("data", "merge", str(tmp_path / "set"), "--out", str(tmp_path / "out"))
    if message:
        assert message in refused(*words) and not (tmp_path / "out").exists()
        return
    assert main([*words]) == 0
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    assert "observation.images.top" not in stats and "action" in stats
