"""The one exception that means "the user can fix this", and the did-you-mean helper behind every name lookup."""

from __future__ import annotations

import difflib
import errno
import traceback
from collections.abc import Iterable
from pathlib import Path

MAX_NAMES = 32  # longer lists do not help in an error line


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    State what was expected, what was found and what to do, in one sentence without line breaks.
    """


class SimulatorFailed(UserError):
    """An environment raised an exception; what was learned or recorded before it is intact."""

    @classmethod
    def because(cls, task: str, doing: str, error: BaseException) -> SimulatorFailed:
        """Build the error for an exception `error`, with the file and line where it was raised."""
        origin = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place = f"{Path(origin.filename).name}, line {origin.lineno}"
        return cls(f"Task {task} failed {doing}: {' '.join(reason.split())} ({place}).")


def unknown_name(kind: str, name: str, known: Iterable[str], place: str = "") -> UserError:
    """Build the error for a name that is not registered, suggesting the nearest one.

    Args:
        kind: What the name should have been ("task", "policy", "algorithm").
        name: What was asked for.
        known: The registered names.
        place: Where it should have been known ("of task manipulation/lift").
    """
    options = sorted(known)
    start = f"Unknown {kind} '{name}'{' ' + place if place else ''}.{did_you_mean(name, options)}"
    if len(options) <= MAX_NAMES:
        return UserError(f"{start} Known: {', '.join(options)}.")
    return UserError(f"{start} There are {len(options)}; see 'robopolicy list'.")


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Sentence that suggests the nearest of `options`, after a space; empty if none is near."""
    known = sorted(options)
    near = difflib.get_close_matches(name, known, n=1)
    if not near:  # "lft" is far from "manipulation/lift" but close to its last part
        last = {option.rsplit("/", 1)[-1]: option for option in known}
        near = [last[part] for part in difflib.get_close_matches(name, last, n=1)]
    return f" Did you mean '{near[0]}'?" if near else ""


def unknown_environment(library: str, env_id: str, known: Iterable[str]) -> UserError:
    """Build the error for an id that another library does not have, suggesting the nearest ones."""
    near = difflib.get_close_matches(env_id, list(known), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return UserError(f"{library} has no environment '{env_id}'.{hint}")


def cannot_write(path: Path, error: Exception) -> UserError:
    """Build the error for a place where a file or folder could not be written."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "a file is in the place of a folder"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or (str(error) or "unknown").splitlines()[0]
    codes = (errno.ENOSPC, errno.EDQUOT)  # safetensors gives them only in the message
    full = getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes)
    todo = "free some space or choose another place" if full else "choose another place"
    return UserError(f"Cannot write {path}: {reason}; {todo}.")
