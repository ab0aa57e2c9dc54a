"""Malformed datasets of every format give one line and exit code 2; nothing is written and nothing unpickled."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foreign_bags as bags
import foreign_datasets as toys
import malformed
import malformed_stores as stores
import numpy as np
import pytest
from malformed import RATE, Damage

from robopolicy.cli.main import MAX_ERROR
from robopolicy.data.formats import open_dataset
from robopolicy.data.formats.mapping import DatasetMapping
from robopolicy.errors import UserError

h5py, zarr, *_ = (
    pytest.importorskip(package, reason="needs robopolicy[hdf5,zarr,minari,record]")
    for package in ("h5py", "zarr", "minari", "rosbags", "mcap")
)

INTERNAL = (
    "NoneType",
    "has no attribute",
    "not subscriptable",
    "unexpected keyword",
    "object is not",
    "local variable",
)


@pytest.fixture(name="check")
def _check(tmp_path: Path, refused: Callable[..., str]) -> Callable[..., list[str]]:
    """Applies every damage to a fresh dataset and returns the messages."""

    def run(make: Callable[[Path], Path], damages: Iterator[tuple[str, Damage]], *options: str) -> list[str]:
        canary, work = tmp_path / "unpickled", tmp_path / "work"
        malformed.Canary.path = str(canary)
        original = make(tmp_path / "original")
        lines: list[str] = []
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name, damage in damages:
            work.mkdir()
            path = work / original.name
            shutil.copytree(original, path) if original.is_dir() else shutil.copy(original, path)
            damage(path)
            try:
                line = refused("data", "convert", path, work / "out", *options)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
            assert len(line) <= MAX_ERROR and not any(word in line for word in INTERNAL), f"{name}: {line}"
            left = [each.name for each in work.iterdir() if "out" in each.name]
            assert not left and not canary.exists(), f"{name}: {left}"
            lines.append(line)
            shutil.rmtree(work)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB
        assert len(lines) >= 50, f"{len(lines)} damages"
        return lines

    return run


def test_robomimic(check: Callable[..., Any]) -> None:
    check(lambda path: toys.write_robomimic_file(path.with_suffix(".hdf5")), malformed.robomimic_damages())


def test_d4rl(check: Callable[..., Any]) -> None:
    check(lambda path: toys.write_d4rl_file(path.with_suffix(".hdf5")), malformed.d4rl_damages(), *RATE)


def test_npz(check: Callable[..., Any]) -> None:
    damages = malformed.npz_damages(toys.npz_arrays, ("action", "state", "episode_ends"))
    check(lambda path: toys.write_npz_file(path.with_suffix(".npz")), damages, *RATE)


def test_ogbench(check: Callable[..., Any]) -> None:
    damages = malformed.npz_damages(toys.ogbench_arrays, ("actions", "observations", "terminals"))
    check(lambda path: toys.write_npz_file(path.with_suffix(".npz"), toys.ogbench_arrays), damages)


def test_zarr(check: Callable[..., Any]) -> None:
    check(lambda path: toys.write_zarr_store(path.with_suffix(".zarr")), stores.zarr_damages(), *RATE)


def test_zipped_zarr(check: Callable[..., Any]) -> None:
    def make(path: Path) -> Path:
        return toys.write_zip(toys.write_zarr_store(path.with_suffix(".zarr")), path.with_suffix(".zarr.zip"))

    check(make, stores.zip_damages(), *RATE)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_consolidated_metadata_of_zarr_are_ignored(zarr_format: int, tmp_path: Path) -> None:
    """They are not checked, and used to replace the metadata that are, with codecs that unpickle."""
    path = toys.write_zarr_store(tmp_path / "x.zarr", zarr_format=zarr_format)
    zarr.consolidate_metadata(str(path))
    file = path / (".zmetadata" if zarr_format == 2 else "zarr.json")
    found = json.loads(file.read_text())
    entries = found["metadata"] if zarr_format == 2 else found["consolidated_metadata"]["metadata"]
    entries["meta/episode_ends/.zarray" if zarr_format == 2 else "meta/episode_ends"]["shape"] = [1]
    file.write_text(json.dumps(found))
    with open_dataset(path, DatasetMapping(rate=toys.RATE)) as dataset:
        toys.assert_same(dataset.read(), toys.expected())


def test_pickles_in_consolidated_metadata_of_zarr_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before numcodecs 0.16.6, whose codec refuses by itself."""
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    malformed.Canary.path = str(tmp_path / "unpickled")
    path = toys.write_zarr_store(tmp_path / "x.zarr")
    zarr.consolidate_metadata(str(path))
    found = json.loads((path / ".zmetadata").read_text())
    codecs = [{"id": "vlen-utf8"}, {"id": "pickle"}]
    changes = {"dtype": "|O", "filters": codecs, "compressor": None, "fill_value": ""}
    found["metadata"]["meta/episode_ends/.zarray"] |= changes
    (path / ".zmetadata").write_text(json.dumps(found))
    (path / "meta/episode_ends/0").write_bytes(pickle.dumps(malformed.Canary()))
    with pytest.raises(UserError), open_dataset(path, DatasetMapping(rate=toys.RATE)):
        pass
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("name", ["zarr.json", "data/action/zarr.json"])
def test_zarr_with_metadata_of_both_formats_is_refused(name: str, tmp_path: Path) -> None:
    path = toys.write_zarr_store(tmp_path / "x.zarr")
    other = toys.write_zarr_store(tmp_path / "y.zarr", zarr_format=3)
    shutil.copy(other / name, path / name)
    with pytest.raises(UserError, match=f"metadata of formats 2 and 3, '.*' and '{name}'; remove one format"):
        open_dataset(path, DatasetMapping(rate=toys.RATE))


