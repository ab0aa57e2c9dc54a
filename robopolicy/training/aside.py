"""The best policy that a resume point knows, kept until the next one: a run that is killed may have found a better.

A resumed run repeats what came after its resume point, and goes back to its best policy after a collapse: that has to
be the best of then, or it would learn from its own future.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robopolicy.files import recover
from robopolicy.training.manifest import read_manifest


def keep(best: Path) -> None:
    """Set the checkpoint `best` aside, before another takes its place."""
    if best.is_dir() and not _aside(best).exists():
        best.rename(_aside(best))


def forget(best: Path) -> None:
    """A new resume point knows the present `best`."""
    shutil.rmtree(_aside(best), ignore_errors=True)


def bring_back(best: Path, known: Mapping[str, Any] | None) -> None:
    """Before a run goes on from a resume point.

    Args:
        best: Checkpoint of the best policy.
        known: What the resume point says of it, `update` among others; None if it knows none.
    """
    recover(best)
    if known is not None and _aside(best).exists() and not (best.exists() and _update_of(best) == known["update"]):
        shutil.rmtree(best, ignore_errors=True)
        _aside(best).rename(best)
    forget(best)


def _aside(best: Path) -> Path:
    return best.with_name(f"{best.name}.before")


def _update_of(checkpoint: Path) -> int:
    return int(read_manifest(checkpoint).training["update"])
