"""LeRobotDataset v3.0 reader and writer on pyarrow and PyAV alone; v2.1 is read, too."""

from robopolicy.data.formats.lerobot.reader import camera_shapes, read_lerobot
from robopolicy.data.formats.lerobot.writer import LeRobotWriter, write_lerobot

__all__ = ["LeRobotWriter", "camera_shapes", "read_lerobot", "write_lerobot"]
