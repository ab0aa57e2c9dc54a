"""Errors that the user can fix, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable
from pathlib import Path

MAX_NAMES = 32  # longer lists of names are not printed


class UserError(Exception):
    """Invalid input: the command line prints the message as one line and exits with code 2.

    The message states what was expected, what was found and what to do, in one sentence without line breaks.
    """


class SimulatorFailed(UserError):
    """An exception in an environment; earlier updates and recordings are intact."""

    @classmethod
    def because(cls, task: str, doing: str, error: BaseException) -> SimulatorFailed:
        """Build the error from the exception `error`, with the file and line that raised it."""
        origin = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place = f"{Path(origin.filename).name}, line {origin.lineno}"
        return cls(f"Task {task} failed {doing}: {' '.join(reason.split())} ({place}).")


def unknown_name(kind: str, name: str, known: Iterable[str], place: str = "") -> UserError:
    """Build the error for a `name` that is not registered, with the nearest registered name.

    `kind` is the expected type ("task", "policy"); `place` adds context, e.g. "of task manipulation/lift".
    """
    options = sorted(known)
    start = f"Unknown {kind} '{name}'{' ' + place if place else ''}.{did_you_mean(name, options)}"
    if len(options) <= MAX_NAMES:
        return UserError(f"{start} Known: {', '.join(options)}.")
    return UserError(f"{start} There are {len(options)}; see 'robopolicy list'.")


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest option, with a leading space; empty without a similar option."""
    known = sorted(options)
    near = difflib.get_close_matches(name, known, n=1)
    if not near:  # "lft" is far from "manipulation/lift" but close to its last part
        last = {option.rsplit("/", 1)[-1]: option for option in known}
        near = [last[part] for part in difflib.get_close_matches(name, last, n=1)]
    return f" Did you mean '{near[0]}'?" if near else ""


def unknown_environment(library: str, env_id: str, known: Iterable[str]) -> UserError:
    """Build the error for an id that another library does not have, with the nearest ids."""
    near = difflib.get_close_matches(env_id, list(known), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return UserError(f"{library} has no environment '{env_id}'.{hint}")


def cannot_write(path: Path, error: Exception) -> UserError:
    """Build the error for a file or folder that cannot be written."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "a file exists where a folder is required"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or (str(error) or "unknown").splitlines()[0]
    codes = (errno.ENOSPC, errno.EDQUOT)  # safetensors gives them only in the message
    full = next((c for c in codes if getattr(error, "errno", None) == c or f"(os error {c})" in str(error)), None)
    reason = os.strerror(full) if full else reason  # libraries describe their own calls
    hint = "free some space or choose another path" if full else "choose another path"
    return UserError(f"Cannot write {path}: {reason}; {hint}.")
