"""Dataset formats, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robopolicy.data.episodes import Episodes


def read_dataset(path: str | Path, *, task: str = "", reward: str = "sparse") -> Episodes:
    """Read a folder in LeRobot's format, or a file of OGBench with the rewards of the single task `task`."""
    from robopolicy.data.formats.lerobot import read_lerobot
    from robopolicy.data.formats.ogbench import read_ogbench

    return read_ogbench(path, task, reward=reward) if Path(path).suffix == ".npz" else read_lerobot(path)
