"""Dataset formats, read and written.

LeRobotDataset is the format of the project. All others are converted to it, or read into memory by `read_dataset`.
"""

from robopolicy.data.formats.registry import (
    FORMATS,
    DatasetFormat,
    camera_shapes,
    open_dataset,
    read_dataset,
    write_dataset,
)

__all__ = ["FORMATS", "DatasetFormat", "camera_shapes", "open_dataset", "read_dataset", "write_dataset"]
