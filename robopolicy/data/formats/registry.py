"""Table of dataset formats: the files that they have, their readers and their writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import load

if TYPE_CHECKING:
    from robopolicy.data.episodes import Episode, Episodes
    from robopolicy.data.formats.mapping import DatasetMapping
    from robopolicy.data.formats.reader import OpenDataset

LEROBOT_INFO = "meta/info.json"
MAPPINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class DatasetFormat:
    """One format of datasets, or several that share their files."""

    files: str  # description of its files
    matches: Callable[[Path], bool]  # whether an existing path looks like one
    reader: str  # "module:function", called with a path and a mapping
    writer: str = ""  # "module:function", called with a path, episodes and their facts to collect; empty: none
    suffixes: tuple[str, ...] = ()  # endings of the names of its files


def _file(*suffixes: str) -> Callable[[Path], bool]:
    return lambda path: path.is_file() and path.name.endswith(suffixes)


def _recording(path: Path) -> bool:
    if path.is_dir():
        return (path / "metadata.yaml").is_file() or any(
            each.suffix in _BAGS or (each / "metadata.yaml").is_file() for each in path.iterdir()
        )
    return path.suffix in _BAGS


_HERE = "robopolicy.data.formats"
_BAGS = (".bag", ".mcap", ".db3")
_HDF5 = (".hdf5", ".h5", ".hdf")

FORMATS: dict[str, DatasetFormat] = {
    "lerobot": DatasetFormat(
        "a folder with meta/info.json",
        lambda path: (path / LEROBOT_INFO).is_file(),
        f"{_HERE}.lerobot_reader:open_lerobot",
    ),
    "minari": DatasetFormat(
        "a folder NAME-vN with data/metadata.json",
        lambda path: any((path / name).is_file() for name in ("data/metadata.json", "metadata.json")),
        f"{_HERE}.minari:MinariReader",
        f"{_HERE}.minari:write_minari",
    ),
    "zarr": DatasetFormat(
        "a folder or zip file of zarr with meta/episode_ends",
        lambda path: any((path / name).is_file() for name in (".zgroup", "zarr.json")) or _file(".zip", ".zarr")(path)
        or (path.is_dir() and path.suffix == ".zarr"),
        f"{_HERE}.zarr_store:open_zarr",
        f"{_HERE}.zarr_store:write_zarr",
        (".zarr", ".zarr.zip"),
    ),
    "robomimic": DatasetFormat(
        "HDF5 of robomimic, MimicGen, LIBERO, Isaac Lab or D4RL",
        _file(*_HDF5),
        f"{_HERE}.hdf5_layouts:open_hdf5",
        f"{_HERE}.robomimic:write_robomimic",
        _HDF5,
    ),
    "npz": DatasetFormat(
        "npz with episode_ends, or the names of D4RL or OGBench",
        _file(".npz"),
        f"{_HERE}.flat:open_npz",
        f"{_HERE}.flat:write_npz",
        (".npz",),
    ),
    "rosbag": DatasetFormat("rosbag 1, rosbag 2 or MCAP", _recording, f"{_HERE}.bags:BagReader"),
}  # fmt: skip


def open_dataset(path: str | Path, mapping: DatasetMapping | None = None) -> OpenDataset:
    """Open a dataset of any format; its episodes are read when they are needed.

    Args:
        path: Dataset.
        mapping: Settings that its files do not state.

    Returns:
        Context manager with the episodes.

    Raises:
        UserError: There is no dataset of a known format, a library is missing, or a setting is needed.
    """
    from robopolicy.data.formats.mapping import DatasetMapping
    from robopolicy.data.formats.reader import OpenDataset

    path, mapping = Path(path), mapping or DatasetMapping()
    reader = load(FORMATS[detect_format(path)].reader)(path, mapping)
    try:
        return OpenDataset(path, reader, mapping)
    except BaseException:
        reader.close()
        raise


def read_dataset(path: str | Path, *, task: str = "", reward: str = "sparse", images: bool = True) -> Episodes:
    """Read a dataset of any format, or the source of a mapping file, into memory, with or without the cameras.

    With a `task` of OGBench, its files get the rewards of that task, as `read_ogbench` describes.
    """
    from robopolicy.data.formats.lerobot import read_lerobot
    from robopolicy.data.formats.ogbench import PREFIX, is_ogbench, read_ogbench

    path, mapping = resolve_source(Path(path))
    if not path.exists() or (path / LEROBOT_INFO).is_file():
        return read_lerobot(path, images=images)
    if task.startswith(PREFIX) and is_ogbench(path):
        return read_ogbench(path, task, reward=reward)
    with open_dataset(path, mapping) as dataset:
        return dataset.read(images=images)


def camera_shapes(path: str | Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes `(3, height, width)` of the cameras of a dataset of any format."""
    from robopolicy.data.formats import lerobot

    path, mapping = resolve_source(Path(path))
    if (path / LEROBOT_INFO).is_file():
        return lerobot.camera_shapes(path)
    with open_dataset(path, mapping) as dataset:
        return dataset.camera_shapes()


def resolve_source(path: Path, mapping_file: Path | None = None) -> tuple[Path, DatasetMapping]:
    """Return the path of a dataset and its mapping; `path` may be a mapping file that names its source.

    Raises:
        UserError: A mapping file cannot be read, or names no source.
    """
    from robopolicy.data.formats.mapping import DatasetMapping, load_mapping

    if path.suffix not in MAPPINGS:
        return path, load_mapping(mapping_file) if mapping_file else DatasetMapping()
    if mapping_file is not None:
        raise UserError(f"{path} and {mapping_file} are both mapping files; pass one of them.")
    mapping = load_mapping(path)
    if not mapping.source:
        raise UserError(f"{path.name} has no 'source', the dataset that it describes.")
    return Path(mapping.source), mapping


def write_dataset(
    path: Path,
    format: str,
    episodes: Iterable[Episode],
    control_dt: float,
    names: Mapping[str, Sequence[str]],
    action_type: str = "",
) -> None:
    """Write episodes in a format other than LeRobot's; the path must be free.

    Args:
        path: File or folder to write.
        format: Name of a format with a writer.
        episodes: Episodes with the same keys.
        control_dt: Control step [s].
        names: Names of the entries of vectors, by key.
        action_type: Whether actions are `absolute` or `delta`; empty if unknown.

    Raises:
        UserError: Two keys have the same name in the format, or the format cannot hold the episodes.
    """
    from robopolicy.data.formats.stored_facts import FactsOfEpisodes, with_distinct_names

    facts = FactsOfEpisodes(control_dt, names, action_type)
    load(FORMATS[format].writer)(path, with_distinct_names(episodes), facts)


def detect_format(path: Path) -> str:
    """Name of the format of an existing dataset; raises a `UserError` if there is none."""
    if not path.exists():
        raise UserError(f"There is no dataset at {path}.")
    found = next((name for name, row in FORMATS.items() if row.matches(path)), "")
    if not found:
        known = "; ".join(row.files for row in FORMATS.values())
        raise UserError(f"{path} has no known format: expected {known}.")
    return found


def format_to_write(path: Path, name: str = "") -> str:
    """Format of a dataset to write: `name`, or by the ending of the path; without one LeRobot's."""
    writable = [format for format, row in FORMATS.items() if row.writer or format == "lerobot"]
    if name and name not in writable:
        raise unknown_name("format", name, writable)
    by_suffix = (
        format for format, row in FORMATS.items() if row.writer and path.name.endswith(row.suffixes or ("\0",))
    )
    return name or next(by_suffix, "lerobot")
