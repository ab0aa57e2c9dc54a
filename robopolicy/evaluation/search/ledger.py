"""What a search has played so far, on disk, so that one that was killed goes on where it was.

One JSON object per line: first what was asked for, then every finished evaluation as soon as it is known. A search is a
function of its outcomes, so going on means to run it again and to play only what is not on record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from robopolicy.errors import UserError, cannot_write
from robopolicy.evaluation.result import EvalResult
from robopolicy.files import parse_json, write_text

LEDGER_VERSION = 1

Key = tuple[str, int, int]  # who played, first episode seed, episodes


class Ledger:
    """Finished evaluations by who played which episodes; in memory alone where it has no file."""

    def __init__(self, path: Path | None = None, request: Mapping[str, Any] | None = None) -> None:
        """An empty ledger, written to `path` at once; `request` is kept with it, plain JSON values."""
        self.path = path
        self.request = dict(request or {})
        self._known: dict[Key, EvalResult] = {}
        if path is not None:
            write_text(path, json.dumps({"version": LEDGER_VERSION, "request": self.request}) + "\n")

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Read a ledger to go on with it. A last line that was cut off while it was written is dropped.

        Raises:
            UserError: It is damaged elsewhere, or was written by another version.
        """
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        try:
            head, *rows = [parse_json(line) for line in whole.decode("utf-8").splitlines()] or [{}]
            if head.get("version") != LEDGER_VERSION:
                raise UserError(
                    f"{path} has version {head.get('version')!r}, this robopolicy reads {LEDGER_VERSION}; search anew."
                )
            ledger = cls(request=head["request"])
            ledger._known = {
                (row["who"], row["first"], row["episodes"]): EvalResult.from_dict(row["result"]) for row in rows
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); search anew.") from error
        ledger.path = path
        write_text(path, whole.decode("utf-8") + "\n")
        return ledger

    @property
    def episodes(self) -> int:
        """Episodes on record, of everybody together."""
        return sum(episodes for _, _, episodes in self._known)

    def recall(self, who: str, seeds: Sequence[int], play: Callable[[], EvalResult]) -> EvalResult:
        """The result of `who` on the consecutive episodes `seeds`: from the record, or played and recorded now.

        Raises:
            UserError: The evaluator cannot repeat episodes, so that candidates cannot share them.
            ValueError: It returned other episodes than it was asked for.
        """
        key = (who, seeds[0], len(seeds))
        if key not in self._known:
            result = play()
            if not result.seeded:
                raise UserError(
                    f"The backend of {result.task} cannot repeat an episode from its seed, so candidates would not "
                    "share theirs; choose another --backend."
                )
            if result.seeds.tolist() != list(seeds):
                raise ValueError(f"The evaluator played seeds {result.seeds}, asked for {seeds}.")
            self._append(key, result)
            self._known[key] = result
        return self._known[key]

    def _append(self, key: Key, result: EvalResult) -> None:
        if self.path is None:
            return
        who, first, episodes = key
        row = {"who": who, "first": first, "episodes": episodes, "result": result.to_dict()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error
