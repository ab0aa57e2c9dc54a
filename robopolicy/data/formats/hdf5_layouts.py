"""Choice between the layouts of HDF5 files."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from robopolicy.data.formats.flat import open_d4rl
from robopolicy.data.formats.foreign import foreign_errors
from robopolicy.data.formats.hdf5 import Hdf5File
from robopolicy.data.formats.mapping import DatasetMapping
from robopolicy.data.formats.reader import DatasetReader
from robopolicy.data.formats.robomimic import RobomimicReader
from robopolicy.errors import UserError


def open_hdf5(path: Path, mapping: DatasetMapping) -> DatasetReader:
    """Open a file of robomimic or its variants, or of D4RL; raises a `UserError` for other files."""
    file = Hdf5File(path)
    with closing(file), foreign_errors(path):
        names = list(file.root)
    if "data" in names:
        return RobomimicReader(path, mapping)
    if any(name.startswith("episode_") for name in names):
        raise UserError(f"{path} belongs to a Minari dataset; pass the folder that contains it.")
    return open_d4rl(path, mapping)
