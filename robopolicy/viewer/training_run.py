"""Newest policy and metrics of a run that another process trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robopolicy.policies.base import Policy
from robopolicy.training.loggers import read_jsonl

METRICS = "metrics.jsonl"


class NewestPolicy:
    """Call that returns the policy of a checkpoint, loaded again after its `manifest` has changed."""

    def __init__(self, manifest: Path, load: Callable[[], Policy]) -> None:
        self._manifest, self._load = manifest, load
        self._time: int | None = None
        self._policy: Policy | None = None

    def __call__(self) -> Policy:
        """Return the newest policy."""
        time = self._manifest.stat().st_mtime_ns if self._manifest.exists() else self._time
        if self._policy is None or time != self._time:
            self._policy, self._time = self._load(), time
        return self._policy


def read_metrics(folder: Path) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Read `{name: (updates, values)}` of a run: success and return first, then the others in the order of the file."""
    file = folder / METRICS
    columns: dict[str, list[tuple[float, float]]] = {"rollout/success": [], "rollout/return": []}
    for row in read_jsonl(file) if file.exists() else []:
        for name, value in row.items():
            if name != "update" and isinstance(value, int | float):
                columns.setdefault(name, []).append((row["update"], value))
    found = {name: np.array(points, np.float64) for name, points in columns.items() if points}
    return {name: (points[:, 0], points[:, 1]) for name, points in found.items()}
