"""`robopolicy data convert`: convert a dataset to LeRobotDataset v3.0, or to another format."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, reject_unused
from robopolicy.errors import UserError
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.data.formats.mapping import DatasetMapping
    from robopolicy.data.formats.reader import OpenDataset
    from robopolicy.data.formats.summary import ConversionSummary

HELP = "convert a dataset between formats"
DESCRIPTION = (
    "Convert a dataset. SOURCE is a dataset of LeRobot, robomimic (also MimicGen, LIBERO, Isaac Lab), Diffusion Policy "
    "(zarr), Minari, D4RL or OGBench, an npz file, a recording (rosbag 1 and 2, MCAP), or a mapping file with "
    "'source'. The ending of DESTINATION is the format to write: .hdf5 for robomimic, .zarr, .zarr.zip, .npz, others "
    "LeRobotDataset v3.0. Numbers and images stay equal to the last bit unless --video is set. From LeRobot to "
    "LeRobot, images and video files are copied as they are stored."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the action."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="dataset or mapping file to read")
    parser.add_argument("destination", type=Path, metavar="DESTINATION", help="folder or file to write")
    text = "mapping file: settings that the source does not state, and names of its arrays or topics"
    parser.add_argument("--mapping", type=Path, metavar="FILE.yaml", help=text)
    parser.add_argument("--rate", type=float, default=0.0, metavar="HZ", help="frames per second (default: as stated)")
    parser.add_argument("--task", default="", help="instruction or task id (default: as stated)")
    text = "keep the observation after the last action as a closing frame (default: drop it)"
    parser.add_argument("--closing", action="store_true", help=text)
    parser.add_argument("--repair", action="store_true", help="read an incomplete MCAP file up to its damage")
    text = "format to write: lerobot, robomimic, zarr, minari or npz (default: by the ending of DESTINATION)"
    parser.add_argument("--format", default="", metavar="FORMAT", help=text)
    text = "LeRobot: store images as video, which loses detail (default: lossless, without re-encoding PNG and JPEG)"
    parser.add_argument("--video", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Convert the dataset and print what was read; return 0."""
    from robopolicy.data.formats.registry import format_to_write, open_dataset, resolve_source
    from robopolicy.data.formats.summary import ConversionSummary

    format = format_to_write(args.destination, args.format)
    if format != "lerobot":
        reject_unused(args, f"for {format}, which has no videos", "--video")
    source, mapping = resolve_source(args.source, args.mapping)
    given = {name: getattr(args, name) for name in ("rate", "task", "closing", "repair") if f"--{name}" in args.given}
    _check_destination(args, source, format)
    summary, mapping = ConversionSummary(), replace(mapping, **given)
    if format == "lerobot" and not args.video and _is_copy(source, mapping):
        origin = _copy(args, source, mapping.task, summary)
    else:
        with open_dataset(source, mapping) as dataset:
            _write(args, format, dataset, summary)
            origin = dataset.origin()
    facts = summary.facts(origin, format, args.destination)
    print(json.dumps(facts) if args.json else "\n".join(describe(facts)))
    return 0


def _check_destination(args: argparse.Namespace, source: Path, format: str) -> None:
    from robopolicy.data.formats.registry import LEROBOT_INFO
    from robopolicy.files import check_new_file, check_new_folder

    if not source.exists():
        raise UserError(f"There is no dataset at {source}.")
    file = format in ("robomimic", "npz") or args.destination.suffix == ".zip"
    if file:
        if args.destination.exists() and args.destination.samefile(source):
            raise UserError(f"{args.destination} is the input of this command; choose another file.")
        check_new_file(args.destination, overwrite=args.overwrite)
        return
    markers = {"lerobot": (LEROBOT_INFO,), "zarr": (".zgroup",), "minari": ("data/metadata.json",)}[format]
    what = f"a dataset of {format}"
    check_new_folder(args.destination, what, *markers, overwrite=args.overwrite, sources=[source])