def test_episode_ends_of_zarr_must_be_numbers(tmp_path: Path) -> None:
    path = toys.write_zarr_store(tmp_path / "x.zarr")
    file = path / "meta/episode_ends/.zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "<U4", "fill_value": ""}))
    with pytest.raises(UserError, match=r"'episode_ends' holds .*, expected real numbers"):
        open_dataset(path, DatasetMapping(rate=toys.RATE))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/elsewhere/x", "'elsewhere' of / links to another file"),
        ("via/x", "'elsewhere' of / links to another file"),
        ("stolen", "has more than 16 soft links, or a circle of them"),
    ],
)
def test_links_of_hdf5_by_way_of_other_links_are_refused(target: str, message: str, tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "x.hdf5")
    with h5py.File(tmp_path / "secret.hdf5", "w") as file:
        file["x"] = np.ones((5, 2))
    with h5py.File(path, "a") as file:
        file["elsewhere"] = h5py.ExternalLink("secret.hdf5", "/")
        file["data/demo_0/obs/via"] = h5py.SoftLink("/elsewhere")
        file["data/demo_0/obs/stolen"] = h5py.SoftLink(target)
        del file["data/demo_0/obs/state"], file["data/demo_0/next_obs"]
        file["data/demo_0/obs/state"] = h5py.SoftLink("./stolen")
    with pytest.raises(UserError, match=message):
        open_dataset(path)


def test_soft_links_inside_of_a_file_are_followed(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "x.hdf5")
    with h5py.File(path, "a") as file:
        file.move("data/demo_2/obs/state", "kept/state")
        file["again"] = h5py.SoftLink("kept")
        file["data/demo_2/obs/state"] = h5py.SoftLink("/again/state")
    with open_dataset(path) as dataset:
        toys.assert_same(dataset.read(), toys.expected("reward", tasks=("Lift",) * 3))


def test_masks_of_robomimic_in_another_file_are_refused(tmp_path: Path) -> None:
    path = toys.write_robomimic_file(tmp_path / "x.hdf5")
    (tmp_path / "secret").write_bytes(b"demo_0")
    with h5py.File(path, "a") as file:
        del file["mask/valid"]
        file.create_dataset("mask/valid", (1,), "S6", external=[(str(tmp_path / "secret"), 0, 6)])
    with pytest.raises(UserError, match="/mask/valid lies in another file"):
        open_dataset(path, DatasetMapping(split="train"))


def test_minari_in_hdf5(check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda path: toys.write_minari_dataset(path, monkeypatch, jpeg_encoding=False)  # noqa: E731
    check(make, stores.minari_damages("main_data.hdf5"), *RATE)


def test_minari_in_arrow(check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda path: toys.write_minari_dataset(path, monkeypatch, "arrow", jpeg_encoding=False)  # noqa: E731
    check(make, stores.arrow_damages(), *RATE)


@pytest.mark.parametrize("kind", ["sqlite", "mcap", "bare", "ros1"])
def test_recordings(kind: str, check: Callable[..., Any], tmp_path: Path) -> None:
    mapping, file = tmp_path / "mapping.yaml", {"sqlite": "sqlite.db3", "mcap": "mcap.mcap"}.get(kind, "")
    mapping.write_text(bags.MAPPING)
    damages = stores.rosbag2_damages(file) if file else stores.recording_damages()
    check(lambda path: bags.write_bag(path.with_name(kind), kind), damages, "--mapping", str(mapping))


@pytest.mark.parametrize("name", stores.message_damages())
def test_recordings_with_messages_that_do_not_fit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    topic, change = stores.message_damages()[name]
    original = bags.messages

    def changed(make: Callable[..., Any], **options: Any) -> Iterator[Any]:
        def make_changed(kind: str, **fields: Any) -> Any:
            return make(kind, **(change(fields) if kind == bags.TYPES[topic] else fields))

        return original(make_changed, **options)

    monkeypatch.setattr(bags, "messages", changed)
    path, mapping = bags.write_rosbag2(tmp_path / "bag", "MCAP"), tmp_path / "mapping.yaml"
    mapping.write_text(bags.MAPPING)
    line = refused("data", "convert", path, tmp_path / "out", "--mapping", mapping)
    assert not (tmp_path / "out").exists() and not any(word in line for word in INTERNAL), line
