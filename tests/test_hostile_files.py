"""Hostile files: archives that expand, headers that claim too much, loops of links; one line and no memory for each."""

from __future__ import annotations

import json
import resource
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from robopolicy.archives import open_zip, read_arrays
from robopolicy.cli.main import MAX_ERROR
from robopolicy.interop.gaussian_actor import check_tensors
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.versions import sha256

pytest_plugins = ["point_mass_fixtures"]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def memory() -> object:
    """No test needs more than 300 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def zipped(path: Path, members: dict[str, bytes], **options: int) -> Path:
    """A zip file."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def expanding(path: Path) -> Path:
    """A zip file of 5 MB with members of 5 GB."""
    chunk = bytes(16 * MIB)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("data", "policy.pth"):
            with archive.open(name, "w", force_zip64=True) as member:
                for _ in range(8):
                    member.write(chunk)
    return path


def encrypted(path: Path) -> Path:
    """A zip file whose members are marked as encrypted."""
    data = bytearray(zipped(path, {"data": b"{}", "policy.pth": b"x"}).read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place >= 0:
            data[place + offset] |= 1
            place = data.find(signature, place + 4)
    path.write_bytes(bytes(data))
    return path


def strange(path: Path) -> Path:
    """A zip file with an unknown compression."""
    data = bytearray(zipped(path, {"data": b"{}", "policy.pth": b"x"}).read_bytes())
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = data.find(signature)
        while place >= 0:
            data[place + offset : place + offset + 2] = struct.pack("<H", 99)
            place = data.find(signature, place + 4)
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (encrypted, "is encrypted"),
        (strange, "unknown compression 99"),
        (expanding, r"expands to"),
        (lambda path: zipped(path, {"data": b"{}", "policy.pth": b"x"}, compression=zipfile.ZIP_LZMA), "unknown comp"),
        (lambda path: zipped(path, {"data": b"{}"}), "is not a model of Stable-Baselines3"),
        (lambda path: zipped(path, {"data": b"[" * 100_000, "policy.pth": b"x"}), "nested too deeply"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)) and path, "is not a model of Stable-Baselines3"),
    ],
    ids=["encrypted", "strange", "bomb", "lzma", "incomplete", "deep", "damaged"],
)
def test_archives_of_sb3(
    make: Callable[[Path], Path], reason: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = make(tmp_path / "model.zip")
    found = refused("import", "sb3", path, "--task", "hopper", "--out", tmp_path / "out")
    assert reason in found and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [("(1000000000, 1000)", "<f8", "bytes has"), ("(2,)", "<c16", "real numbers"), ("(2,)", "|O", "real numbers")],
)
def test_array_headers_are_checked_against_the_file(shape: str, dtype: str, reason: str, tmp_path: Path) -> None:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(32)
    path = zipped(tmp_path / "golden.npz", {"x.npy": data})
    with pytest.raises(ValueError, match=reason):
        read_arrays(path)


def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "c": np.array(True),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    found = read_arrays(tmp_path / "x.npz")
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_tensors_that_claim_more_than_they_store_are_refused() -> None:
    check_tensors({"a": torch.zeros(3), "b": torch.zeros(4, 4).T, "c": 1})
    for tensor in (torch.zeros(1).expand(10**12), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, 2).to_sparse()):
        with pytest.raises(ValueError, match=r"claims more|complex"):
            check_tensors({"a": tensor})
    with pytest.raises(ValueError, match="at most 4"):
        open_zip(_small(), max_bytes=4)


