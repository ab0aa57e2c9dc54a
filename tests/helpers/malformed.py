"""Malformed datasets: bytes cut or replaced, and contents that no reader may accept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import foreign_datasets as toys
import numpy as np

Damage = Callable[[Path], object]  # damages the dataset at a path
RATE = ("--rate", "20")


class Canary:
    """Object whose unpickling creates the file `path`."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def byte_damages(cuts: int = 12) -> Iterator[tuple[str, Damage]]:
    """Files that are cut, empty, or of another kind."""
    for number in range(cuts):
        yield f"cut to {number}/{cuts}", partial(_cut, fraction=number / cuts)
    yield "last byte missing", lambda path: path.write_bytes(path.read_bytes()[:-1])
    for size in (1, 4, 8, 16):
        yield f"first {size} bytes are zero", partial(_replace, size=size)
    for name, content in (
        ("text", b"state,action\n1,2\n"),
        ("JSON", b"{}"),
        ("a picture", b"\x89PNG\r\n\x1a\n" + bytes(64)),
        ("an empty zip file", b"PK\x05\x06" + bytes(18)),
        ("noise", bytes(np.random.default_rng(0).integers(0, 256, 5000, np.uint8))),
        ("zeros", bytes(5000)),
    ):
        yield f"{name} in its place", partial(_write, content=content)


def _cut(path: Path, fraction: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(fraction * len(data))])


def _replace(path: Path, size: int) -> None:
    path.write_bytes(bytes(size) + path.read_bytes()[size:])


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _damage_heap(path: Path) -> None:
    """Damage the list of free places among the names of the root group."""
    data = bytearray(path.read_bytes())
    place = data.index(b"HEAP") + 16
    data[place : place + 8] = b"\x07" * 8
    path.write_bytes(data)


def _edited(path: Path, edit: Callable[[Any], object]) -> None:
    import h5py

    with h5py.File(path, "a") as file:
        edit(file)


def hdf5_damages(action: str, state: str, reward: str) -> Iterator[tuple[str, Damage]]:
    """Arrays of an HDF5 file that are missing, elsewhere, gigantic, or of other types and shapes."""
    import h5py

    def put(name: str, value: Any, **options: Any) -> Callable[[Any], object]:
        def edit(file: Any) -> None:
            del file[name]
            file.create_dataset(name, data=value, **options) if options else file.__setitem__(name, value)

        return edit

    def change(name: str, function: Callable[[Any], Any]) -> Callable[[Any], object]:
        return lambda file: put(name, function(file[name][()]))(file)

    def declared(name: str, shape: tuple[int, ...], **options: Any) -> Callable[[Any], object]:
        def edit(file: Any) -> None:
            del file[name]
            file.create_dataset(name, shape=shape, dtype="f8", **options)

        return edit

    def virtual(file: Any) -> None:
        del file[action]
        layout = h5py.VirtualLayout((5, 2), "f8")
        layout[:] = h5py.VirtualSource("other.hdf5", "x", (5, 2))
        file.create_virtual_dataset(action, layout)

    steps = len(toys.TOYS[0].action)
    for name, what in ((action, "actions"), (state, "states")):
        rows: dict[str, Callable[[Any], object]] = {
            "missing": lambda file, name=name: file.__delitem__(name),
            "not a number": change(
                name, lambda array: np.where(np.arange(array.size) == 3, np.nan, array.flat).reshape(array.shape)
            ),
            "infinite": change(name, lambda array: array + np.inf),
            "text": put(name, np.array(["a"] * steps, "S1")),
            "variable text": put(name, ["a"] * steps),
            "complex": change(name, lambda array: array * 1j),
            "structures": put(name, np.zeros(steps, [("x", "f4")])),
            "long doubles": change(name, lambda array: array.astype(np.longdouble)),
            "a scalar": put(name, 1.0),
            "empty": put(name, h5py.Empty("f4")),
            "without rows": change(name, lambda array: array[:0]),
            "without columns": change(name, lambda array: array[:, :0]),
            "too short": change(name, lambda array: array[:-2]),
            "too long": change(name, lambda array: np.concatenate([array, array])),
            "in another file": put(name, h5py.ExternalLink("other.hdf5", "/x")),
            "a broken link": put(name, h5py.SoftLink("/nowhere")),
            "gigantic": declared(name, (2**50, 2)),
            "gigantic in chunks": declared(name, (2**40, 2), chunks=(1, 2)),
        }
        for what_is, edit in rows.items():
            yield f"{what} {what_is}", partial(_edited, edit=edit)
    yield "names of the root damaged", _damage_heap
    yield "actions a group", partial(_edited, edit=lambda file: (file.__delitem__(action), file.create_group(action)))
    yield "actions virtual", partial(_edited, edit=virtual)
    yield "actions of three axes", partial(_edited, edit=change(action, lambda array: array[:, :, None, None]))
    yield "rewards of two columns", partial(_edited, edit=change(reward, lambda array: np.stack([array, array], 1)))
    yield "rewards text", partial(_edited, edit=put(reward, np.array(["a"] * steps, "S1")))


