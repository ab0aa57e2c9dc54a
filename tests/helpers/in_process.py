"""A worker of the training package without a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robopolicy.training.parallel import WorkerHandle


class InProcessHandle(WorkerHandle):
    """A handle whose worker is in this process and is called when its result is read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.worker, self._pending = make(), None

    def submit(self, name: str, *arguments: Any) -> None:
        self._pending = name, arguments

    def result(self) -> Any:
        name, arguments = self._pending
        return getattr(self.worker, name)(*arguments)

    def close(self) -> None:
        self._pending = None
