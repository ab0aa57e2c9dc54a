"""Malformed datasets of every format give one line and exit code 2; nothing is written and nothing unpickled."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import foreign_bags as bags
import foreign_datasets as toys
import malformed
import malformed_stores as stores
import pytest
from malformed import RATE, Damage

from robopolicy.cli.main import MAX_ERROR

for package in ("h5py", "zarr", "minari", "rosbags", "mcap"):
    pytest.importorskip(package, reason="needs robopolicy[hdf5,zarr,minari,record]")

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
