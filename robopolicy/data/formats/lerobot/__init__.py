"""LeRobotDataset v3.0 reader and writer and reader of v2.1, on pyarrow and PyAV."""

from robopolicy.data.formats.lerobot.reader import camera_shapes, read_lerobot
from robopolicy.data.formats.lerobot.writer import LeRobotWriter, write_lerobot

__all__ = ["LeRobotWriter", "camera_shapes", "read_lerobot", "write_lerobot"]