def robomimic_damages() -> Iterator[tuple[str, Damage]]:
    """Damages of a file of robomimic."""
    demo = "data/demo_0"
    yield from byte_damages()
    yield from hdf5_damages(f"{demo}/actions", f"{demo}/obs/state", f"{demo}/rewards")

    def attribute(value: Any) -> Callable[[Any], object]:
        return lambda file: file["data"].attrs.__setitem__("env_args", value)

    def empty(file: Any) -> None:
        for name in toys.NAMES:
            del file[f"data/{name}"]

    def only_states(file: Any) -> None:
        for name in toys.NAMES:
            del file[f"data/{name}/obs"]

    rows: dict[str, Callable[[Any], object]] = {
        "no data": lambda file: file.__delitem__("data"),
        "no demonstrations": empty,
        "states of a simulator alone": only_states,
        "data an array": lambda file: (file.__delitem__("data"), file.__setitem__("data", np.zeros(3))),
        "a demonstration an array": lambda file: file.__setitem__("data/demo_3", np.zeros(3)),
        "a demonstration without observations": lambda file: file.__delitem__(f"{demo}/obs"),
        "a further observation": lambda file: file.__setitem__(f"{demo}/obs/extra", np.zeros((5, 1))),
        "a wider action": lambda file: (
            file.__delitem__(f"{demo}/actions"),
            file.__setitem__(f"{demo}/actions", np.zeros((5, 3))),
        ),
        "a smaller image": lambda file: (
            file.__delitem__(f"{demo}/obs/image"),
            file.__setitem__(f"{demo}/obs/image", np.zeros((5, 8, 8, 3), np.uint8)),
        ),
        "no rate": attribute(json.dumps({"env_name": "x"})),
        "rate 0": attribute(json.dumps({"env_kwargs": {"control_freq": 0}})),
        "rate a text": attribute(json.dumps({"env_kwargs": {"control_freq": "20"}})),
        "rate infinite": attribute('{"env_kwargs": {"control_freq": Infinity}}'),
        "env_args no JSON": attribute("{"),
        "env_args a list": attribute("[1]"),
        "env_args too deep": attribute("[" * 50_000),
        "success of one demonstration": lambda file: file[demo].attrs.__setitem__("success", True),
    }
    for name, edit in rows.items():
        yield name, partial(_edited, edit=edit)


def d4rl_damages() -> Iterator[tuple[str, Damage]]:
    """Damages of a file of D4RL."""
    yield from byte_damages()
    yield from hdf5_damages("actions", "observations", "rewards")
    rows: dict[str, Callable[[Any], object]] = {
        "no ends": lambda file: (file.__delitem__("timeouts"), file.__delitem__("terminals")),
        "no timeouts": lambda file: file.__delitem__("timeouts"),
        "timeouts text": lambda file: (
            file.__delitem__("timeouts"),
            file.__setitem__("timeouts", np.array(["a"] * 26, "S1")),
        ),
        "terminals too short": lambda file: (
            file.__delitem__("terminals"),
            file.__setitem__("terminals", np.zeros(3, bool)),
        ),
    }
    for name, edit in rows.items():
        yield name, partial(_edited, edit=edit)


def npz_damages(arrays: Callable[[], dict[str, Any]], names: tuple[str, str, str]) -> Iterator[tuple[str, Damage]]:
    """Damages of an npz file; `names` are its action, its state and its ends of episodes."""
    action, state, ends = names

    def saved(path: Path, change: Callable[[dict[str, Any]], object], save: Any = np.savez) -> None:
        found = arrays()
        change(found)
        save(path, **found)

    def put(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
        return lambda found: found.__setitem__(name, value(found[name]) if callable(value) else value)

    for name, damage in byte_damages():
        yield name, lambda path, damage=damage: (saved(path, len), damage(path))
    rows = len(arrays()[action])
    for name, what in ((action, "actions"), (state, "states")):
        values: dict[str, Any] = {
            "not a number": lambda array: array * np.nan,
            "infinite": lambda array: array + np.inf,
            "text": np.array(["a"] * rows),
            "complex": lambda array: array * 1j,
            "dates": np.zeros(rows, "M8[s]"),
            "structures": np.zeros(rows, [("x", "f4")]),
            "a scalar": np.float32(1),
            "without rows": lambda array: array[:0],
            "without columns": lambda array: array[:, :0],
            "too short": lambda array: array[:-2],
            "too long": lambda array: np.concatenate([array, array]),
            "objects": np.array([Canary()] * rows, object),
            "one object": np.array(Canary(), object),
            "long doubles": lambda array: array.astype(np.longdouble),
        }
        for what_is, value in values.items():
            yield f"{what} {what_is}", partial(saved, change=put(name, value))
    yield "actions missing", partial(saved, change=lambda found: found.pop(action))
    yield "ends missing", partial(saved, change=lambda found: found.pop(ends))
    yield "ends text", partial(saved, change=put(ends, np.array(["a"])))
    yield "ends objects", partial(saved, change=put(ends, np.array([Canary()], object)))
    yield "actions of three axes", partial(saved, change=put(action, lambda array: array[:, :, None, None]))
    for name, member in (
        ("member outside", "../evil.npy"),
        ("absolute member", "/evil.npy"),
        ("member twice", f"{action}.npy"),
    ):
        yield name, partial(_add_member, write=partial(saved, change=len), member=member)
    yield (
        "gigantic header",
        partial(_gigantic, write=partial(saved, change=lambda found: found.pop(action)), name=action),
    )


def _add_member(path: Path, write: Damage, member: str) -> None:
    import warnings
    import zipfile

    write(path)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(member, b"x")


def _gigantic(path: Path, write: Damage, name: str) -> None:
    import struct
    import zipfile

    write(path)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1125899906842624, 2), }\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))


def episode_end_damages() -> dict[str, Any]:
    """Ends of episodes that are wrong for 26 frames."""
    return {
        "fall": np.array([14, 5, 26]),
        "repeat": np.array([5, 5, 26]),
        "begin at 0": np.array([0, 5, 26]),
        "are negative": np.array([-5, 5, 26]),
        "end early": np.array([5, 14]),
        "end late": np.array([5, 14, 27]),
        "are fractions": np.array([5.0, 14.0, 26.0]),
        "have two axes": np.array([[5, 14, 26]]),
        "are a scalar": np.array(26),
        "are none": np.array([], np.int64),
    }
