"""Conversion of datasets on a full disk: one line, and nothing half-written."""

import subprocess
import sys
from pathlib import Path

import foreign_datasets as toys
import pytest

pytest.importorskip("h5py", reason="needs robopolicy[hdf5]")


def test_a_full_disk_leaves_no_part_of_a_file_of_hdf5(tmp_path: Path) -> None:
    source = toys.write_robomimic_file(tmp_path / "source.hdf5")
    (tmp_path / "out").mkdir()
    program = (
        "import resource, sys; from robopolicy.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); sys.exit(main(sys.argv[1:]))"
    )
    words = ["data", "convert", str(source), str(tmp_path / "out" / "demo.hdf5")]
    found = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr.count("Cannot write")) == (2, 1), found.stderr
    assert "Traceback" not in found.stderr and not list((tmp_path / "out").iterdir())
