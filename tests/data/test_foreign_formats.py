"""Datasets of other libraries: read, trained on, converted and converted back, equal to the last bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_datasets as toys
import numpy as np
import pytest
from foreign_datasets import RATE, TOYS, assert_same, expected

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats import open_dataset, read_dataset, write_dataset
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.data.formats.mapping import DatasetMapping, FeatureMapping
from robopolicy.errors import UserError

h5py = pytest.importorskip("h5py", reason="needs robopolicy[hdf5]")
zarr = pytest.importorskip("zarr", reason="needs robopolicy[zarr]")
LIFT = ("Lift",) * 3
GIVEN = DatasetMapping(rate=RATE)


def read(path: Path, mapping: DatasetMapping | None = None) -> Episodes:
    """All episodes of a dataset."""
    with open_dataset(path, mapping) as dataset:
        return dataset.read()


def convert(source: Path, destination: Path, *options: str) -> Path:
    """Convert on the command line."""
    assert main(["data", "convert", str(source), str(destination), *options]) == 0
    return destination


@pytest.fixture(name="minari_set")
def _minari_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    pytest.importorskip("minari", reason="needs robopolicy[minari]")
    return lambda *args, **options: toys.write_minari_dataset(tmp_path / "minari", monkeypatch, *args, **options)


def test_demonstrations_of_robomimic_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5")
    assert_same(read(path), expected("reward", tasks=LIFT))
    closed = read(path, DatasetMapping(closing=True))
    assert_same(closed, expected("reward", tasks=LIFT, closing=True))
    assert read(path, DatasetMapping(split="valid")).lengths.tolist() == [12]


def test_a_demonstration_in_two_splits_is_refused(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5")
    with pytest.raises(UserError, match="no split 'test'; there are train, valid"):
        read(path, DatasetMapping(split="test"))
    with h5py.File(path, "a") as file:
        del file["mask/valid"]
        file["mask/valid"] = np.array(["demo_2"], "S")
    with pytest.raises(UserError, match="demo_2 is in both splits"):
        read(path, DatasetMapping(split="train"))


def test_other_actions_of_robomimic_are_read_only_on_request(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5")
    with open_dataset(path) as dataset:
        assert dataset.ignored == ("actions_abs", "dones", "states")
    found = read(path, DatasetMapping(features={"action": FeatureMapping(("actions_abs",))}))
    assert np.array_equal(found.arrays["action"], np.concatenate([toy.action + 1 for toy in TOYS]))


def test_missing_next_observations_cannot_close_an_episode(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5", next_obs=False)
    with pytest.raises(UserError, match="of episode demo_0 has no row after the last action"):
        read(path, DatasetMapping(closing=True))


def test_instructions_and_image_convention_of_libero(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5")
    with h5py.File(path, "a") as file:
        file["data"].attrs["problem_info"] = json.dumps({"language_instruction": "open the drawer"})
        file["data"].attrs["macros_image_convention"] = "opengl"
    with open_dataset(path) as dataset:
        assert "upside down" in dataset.reader.notes[0]
        assert dataset.read().tasks == ("open the drawer",) * 3
    turned = read(path, DatasetMapping(features={"image.front": FeatureMapping(("obs/image",), flip=True)}))
    assert np.array_equal(turned.arrays["image.front"][0], TOYS[0].image[0, ::-1].transpose(2, 0, 1))


def test_rate_success_and_nested_observations_of_isaac_lab(tmp_path: Path) -> None:
    path = tmp_path / "dataset.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Isaac-Lift", "sim_args": {"dt": 0.005, "decimation": 4}})
        for index, toy in enumerate(TOYS):
            demo = data.create_group(f"demo_{index}")
            demo.attrs["success"] = index != 1
            demo["actions"], demo["obs/policy/joint_pos"] = toy.action, toy.state[:-1]
            demo["initial_state/articulation/robot/root_pose"] = np.zeros((1, 7))
    found = read(path)
    assert found.control_dt == pytest.approx(0.02) and found.success.tolist() == [True, False, True]
    assert np.array_equal(found.arrays["policy.joint_pos"], expected().arrays["state"])


def test_sparse_rewards_of_robomimic_mark_success(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5")
    with h5py.File(path, "a") as file:
        for name, success in zip(toys.NAMES, (1, 0, 1), strict=True):
            file[f"data/{name}/rewards"][:] = 0
            file[f"data/{name}/rewards"][-1] = success
    assert read(path).success.tolist() == [True, False, True]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_replay_buffers_are_read(zarr_format: int, tmp_path: Path) -> None:
    path = toys.write_zarr_store(tmp_path / "replay.zarr", zarr_format=zarr_format)
    assert_same(read(path, GIVEN), expected())
    packed = toys.write_zip(path, tmp_path / "replay.zarr.zip")
    assert_same(read(packed, GIVEN), expected())


def test_images_of_whole_floats_become_bytes(tmp_path: Path) -> None:
    assert_same(read(toys.write_zarr_store(tmp_path / "replay.zarr", floats=True), GIVEN), expected())


def test_lossless_jpeg_xl_is_decoded(tmp_path: Path) -> None:
    codecs = pytest.importorskip("imagecodecs.numcodecs", reason="needs robopolicy[zarr-images]")
    codecs.register_codecs("imagecodecs_jpegxl", verbose=False)
    path = toys.write_zarr_store(tmp_path / "replay.zarr", codecs.Jpegxl(level=99, lossless=True))
    assert_same(read(path, GIVEN), expected())


def test_next_poses_become_actions_where_a_store_has_none(tmp_path: Path) -> None:
    path = tmp_path / "umi.zarr"
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_array("meta/episode_ends", data=np.array([3, 5]))
    group.create_array("data/pose", data=np.arange(10.0).reshape(5, 2))
    with pytest.raises(UserError, match="has no actions; map them in a mapping file, 'action: NAME' with one of pose"):
        read(path, GIVEN)
    mapping = tmp_path / "umi.yaml"
    mapping.write_text("source: umi.zarr\nrate: 60\nfeatures:\n  state: pose\n  action: {from: pose, next: true}\n")
    found = read_dataset(mapping)
    assert found.arrays["state"].tolist() == [[0, 1], [2, 3], [6, 7]]
    assert found.arrays["action"].tolist() == [[2, 3], [4, 5], [8, 9]] and found.ends.tolist() == [2, 3]


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_minari_is_read_without_its_package(data_format: str, minari_set: Callable[..., Path]) -> None:
    path = minari_set(data_format, jpeg_encoding=False)
    found = read(path, GIVEN)
    assert_same(found, expected("reward", "terminated"))
    assert found.seeds.tolist() == [3, 4, 5]
    closed = read(path, DatasetMapping(rate=RATE, closing=True))
    assert_same(closed, expected("reward", "terminated", closing=True))


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("grey", [False, True], ids=["different sizes", "equal sizes"])
def test_jpeg_bytes_of_minari_are_kept(
    data_format: str, grey: bool, minari_set: Callable[..., Path], tmp_path: Path
) -> None:
    import minari

    rng = np.random.default_rng(0)
    images = [np.full((6, 40, 48, 3), 128, np.uint8) if grey else rng.integers(0, 256, (6, 40, 48, 3), np.uint8)]
    toy = toys.ToyEpisode(TOYS[0].state, images[0], TOYS[0].action, TOYS[0].reward, True)
    path = minari_set(data_format, [toy])
    own = minari.load_dataset("toy/set-v0")[0].observations["image"]
    found = read(path, GIVEN)
    assert np.array_equal(found.arrays["image.image"], own[:-1].transpose(0, 3, 1, 2))
    written = read_lerobot(convert(path, tmp_path / "lerobot", "--rate", "20"))
    assert np.array_equal(written.arrays["image.image"], found.arrays["image.image"])
    stored = sum(file.stat().st_size for file in (tmp_path / "lerobot/data").rglob("*.parquet"))
    assert stored < found.arrays["image.image"].size  # PNG of noise would be larger


def test_flat_arrays_of_d4rl_end_at_terminals_and_timeouts(tmp_path: Path) -> None:
    same = expected("reward", "terminated", camera="")
    assert_same(read(toys.write_d4rl_file(tmp_path / "flat.hdf5"), GIVEN), same)
    assert_same(read(toys.write_npz_file(tmp_path / "flat.npz", toys.d4rl_arrays), GIVEN), same)


def test_d4rl_without_timeouts_needs_its_horizon(tmp_path: Path) -> None:
    arrays = {name: array for name, array in toys.d4rl_arrays().items() if name != "timeouts"}
    path = toys.write_npz_file(tmp_path / "flat.npz", lambda: arrays)
    with pytest.raises(UserError, match="set 'horizon'"):
        read(path, GIVEN)
    assert read(path, DatasetMapping(rate=RATE, horizon=9)).lengths.tolist() == [5, 9, 9, 3]


def test_the_last_state_of_ogbench_follows_the_last_action(tmp_path: Path) -> None:
    path = toys.write_npz_file(tmp_path / "play-v0.npz", toys.ogbench_arrays)
    assert_same(read(path), expected(camera=""), without=("qpos",))
    assert_same(read(path, DatasetMapping(closing=True)), expected(camera="", closing=True), without=("qpos",))


def test_plain_npz_files(tmp_path: Path) -> None:
    assert_same(read(toys.write_npz_file(tmp_path / "plain.npz"), GIVEN), expected())


def write_any(name: str, tmp_path: Path, minari_set: Callable[..., Path]) -> Path:
    """One dataset of each format, in the folder `tmp_path`."""
    makers: dict[str, Callable[[], Path]] = {
        "robomimic": lambda: toys.write_robomimic_file(tmp_path / "demo.hdf5"),
        "zarr": lambda: toys.write_zarr_store(tmp_path / "replay.zarr"),
        "zip": lambda: toys.write_zip(toys.write_zarr_store(tmp_path / "r.zarr"), tmp_path / "replay.zarr.zip"),
        "minari": lambda: minari_set("hdf5", jpeg_encoding=False),
        "minari_arrow": lambda: minari_set("arrow", jpeg_encoding=False),
        "d4rl": lambda: toys.write_d4rl_file(tmp_path / "flat.hdf5"),
        "npz": lambda: toys.write_npz_file(tmp_path / "plain.npz"),
        "ogbench": lambda: toys.write_npz_file(tmp_path / "play-v0.npz", toys.ogbench_arrays),
    }
    return makers[name]()


SOURCES = ["robomimic", "zarr", "zip", "minari", "minari_arrow", "d4rl", "npz", "ogbench"]


@pytest.mark.parametrize("source", SOURCES)
def test_conversion_there_and_back_keeps_every_bit(
    source: str, tmp_path: Path, minari_set: Callable[..., Path]
) -> None:
    path = write_any(source, tmp_path, minari_set)
    closing, minari = source in ("robomimic", "minari", "minari_arrow"), source.startswith("minari")
    convert(path, tmp_path / "lerobot", "--rate", "20", *["--closing"] * closing)
    before = read(path, DatasetMapping(rate=RATE, closing=closing))
    assert_same(read_lerobot(tmp_path / "lerobot"), before)
    for back in ("back.hdf5", "back.zarr", "back.zarr.zip", "back.npz", *["back-v0"] * minari):
        options = ["--format", "minari"] if back == "back-v0" else []
        convert(tmp_path / "lerobot", tmp_path / back, *options)
        has_next = back in ("back.hdf5", "back-v0")  # these formats have a place for the last observation
        assert_same(read(tmp_path / back, DatasetMapping(closing=closing and has_next)), before)


def test_a_written_minari_dataset_is_read_by_its_package(
    tmp_path: Path, minari_set: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import minari

    convert(minari_set("hdf5", jpeg_encoding=False), tmp_path / "lerobot", "--rate", "20", "--closing")
    convert(tmp_path / "lerobot", tmp_path / "again/back-v0", "--format", "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "again"))
    loaded = minari.load_dataset("back-v0")
    for episode, toy in zip(loaded.iterate_episodes(), TOYS, strict=True):
        assert np.array_equal(episode.observations["state"], toy.state)
        assert np.array_equal(episode.observations["image"], toy.image)
        assert np.array_equal(episode.actions, toy.action) and np.array_equal(episode.rewards, toy.reward)
        assert episode.terminations[-1] == toy.terminated and episode.truncations[-1] != toy.terminated


@pytest.mark.parametrize("source", SOURCES)
def test_a_policy_trains_on_every_format(source: str, tmp_path: Path, minari_set: Callable[..., Path]) -> None:
    path, mapping = write_any(source, tmp_path, minari_set), tmp_path / "mapping.yaml"
    mapping.write_text(f"source: {path.relative_to(tmp_path)}\nrate: 10\n")  # the rate of the task
    settings = ["task=point_mass", "algorithm=bc", "policy=flow", "policy.hidden=[8]", "budget.updates=2"]
    settings += [f"dataset={mapping}", "evaluation.episodes=0", f"out={tmp_path}", "name=run"]
    assert main(["train", *settings]) == 0
    assert (tmp_path / "run/checkpoints/last/manifest.json").is_file()


def test_names_and_numbers_follow_the_mapping(tmp_path: Path) -> None:
    path, mapping = toys.write_npz_file(tmp_path / "plain.npz"), tmp_path / "mapping.yaml"
    mapping.write_text(
        "rate: 20\ntask: push\ndrop: [image]\nfeatures:\n  both: [state, action]\n"
        "  action: {from: action, scale: [1, -2], offset: 0.5}\n  state: state\n"
    )
    written = read_lerobot(convert(path, tmp_path / "lerobot", "--mapping", str(mapping)))
    plain = expected(camera="")
    assert set(written.arrays) == {"both", "state", "action"} and written.tasks == ("push",) * 3
    assert np.array_equal(written.arrays["action"], plain.arrays["action"] * [1, -2] + 0.5)
    assert np.array_equal(written.arrays["both"][:, 6:], plain.arrays["action"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate: fast", "mapping.yaml.*rate must be"),
        ("rates: 20", "Unknown setting 'rates'"),
        ("[1]", "holds settings such as"),
        ("features: {state: {from: [x]}}\nrate: 20", "no array 'x'; it has state, action, image"),
        ("features: {state: {scale: 1}}", "'state' needs the name of an array"),
        ("features: {state: 3}", "'from' of 'state' must be the name of an array or a topic, found 3"),
        ("features: {state: {form: x}}", "Unknown setting 'form'"),
        ("features: {action: {from: action, scale: [1, 2, 3]}}\nrate: 20", "'scale' of 'action' needs 1 or 2 numbers"),
        ("features: {image.front: state}\nrate: 20", "'state' of episode 0 holds no RGB images"),
        ("rate: 20\nrate: 30", "found 'rate' twice"),
        ("clock: sundial", "clock must be stamp or receive"),
        ("source: plain.npz", "does not state its rate; state it with 'robopolicy data convert --rate HZ'"),
    ],
)
def test_invalid_mappings_are_refused(text: str, message: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    path, mapping = toys.write_npz_file(tmp_path / "plain.npz"), tmp_path / "mapping.yaml"
    mapping.write_text(text)
    found = refused("data", "convert", path, tmp_path / "out", "--mapping", mapping)
    assert re.search(message, found) and not (tmp_path / "out").exists()


def test_nothing_is_overwritten_without_the_option(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = toys.write_npz_file(tmp_path / "plain.npz")
    before = path.read_bytes()
    assert "is the input" in refused("data", "convert", path, path, "--rate", 20, "--overwrite")
    for name in ("set", "set.hdf5", "set.zarr", "set.zarr.zip", "set.npz"):
        convert(path, tmp_path / name, "--rate", "20")
        assert "exists already" in refused("data", "convert", path, tmp_path / name, "--rate", 20)
        convert(path, tmp_path / name, "--rate", "20", "--overwrite")
    assert path.read_bytes() == before
    assert not [each.name for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_formats_are_told_apart_and_unknown_ones_listed(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "no known format" in refused("data", "convert", tmp_path / "notes.txt", tmp_path / "out")
    assert "There is no dataset" in refused("data", "convert", tmp_path / "missing.npz", tmp_path / "out")
    path = toys.write_npz_file(tmp_path / "plain.npz")
    assert "Unknown format 'tfds'" in refused("data", "convert", path, tmp_path / "o", "--format", "tfds")
    assert "has no effect for npz" in refused("data", "convert", path, tmp_path / "o.npz", "--video")
    assert "Minari stores the observation after" in refused(
        "data", "convert", path, tmp_path / "o-v0", "--format", "minari", "--rate", 20
    )
    assert "needs a name with a version" in refused(
        "data", "convert", path, tmp_path / "o", "--format", "minari", "--rate", 20
    )


def test_a_conversion_reports_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toys.write_robomimic_file(tmp_path / "demo.hdf5")
    convert(path, tmp_path / "set")
    text = capsys.readouterr().out
    assert "3 episodes, 26 frames at 20 Hz (env_kwargs.control_freq of env_args)" in text
    assert "ignored: actions_abs, dones, states" in text
    convert(path, tmp_path / "again", "--json")
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    smallest = np.concatenate([toy.action for toy in TOYS]).min(0).tolist()
    assert facts["features"]["action"]["minimum"] == smallest and facts["frames"] == 26


def test_the_card_of_a_foreign_dataset_equals_that_of_its_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mapping = toys.write_robomimic_file(tmp_path / "demo.hdf5"), tmp_path / "demo.yaml"
    mapping.write_text("source: demo.hdf5\n")
    convert(path, tmp_path / "set")
    cards: list[dict[str, Any]] = []
    for each in (path, mapping, tmp_path / "set"):
        capsys.readouterr()
        assert main(["data", "card", str(each), "--random", "0", "--best", str(path), "--json"]) == 0
        cards.append(json.loads(capsys.readouterr().out))
        assert cards[-1].pop("dataset") == str(each)
    assert cards[0] == cards[1] == cards[2] and "image.image" in cards[0]["features"]


@pytest.mark.parametrize("format", ["npz", "zarr", "robomimic", "minari"])
def test_keys_that_become_one_name_are_refused(format: str, tmp_path: Path) -> None:
    arrays = {"front": np.zeros((3, 2)), "image.front": np.zeros((3, 3, 4, 4), np.uint8), "action": np.zeros((3, 1))}
    flags = {"reward": np.zeros(3), "terminated": np.zeros(3, np.bool_), "closing": np.arange(3) == 2}
    with pytest.raises(UserError, match=r"stores 'front' and 'image\.front' under one name"):
        write_dataset(tmp_path / "x-v0", format, [Episode(arrays | flags)], 0.1, {})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("key", ["file", "episode_ends", "robopolicy", "image.file"])
def test_npz_files_have_no_arrays_of_reserved_names(key: str, tmp_path: Path) -> None:
    arrays = {key: np.zeros((3, 3, 4, 4), np.uint8), "action": np.zeros((3, 1))}
    with pytest.raises(UserError, match=f"cannot store an array named '{key.removeprefix('image.')}'"):
        write_dataset(tmp_path / "x.npz", "npz", [Episode(arrays)], 0.1, {})
    assert not [*tmp_path.iterdir()]


def test_our_facts_survive_formats_without_a_place_for_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [
        Episode(
            {"state": rng.normal(size=(4, 2)), "action": rng.normal(size=(4, 3)), "success": np.arange(4) > 2},
            f"task {index}",
            index + 5,
            "expert+0.3",
        )
        for index in range(2)
    ]
    data = Episodes.from_list(parts, 0.015, {"action": ("x", "y", "z")})
    for format, name in (("robomimic", "a.hdf5"), ("zarr", "a.zarr"), ("npz", "a.npz")):
        write_dataset(tmp_path / name, format, parts, data.control_dt, data.names)
        found = read(tmp_path / name)
        assert_same(found, data)
        assert found.behaviours == data.behaviours and found.seeds.tolist() == [5, 6] and found.names == data.names