def _write(args: argparse.Namespace, format: str, dataset: OpenDataset, summary: ConversionSummary) -> None:
    """Write all episodes, each of which `summary` sees."""
    from robopolicy.data.formats.lerobot import LeRobotWriter
    from robopolicy.data.formats.registry import write_dataset

    episodes = summary.observe(dataset)
    if format != "lerobot":
        action_type = dataset.reader.action_type
        write_dataset(args.destination, format, episodes, dataset.control_dt, dataset.names, action_type)
        return
    options = {"video": args.video, "overwrite": args.overwrite, "names": dataset.names}
    options["action_type"] = dataset.reader.action_type
    with LeRobotWriter(args.destination, control_dt=dataset.control_dt, **options) as writer:
        for episode in episodes:
            writer.add(episode)


def _is_copy(source: Path, mapping: DatasetMapping) -> bool:
    """Whether all frames of a LeRobotDataset stay as they are."""
    from robopolicy.data.formats.lerobot.layout import INDEX_FEATURES
    from robopolicy.data.formats.lerobot.reader import DatasetFiles
    from robopolicy.data.formats.mapping import DatasetMapping
    from robopolicy.data.formats.registry import detect_format

    unchanged = replace(mapping, source="", task="") == DatasetMapping()
    return (
        unchanged and detect_format(source) == "lerobot" and {*INDEX_FEATURES} <= {*DatasetFiles.open(source).features}
    )


def _copy(args: argparse.Namespace, source: Path, task: str, summary: ConversionSummary) -> dict[str, Any]:
    """Copy a LeRobotDataset without decoding its cameras, and note its numbers; return the facts of its origin."""
    from robopolicy.data.formats.lerobot import read_lerobot
    from robopolicy.data.formats.lerobot.copying import Edit, EpisodeCopier
    from robopolicy.data.formats.lerobot_reader import RATE_ORIGIN

    edit = Edit(instruction=task or None)
    with EpisodeCopier(args.destination, edit=edit, overwrite=args.overwrite, command="data convert") as copier:
        copier.add(source)
    episodes = read_lerobot(args.destination, images=False)
    for _ in summary.observe(map(episodes.episode, range(episodes.num_episodes))):
        pass
    notes = [f"copied as stored: {counted(copier.videos, 'video file')}"] if copier.videos else []
    rate = {"rate": 1 / episodes.control_dt, "rate_origin": RATE_ORIGIN}
    return {"source": str(source), "source_format": "lerobot", **rate, "ignored": [], "notes": notes}


def describe(facts: dict[str, Any]) -> list[str]:
    """Lines about a conversion."""
    from robopolicy.evaluation.report import aligned

    rate = f"{facts['rate']:.6g} Hz ({facts['rate_origin']})"
    counts = f"{counted(facts['episodes'], 'episode')}, {counted(facts['frames'], 'frame')} at {rate}"
    rows = [
        (key, _shape(entry["shape"]), entry["type"], *(_numbers(entry[end]) for end in ("minimum", "maximum")))
        for key, entry in facts["features"].items()
    ]
    lines = [f"{facts['source']} ({facts['source_format']}): {counts}"]
    lines += aligned(("key", "shape", "type", "minimum", "maximum"), rows).splitlines()
    if facts["ignored"]:
        lines.append(f"ignored: {', '.join(facts['ignored'])}")
    lines += [f"note: {note}" for note in facts["notes"]]
    return [*lines, f"wrote {facts['destination']} ({facts['destination_format']})"]


def _shape(sizes: list[int]) -> str:
    return " x ".join(map(str, sizes)) or "1"


def _numbers(value: Any) -> str:
    """Numbers with few digits, of which at most 8 are shown."""
    if not isinstance(value, list):
        return f"{value:.4g}"
    shown = " ".join(f"{each:.4g}" for each in value[:8])
    return shown if len(value) <= 8 else f"{shown} ..."