def _small() -> BytesIO:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x", b"12345")
    return stream


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint."""
    policy = GaussianPolicy(GaussianConfig(normalization="identity", hidden=(4,)), PolicySpec({"state": (6,)}, 2))
    save_checkpoint(tmp_path / "policy", policy, task="toy/point_mass", obs_sample={"state": torch.zeros(2, 1, 6)})
    return tmp_path / "policy"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"observation": {"state": [-6]}}, "shapes"),
        ({"observation": {"state": [2**40]}}, "numbers"),
        ({"observation": {"state": [1] * 1000}}, "shapes"),
        ({"observation": {"state": [True]}}, "shapes"),
        ({"action_dim": -2}, "at least 1"),
        ({"action_dim": 2.0}, "integer"),
        ({"horizon": 10**9, "action_horizon": 1}, "at most 4096"),
        ({"horizon": 100_000, "action_dim": 1, "action_horizon": 1}, "at most 4096"),
        ({"obs_horizon": 10**6}, "at most 4096"),
        ({"horizon": "8"}, "integer"),
        ({"action_horizon": 0}, "action_horizon"),
        ({"observation": {"state": [6], "memory": []}}, "one positive size"),
        ({"observation": {"state": [6], "memory": [0]}}, "one positive size"),
    ],
)
def test_sizes_in_manifests(changes: dict, reason: str, checkpoint: Path, refused: Callable[..., str]) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["spec"] |= changes
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    start = time.monotonic()
    assert reason in refused("verify", checkpoint)
    assert time.monotonic() - start < 5


def test_a_network_larger_than_its_weights(checkpoint: Path, refused: Callable[..., str]) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config"]["hidden"] = [200_000, 200_000]  # 160 GB
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "describes a policy of 40" in refused("verify", checkpoint)


def test_complex_weights_and_statistics(checkpoint: Path, refused: Callable[..., str]) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name].to(torch.complex64)}, checkpoint / "model.safetensors")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = sha256(checkpoint / "model.safetensors")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "holds complex numbers" in refused("verify", checkpoint)


@pytest.fixture
def dataset(demonstrations: Path, tmp_path: Path) -> Path:
    """A copy of a small dataset."""
    return Path(shutil.copytree(demonstrations, tmp_path / "data"))


def test_loops_of_links_in_datasets(dataset: Path, refused: Callable[..., str]) -> None:
    for file in (next(dataset.glob("data/*/*.parquet")), next(dataset.glob("meta/episodes/*/*.parquet"))):
        content = file.read_bytes()
        file.unlink()
        file.symlink_to(file.name)
        assert refused("data", "card", dataset)
        file.unlink()
        file.write_bytes(content)
    shutil.rmtree(dataset / "data")
    (dataset / "data").symlink_to("data")
    assert refused("data", "card", dataset)
    shutil.rmtree(dataset / "meta")
    (dataset / "meta").symlink_to("meta")
    assert refused("data", "card", dataset)


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("frame_index", lambda n: [0] * n, "does not count the frames"),
        ("frame_index", lambda n: list(range(5, 5 + n)), "does not count the frames"),
        ("frame_index", lambda n: ["x"] * n, "must hold integers"),
        ("episode_index", lambda n: [0.5] * n, "must hold integers"),
        ("episode_index", lambda n: [None] * n, "must hold integers"),
        ("task_index", lambda n: ["a"] * n, "must hold integers"),
    ],
)
def test_index_columns(
    column: str, values: Callable[[int], list], reason: str, dataset: Path, refused: Callable[..., str]
) -> None:
    file = next(dataset.glob("data/*/*.parquet"))
    table = pq.read_table(file)
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values(len(table)))), file)
    assert reason in refused("data", "card", dataset)


def test_tables_that_expand(dataset: Path, refused: Callable[..., str]) -> None:
    file = next(dataset.glob("data/*/*.parquet"))
    names = pq.read_schema(file).names
    rows = 40_000_000
    constant = pa.repeat(pa.scalar(0, pa.int8()), rows)
    pq.write_table(pa.table(dict.fromkeys(names[:1], constant)), file, compression="zstd", use_dictionary=True)
    assert refused("data", "card", dataset)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "missing", "--out", "a/b/c"],
        [
            "eval",
            "random",
            "--task",
            "lift",
            "--camera",
            "nowhere",
            "--video",
            "1",
            "--episodes",
            "1",
            "--out",
            "a/b/c",
        ],
        ["eval", "random", "--task", "nothing", "--out", "a/b/c"],
        ["play", "random", "--task", "lift", "--camera", "nowhere", "--out", "a/b/c.gif"],
    ],
    ids=["policy", "camera", "task", "play"],
)
def test_a_failed_command_leaves_no_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(*words)
    assert list(tmp_path.iterdir()) == []


def test_error_lines_do_not_control_the_terminal(refused: Callable[..., str]) -> None:
    assert "\x1b" not in refused("eval", "runs/\x1b[2J\r\x85x") and "?[2J" in refused("eval", "runs/\x1b[2J")


def test_error_lines_are_short(refused: Callable[..., str]) -> None:
    found = refused("eval", "x" * 5000)
    assert len(found) <= MAX_ERROR and " ... " in found and found.startswith("robopolicy: error: ")
