"""Where verbs write: what lies there stays, unless `--overwrite` is passed. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from robopolicy.errors import UserError


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    """Whether what lies in the place of `--out` may be replaced."""
    parser.add_argument("--overwrite", action="store_true", help="replace what is there already, if it is of this kind")


def check_search(out: Path, record: str, *, resume: bool, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Refuse to search where something is that neither goes on nor may be replaced.

    Args:
        out: Folder of the checkpoint to come.
        record: Name of the file in it that a search keeps.
        resume: Whether a search that was begun is to go on.
        overwrite: Whether a checkpoint or a search may be replaced.
        sources: Checkpoints that it is made of.

    Raises:
        UserError: There is no search to go on with, or the place is taken.
    """
    from robopolicy.files import check_new_folder
    from robopolicy.training.manifest import MANIFEST

    begun = (out / record).is_file()
    if resume:
        if overwrite:
            raise UserError("--resume goes on and --overwrite begins anew; leave one of them out.")
        if not begun:
            raise UserError(f"There is no search to go on with in {out}; leave --resume out.")
        return
    if begun and not overwrite and not (out / MANIFEST).is_file():
        raise UserError(f"The search in {out} was interrupted; go on with --resume, or begin anew with --overwrite.")
    check_new_folder(out, "a checkpoint", MANIFEST, record, overwrite=overwrite, sources=sources)
